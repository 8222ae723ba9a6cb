"""Checkpoint: saves the run periodically, and keeps the best and the newest checkpoints."""

import itertools
import logging
import math
import string
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..base.checkpoint_index import CheckpointIndex, Entry, is_name
from ..base.errors import CheckpointError, ConfigError, did_you_mean
from ..base.location import Location, checkpoints_of, to_absolute, to_location
from .checkpoint_callback import CheckpointCallback
from .monitor import Monitor

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")

NEW = ""
"""Stands for a checkpoint that has no name yet; no checkpoint has this one."""


class Template(string.Formatter):
    """Formats fields whose names may have any characters but braces, colons and exclamation marks."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the value of a field; dots and brackets belong to its name."""
        return kwargs[field_name], field_name


def checkpoint_name(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with values in place of its fields, which are names of metrics, `epoch` or `step`.

    Raises ConfigError for a field without a value, and for a result that is no plain name.
    """
    try:
        name = Template().vformat(template, (), values)
    # a metric that was not logged, or a format that no float takes, such as :d
    except (KeyError, ValueError) as error:
        field = str(error.args[0])
        raise ConfigError(
            f"Checkpoint: filename={template!r} cannot be filled in: {field}.{did_you_mean(field, values)} There are "
            f"{', '.join(sorted(values))}."
        ) from None
    if not is_name(name):
        raise ConfigError(
            f"Checkpoint: filename={template!r} makes {name!r}, which is no plain name; it becomes a folder in "
            f"dirpath, so it must have no '/' and not begin with a dot."
        )
    return name


class Checkpoint(CheckpointCallback):
    """Saves to `checkpoints/step-00001200` in the run directory.

    Keeps the `save_top_k` best by `monitor` (without one: the newest; -1: all) and, with `save_last`, the newest. If
    neither steps, epochs nor a time is given, it saves every epoch: at the end of validation if validation logs the
    monitored metric, else at the end of the training epoch. It deletes only checkpoints that this run wrote, and only
    once their replacement is complete.

    Args:
        monitor: a name in `trainer.callback_metrics`. Values of an earlier step (of a validation, or the mean over the
            epoch before) do not count, nor do non-finite ones.
        every_n_train_steps: save every n optimizer steps. May be combined with `every_n_epochs` and
            `train_time_interval`; 0 disables it.
        train_time_interval: time between saves; a number is in minutes.
        dirpath: another folder, or one in an object store, such as s3://bucket/run; `resume="auto"` finds what the same
            run saved there.
        save_on_train_epoch_end: save at the end of the training epoch (True) or after validation (False).
        save_weights_only: leave out everything that only a resume needs.
        asynchronous: write in the background; the previous checkpoint is deleted when the next save begins.
        share_frozen: store weights that are not trained once, in `base/` beside the checkpoints, which then hold what
            is trained; by content, so that a weight that changes all the same is stored again. None: where more than
            half of the weights are frozen. `legato export RUN DIR/` makes a whole checkpoint of one.
        filename: a template for names, such as "epoch={epoch}-{val/acc:.3f}": fields are `step`, `epoch` and names in
            `trainer.callback_metrics`. A checkpoint of the same name is replaced if it would not be kept; else the new
            one gets a number, such as "best-v1".
    """

    dirpath: Location | None

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | float | None = None,
        dirpath: str | Path | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_weights_only: bool = False,
        asynchronous: bool = False,
        filename: str | None = None,
        share_frozen: bool | None = None,
    ) -> None:
        if save_top_k < -1:
            raise ConfigError(f"Checkpoint: save_top_k must be a count, 0 (none) or -1 (all), got {save_top_k}.")
        for name, count in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if count is not None and count < 0:
                raise ConfigError(f"Checkpoint: {name} must be 0 (never) or more, got {count}.")
        if isinstance(train_time_interval, timedelta):
            train_time_interval = train_time_interval.total_seconds() / 60
        # None and not 0: every_n_epochs=0 alone leaves the save at the end of the run (save_last)
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self._given_dirpath = None if dirpath is None else str(dirpath)
        # absolute, in case the process changes its directory
        self.dirpath = None if dirpath is None else to_absolute(dirpath)
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps or 0, every_n_epochs or 0
        self.seconds_between = 60 * train_time_interval if train_time_interval else math.inf
        self.save_on_train_epoch_end, self.asynchronous = save_on_train_epoch_end, asynchronous
        self.save_weights_only, self.filename, self.share_frozen = save_weights_only, filename, share_frozen
        self._metric = None if monitor is None else Monitor(monitor, mode, "Checkpoint")
        self.index = CheckpointIndex(monitor=monitor, mode=mode)
        """The checkpoints that it keeps, also in `index.json` beside them."""
        self._seen_step = self._start_step = -1
        self._saved_at = 0.0
        self._begun_step = -1
        """Step of the newest save that was begun."""
        self._due_step = -1
        """Newest step at which a save was due by steps or time."""
        self._is_cut_off = False
        """Whether training ended in the middle of an epoch."""

    # --- what it keeps ----------------------------------------------------------------------------------------------
    @property
    def is_elsewhere(self) -> bool:
        """Whether it saves to a given folder instead of the run directory."""
        return self._given_dirpath is not None

    @property
    def scores(self) -> dict[str, float | None]:
        """Monitored values by name, oldest checkpoint first; None if there was no valid value."""
        return {name: entry.score for name, entry in self.index.checkpoints.items()}

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint, or ""."""
        return self.path(next(reversed(self.index.checkpoints), None))

    @property
    def best_model_path(self) -> str:
        """Path of the checkpoint with the best value, without a monitor of the newest, or ""."""
        return self.path(next(iter(self.index.best(self.save_top_k)), None))

    @property
    def best_model_score(self) -> "torch.Tensor | None":
        """The best monitored value."""
        return next(iter(self.best_k_models.values()), None)

    @property
    def best_k_models(self) -> "dict[str, torch.Tensor]":
        """Paths of the best checkpoints and their values, best first."""
        from torch import tensor

        scored = ((name, self.scores[name]) for name in self.index.best(self.save_top_k))
        return {self.path(name): tensor(score) for name, score in scored if score is not None}

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst of the best checkpoints, or ""."""
        return next(reversed(self.best_k_models), "")

    def path(self, name: str | None) -> str:
        """Return the path of a checkpoint."""
        return "" if name is None or self.dirpath is None else str(self.dirpath / name)

    @property
    def state_key(self) -> str:
        """One key for the run directory, and one per other folder."""
        return "Checkpoint" if self._given_dirpath is None else f"Checkpoint[{self._given_dirpath}]"

    def state_dict(self) -> dict[str, Any]:
        """Return what a process that joins the run must know: the save that was begun, and where the metric is from."""
        return {"begun_step": self._begun_step, "metric": {} if self._metric is None else self._metric.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state; which checkpoints there are is in the index. Raises CheckpointError for a wrong type."""
        if type(state_dict["begun_step"]) is not int:
            raise CheckpointError(f"{self.state_key}: begun_step must be a number in the state.")
        self._begun_step = state_dict["begun_step"]
        if self._metric is not None and state_dict["metric"]:
            self._metric.load_state_dict(state_dict["metric"])

    # --- when to save -----------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the state of the last run. Raises ConfigError if two Checkpoint callbacks share a folder."""
        if stage != "fit":
            return
        # all of them: those that are set up later have no folder yet, or that of the last run
        for callback in trainer.checkpoint_callbacks:
            callback.find_folder(trainer)
        folders = [to_location(c.dirpath).resolve() for c in trainer.checkpoint_callbacks if c.dirpath is not None]
        if self.dirpath is not None and folders.count(self.dirpath.resolve()) > 1:
            reason = "where each would delete what the other keeps. Give one of them a dirpath of its own."
            raise ConfigError(f"Two Checkpoint callbacks write to the same folder, {self.dirpath}, {reason}")
        self._begun_step = -1
        if self._metric is not None:
            self._metric.reset()

    def find_folder(self, trainer: "Trainer") -> None:
        """Set `dirpath` to the run directory's folder, unless one was given, and read the index of this run in it."""
        if self._given_dirpath is None:
            self.dirpath = None if trainer.run_dir is None else checkpoints_of(trainer.run_dir)
        run = trainer.saver.run_id
        index = None if self.dirpath is None else trainer.saver.read_index(self.dirpath)
        entries = index.checkpoints if index is not None and index.run == run else {}
        self.index = CheckpointIndex(run, self.monitor, self.mode, entries)

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Look for the checkpoints of this run. Raises ConfigError if a new run would overwrite those of another."""
        self.find_folder(trainer)
        if trainer.is_global_zero and self._metric and (problem := self._metric.lacks_validation(trainer)):
            log.warning("%s", problem)
        if self.dirpath is not None and self._given_dirpath is not None and not trainer.fast_dev_run:
            trainer.saver.hold_for_all(self.dirpath)
        self._agree_on_index(trainer)
        self._seen_step = self._start_step = trainer.global_step
        self._begun_step = -1
        self._due_step, self._is_cut_off = -1, False
        # the interval goes on where it was: at the newest checkpoint, or where a new run begins
        last = next(reversed(self.index.checkpoints.values()), None)
        self._saved_at = trainer.elapsed if last is None else last.elapsed

    def _agree_on_index(self, trainer: "Trainer") -> None:
        """Keep to what is in the folder, on all ranks: complete checkpoints of this run, none of a later step.

        The index names one before it is complete, and still names one that was deleted since. What it does not name is
        left alone: somebody else has saved it.
        """
        entries = self.index.checkpoints
        if trainer.is_global_zero and self.dirpath is not None:
            steps = trainer.saver.own_in(self.dirpath)
            entries = {
                name: entry
                for name, entry in sorted(entries.items(), key=lambda item: item[1].step)
                if steps.get(name) == entry.step <= trainer.global_step
            }
        # only rank 0 reads the folder: what is there decides what is deleted, and must be the same list on all
        self.index.checkpoints = trainer.broadcast(entries)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save every n steps, or after the time interval."""
        step = trainer.state.global_step
        if step == self._seen_step:
            return
        if self._seen_step == self._start_step:
            trainer.saver.require_storable()  # now that the first step has made the optimizers' states
        self._seen_step = step
        if self.asynchronous:
            # else a background save that failed would end the run only when the next save begins
            trainer.saver.writer.check()
        due = self.every_n_train_steps > 0 and step % self.every_n_train_steps == 0
        # the clock on which the ranks agree: by their own they would enter the collective save at different steps
        if trainer.elapsed - self._saved_at >= self.seconds_between:
            self._saved_at, due = trainer.elapsed, True
        if due:
            self._due_step = step
            if self._metric is not None and step % trainer.log_every_n_steps == 0:
                trainer.log_step()  # else the monitored value would be that of an earlier step
            elif self._metric is not None and not self._metric.from_validation:
                # publishes the value of this step without a point in the loggers, at the cost of one collective
                trainer.current_run.show_step()
            self.save(trainer)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Remember the metric's previous value."""
        if self._metric is not None:
            self._metric.start_validation(trainer)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save if validation logs the metric, or update the value of this step's checkpoint."""
        fresh = self._metric is not None and self._metric.end_validation(trainer)
        if trainer.sanity_checking or trainer.stage != "fit":
            return
        here = fresh if self.save_on_train_epoch_end is None else not self.save_on_train_epoch_end
        due = trainer.global_step in (self._newest_step, self._due_step)  # saved before the value was known
        if (here and self._is_epoch_due(trainer)) or (fresh and due):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save, unless validation does. Raises ConfigError if nothing logged the metric."""
        if self._metric is not None and self._metric.is_missing(trainer):
            self._metric.refuse(trainer)
        idle = self._due_step > 0 and not self.index.checkpoints and not self.save_last and self.save_top_k != 0
        if idle and trainer.is_global_zero:
            log.warning(
                "Checkpoint: nothing was saved by step %d. With save_last=False a checkpoint needs a value of %r, and "
                "validation measured none at the steps that were due; align val_check_interval with them.",
                trainer.global_step, self.monitor,
            )  # fmt: skip
        if not trainer.state.epoch_ended:
            return  # stopped within the epoch; a resume continues it
        here = self.save_on_train_epoch_end
        trained = self._metric is not None and self._metric.is_from_training(trainer)
        if here is None:
            here = self._metric is None or trained
        due = trained and trainer.global_step in (self._newest_step, self._due_step)  # as after a validation
        if (here and self._is_epoch_due(trainer)) or due:
            self.save(trainer)

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Agree on the checkpoints that are there, and repeat a save that the change interrupted."""
        if self.dirpath is None:
            return
        # the agreement below drops what is not complete, which a save in the background is about to be
        trainer.saver.writer.wait()
        if self._given_dirpath is not None:
            trainer.saver.hold_for_all(self.dirpath, patient=True)
        self._agree_on_index(trainer)
        self._saved_at, begun_step = trainer.broadcast((self._saved_at, self._begun_step))
        if begun_step == trainer.global_step > self._newest_step:
            self.save(trainer)

    def save_cut_epoch(self, trainer: "Trainer") -> None:
        """Save before the validation of a run that was asked to stop within an epoch: see `save_last`."""
        if self.save_last and self.filename is None:  # a name may need the values of the validation
            self.save(trainer)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save the last step."""
        self._is_cut_off = trainer.state.epoch_steps > 0
        if self.save_last:
            self.save(trainer)

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Delete checkpoints that had to wait for a background save."""
        self._prune(trainer)

    def _is_epoch_due(self, trainer: "Trainer") -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    # --- saving -----------------------------------------------------------------------------------------------------
    @property
    def _newest_step(self) -> int:
        """Step of the newest checkpoint; 0, which is never saved, if there is none."""
        return next((entry.step for entry in reversed(self.index.checkpoints.values())), 0)

    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Write the current state, unless it exists or would not be kept; `always` writes it even then. Collective."""
        if trainer.fast_dev_run or self.dirpath is None:
            return
        step, entries = trainer.global_step, self.index.checkpoints
        score = self._score(trainer, between=always and trainer.state.epoch_steps > 0)
        # saved already, maybe before its value was known: the weights are the same, so only the index changes
        if step <= self._newest_step:
            if score is not None:
                name = next(reversed(entries))
                entries[name] = entries[name]._replace(score=score)
                self._prune(trainer, changed=True)
            return
        kept = self._kept_beside(Entry(step, score))
        if not always and NEW not in kept:
            return
        name = self._name(trainer, plain=True) if always else self._free_name(self._name(trainer), kept)
        # collective, and after `kept`, which is alike on all ranks: every rank comes here or none
        if trainer.nan == "ignore" and trainer.current_run.bad_weights():
            log.warning("Step %d is not saved: its weights are not finite and would replace finite ones.", step)
            return
        if self.asynchronous:
            self._prune(trainer)  # at most one save is in flight, so the previous one is complete by now
        # Before the save, so that no complete checkpoint is without its value. Undone if the save fails: a later one
        # would otherwise count it among the best, and delete a whole one for it.
        before = dict(entries)
        entries.pop(name, None)  # the newest is the last
        entries[name], self._begun_step = Entry(step, score, trainer.elapsed), step
        trainer.saver.write_index(self.dirpath, self.index)
        try:
            trainer.saver.save(
                to_location(self.path(name)), self.save_weights_only, self.asynchronous, self.share_frozen
            )
        except BaseException:
            self.index.checkpoints = before
            trainer.saver.write_index(self.dirpath, self.index)
            raise
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
        # in the background the new one is not complete yet, and the one before stays until it is
        if not self.asynchronous and not always:
            self._prune(trainer)

    def _kept_beside(self, new: Entry) -> set[str]:
        """Return the names of what would be kept if a new checkpoint were saved, NEW among them if it would be."""
        index = replace(self.index, checkpoints={**self.index.checkpoints, NEW: new})
        return index.kept(self.save_top_k, self.save_last)

    def _free_name(self, name: str, kept: set[str]) -> str:
        """Return `name`, with a number if a checkpoint of that name is kept beside the new one."""
        if name not in kept:
            return name
        return next(version for number in itertools.count(1) if (version := f"{name}-v{number}") not in kept)

    def _name(self, trainer: "Trainer", plain: bool = False) -> str:
        """Return the name of a checkpoint of this moment; `plain`: one that `resume="auto"` knows in any case."""
        if plain or self.filename is None:
            return trainer.saver.format.name(trainer.global_step)
        metrics = {name: float(value) for name, value in trainer.agreed_metrics.items()}
        return checkpoint_name(self.filename, metrics | {"step": trainer.global_step, "epoch": trainer.current_epoch})

    def _prune(self, trainer: "Trainer", changed: bool = False) -> None:
        """Delete what need not be kept; `changed`: the index is to be written in any case."""
        kept = self.index.kept(self.save_top_k, self.save_last)
        surplus = [name for name in self.index.checkpoints if name not in kept]
        for name in surplus:
            # deletes on rank 0 alone; the others keep the same index, by which they decide whether to save
            trainer.saver.discard(to_location(self.path(name)))
            del self.index.checkpoints[name]
        if (surplus or changed) and self.dirpath is not None:
            trainer.saver.write_index(self.dirpath, self.index)

    def _score(self, trainer: "Trainer", between: bool = False) -> float | None:
        """Return the value to rank by; None if the metric is a training mean over a part of an epoch.

        between: the run is stopped within an epoch.
        """
        if self._metric is None or ((self._is_cut_off or between) and self._metric.is_from_training(trainer)):
            return None
        if self._metric.is_from_training(trainer) and not trainer.is_measured_now(self._metric.name):
            return None  # of an earlier step, such as the mean over the previous epoch
        score = self._metric.read(trainer)
        return score if score is not None and math.isfinite(score) else None
