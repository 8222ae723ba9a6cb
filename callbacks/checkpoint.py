"""Checkpoint: saves checkpoints periodically and keeps the best and newest ones."""

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
"""Placeholder for the name of a checkpoint that has not been named yet."""


class Template(string.Formatter):
    """Formats fields whose names may contain any character except braces, colons and exclamation marks."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the value of a field, treating dots and brackets as part of its name."""
        return kwargs[field_name], field_name


def checkpoint_name(template: str, values: Mapping[str, Any]) -> str:
    """Return `template` with its fields (`epoch`, `step` or metric names) filled in from `values`.

    Raises ConfigError if a field has no value, or if the result is not a valid folder name.
    """
    try:
        name = Template().vformat(template, (), values)
    # a metric that was not logged, or a format that floats do not accept, such as :d
    except (KeyError, ValueError) as error:
        field = str(error.args[0])
        raise ConfigError(
            f"Checkpoint: filename={template!r} has an invalid field: {field}.{did_you_mean(field, values)} Available "
            f"fields: {', '.join(sorted(values))}."
        ) from None
    if not is_name(name):
        raise ConfigError(
            f"Checkpoint: filename={template!r} produces {name!r}, which is not a valid folder name. A checkpoint is a "
            f"folder in dirpath, so its name must not contain '/' or begin with a dot."
        )
    return name


class Checkpoint(CheckpointCallback):
    """Saves checkpoints to folders such as `checkpoints/step-00001200` in the run directory.

    It keeps the `save_top_k` best checkpoints according to `monitor` and, with `save_last`, the newest one. By default,
    it saves once per epoch: after validation if validation logs the monitored metric, otherwise at the end of the
    training epoch. It deletes only checkpoints that this run wrote, and only after their replacements are complete.

    Args:
        monitor: Metric to rank checkpoints by, a name in `trainer.callback_metrics`. The callback ignores
            non-finite values and values from an earlier step (an earlier validation run, or the previous epoch's mean).
        mode: "min" if smaller values are better, "max" if larger values are better.
        save_top_k: Number of best (or, without `monitor`, newest) checkpoints to keep. -1 keeps all.
        save_last: Also keep the newest checkpoint.
        every_n_train_steps: Save every n optimizer steps; 0 disables this interval. You can combine it with
            `every_n_epochs` and `train_time_interval`.
        every_n_epochs: Save every n epochs; 0 disables this interval.
        train_time_interval: Time between saves, as a timedelta or a number of minutes.
        dirpath: Folder to save to instead of the run directory; a local path or a URL such as s3://bucket/run.
            `resume="auto"` finds this run's checkpoints there.
        save_on_train_epoch_end: Save at the end of the training epoch (True) or after validation (False).
        save_weights_only: Save only the weights, without the rest of the state needed to resume the run.
        asynchronous: Write in the background. The previous checkpoint is deleted when the next save begins.
        share_frozen: Store frozen weights once, in `base/` next to the checkpoints, so that checkpoints contain only
            trained weights. A frozen weight that changes is stored again. None (default): True if more than half of the
            weights are frozen. `legato export RUN DIR/` turns such a checkpoint into a self-contained one.
        filename: Template for names, such as "epoch={epoch}-{val/acc:.3f}". Fields are `step`, `epoch` and names in
            `trainer.callback_metrics`. If a checkpoint with the same name exists, the new one replaces it, unless the
            existing one would be kept. In that case, a version number is appended to the new name, for example
            "best-v1".

    Raises ConfigError if a count is negative, if two Checkpoint callbacks share a folder, or if nothing has logged the
    monitored metric by the end of an epoch.
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
            raise ConfigError(f"Checkpoint: save_top_k must be 0 (none), positive or -1 (all), got {save_top_k}.")
        for name, count in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if count is not None and count < 0:
                raise ConfigError(f"Checkpoint: {name} must be 0 (never) or more, got {count}.")
        if isinstance(train_time_interval, timedelta):
            train_time_interval = train_time_interval.total_seconds() / 60
        # None is not the same as 0: with every_n_epochs=0 alone, save_last still saves at the end of the run
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self._given_dirpath = None if dirpath is None else str(dirpath)
        # absolute, since the process may change its working directory
        self.dirpath = None if dirpath is None else to_absolute(dirpath)
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps or 0, every_n_epochs or 0
        self.seconds_between = 60 * train_time_interval if train_time_interval else math.inf
        self.save_on_train_epoch_end, self.asynchronous = save_on_train_epoch_end, asynchronous
        self.save_weights_only, self.filename, self.share_frozen = save_weights_only, filename, share_frozen
        self._metric = None if monitor is None else Monitor(monitor, mode, "Checkpoint")
        self.index = CheckpointIndex(monitor=monitor, mode=mode)
        """The checkpoints that this callback keeps; stored as `index.json` beside them."""
        self._seen_step = self._start_step = -1
        self._saved_at = 0.0
        self._begun_step = -1
        """Step of the latest save that was started."""
        self._due_step = -1
        """Latest step for which the step or time interval required a save."""
        self._is_cut_off = False
        """Whether training ended in the middle of an epoch."""

    # --- kept checkpoints -------------------------------------------------------------------------------------------
    @property
    def is_elsewhere(self) -> bool:
        """Whether checkpoints are saved in `dirpath` instead of the run directory."""
        return self._given_dirpath is not None

    @property
    def scores(self) -> dict[str, float | None]:
        """Monitored values, keyed by checkpoint name, oldest first; None for a checkpoint without a valid value."""
        return {name: entry.score for name, entry in self.index.checkpoints.items()}

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint, or ""."""
        return self.path(next(reversed(self.index.checkpoints), None))

    @property
    def best_model_path(self) -> str:
        """Path of the checkpoint with the best monitored value (without `monitor`, the newest); "" if there is none."""
        return self.path(next(iter(self.index.best(self.save_top_k)), None))

    @property
    def best_model_score(self) -> "torch.Tensor | None":
        """The best monitored value."""
        return next(iter(self.best_k_models.values()), None)

    @property
    def best_k_models(self) -> "dict[str, torch.Tensor]":
        """Monitored values of the best checkpoints, keyed by path, best first."""
        from torch import tensor

        scored = ((name, self.scores[name]) for name in self.index.best(self.save_top_k))
        return {self.path(name): tensor(score) for name, score in scored if score is not None}

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst of the `save_top_k` best checkpoints; "" if there is none."""
        return next(reversed(self.best_k_models), "")

    def path(self, name: str | None) -> str:
        """Return the path of the checkpoint `name`; "" if `name` is None."""
        return "" if name is None or self.dirpath is None else str(self.dirpath / name)

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint, unique to its `dirpath`."""
        return "Checkpoint" if self._given_dirpath is None else f"Checkpoint[{self._given_dirpath}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the latest save and the monitor's state, both needed by a process that joins the run."""
        return {"begun_step": self._begun_step, "metric": {} if self._metric is None else self._metric.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state, except the list of checkpoints. Raises CheckpointError if a value has the wrong type."""
        if type(begun_step := state_dict["begun_step"]) is not int:
            raise CheckpointError(f"{self.state_key}: the state's `begun_step` must be an integer, got {begun_step!r}.")
        self._begun_step = state_dict["begun_step"]
        if self._metric is not None and state_dict["metric"]:
            self._metric.load_state_dict(state_dict["metric"])

    # --- when to save -----------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the state of the previous run. Raises ConfigError if two Checkpoint callbacks share a folder."""
        if stage != "fit":
            return
        # for all callbacks, since callbacks that are set up later have no folder yet, or still have the previous run's
        for callback in trainer.checkpoint_callbacks:
            callback.find_folder(trainer)
        folders = [to_location(c.dirpath).resolve() for c in trainer.checkpoint_callbacks if c.dirpath is not None]
        if self.dirpath is not None and folders.count(self.dirpath.resolve()) > 1:
            reason = "Each would delete the other's checkpoints. Set a different dirpath for one of them."
            raise ConfigError(f"Two Checkpoint callbacks write to the same folder, {self.dirpath}. {reason}")
        self._begun_step = -1
        if self._metric is not None:
            self._metric.reset()

    def find_folder(self, trainer: "Trainer") -> None:
        """Set `dirpath` to the default folder unless you passed one, and read this run's index from it."""
        if self._given_dirpath is None:
            self.dirpath = None if trainer.run_dir is None else checkpoints_of(trainer.run_dir)
        run = trainer.saver.run_id
        index = None if self.dirpath is None else trainer.saver.read_index(self.dirpath)
        entries = index.checkpoints if index is not None and index.run == run else {}
        self.index = CheckpointIndex(run, self.monitor, self.mode, entries)

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """List this run's checkpoints. Raises ConfigError if the run would overwrite another run's checkpoints."""
        self.find_folder(trainer)
        if trainer.is_global_zero and self._metric and (problem := self._metric.lacks_validation(trainer)):
            log.warning("%s", problem)
        if self.dirpath is not None and self._given_dirpath is not None and not trainer.fast_dev_run:
            trainer.saver.hold_for_all(self.dirpath)
        self._agree_on_index(trainer)
        self._seen_step = self._start_step = trainer.global_step
        self._begun_step = -1
        self._due_step, self._is_cut_off = -1, False
        # the time interval is measured from the newest checkpoint or, in a new run, from the start of the run
        last = next(reversed(self.index.checkpoints.values()), None)
        self._saved_at = trainer.elapsed if last is None else last.elapsed

    def _agree_on_index(self, trainer: "Trainer") -> None:
        """Limit the index on all ranks to this run's complete checkpoints up to the current step.

        The index lists a checkpoint before it is complete and may list one that has been deleted. Checkpoints that the
        index does not list are left alone, because another run saved them.
        """
        entries = self.index.checkpoints
        if trainer.is_global_zero and self.dirpath is not None:
            steps = trainer.saver.own_in(self.dirpath)
            entries = {
                name: entry
                for name, entry in sorted(entries.items(), key=lambda item: item[1].step)
                if steps.get(name) == entry.step <= trainer.global_step
            }
        # only rank 0 reads the folder: the list decides what is deleted, so all ranks need the same list
        self.index.checkpoints = trainer.broadcast(entries)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if the step or time interval requires it."""
        step = trainer.state.global_step
        if step == self._seen_step:
            return
        if self._seen_step == self._start_step:
            trainer.saver.require_storable()  # the first step has created the optimizers' states
        self._seen_step = step
        if self.asynchronous:
            # raises the error from a failed background save now rather than when the next save begins
            trainer.saver.writer.check()
        due = self.every_n_train_steps > 0 and step % self.every_n_train_steps == 0
        # a clock shared by all ranks: with local clocks, ranks would start the collective save at different steps
        if trainer.elapsed - self._saved_at >= self.seconds_between:
            self._saved_at, due = trainer.elapsed, True
        if due:
            self._due_step = step
            if self._metric is not None and step % trainer.log_every_n_steps == 0:
                trainer.log_step()  # otherwise the monitored value would belong to an earlier step
            elif self._metric is not None and not self._metric.from_validation:
                # publishes this step's value without writing it to the loggers, at the cost of one collective
                trainer.current_run.show_step()
            self.save(trainer)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Store the metric's previous value."""
        if self._metric is not None:
            self._metric.start_validation(trainer)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save if validation logs the metric, or update the value of the checkpoint saved at this step."""
        fresh = self._metric is not None and self._metric.end_validation(trainer)
        if trainer.sanity_checking or trainer.stage != "fit":
            return
        here = fresh if self.save_on_train_epoch_end is None else not self.save_on_train_epoch_end
        due = trainer.global_step in (self._newest_step, self._due_step)  # a checkpoint was saved before validation
        if (here and self._is_epoch_due(trainer)) or (fresh and due):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save unless checkpoints are saved after validation. Raises ConfigError if nothing has logged the metric."""
        if self._metric is not None and self._metric.is_missing(trainer):
            self._metric.refuse(trainer)
        idle = self._due_step > 0 and not self.index.checkpoints and not self.save_last and self.save_top_k != 0
        if idle and trainer.is_global_zero:
            log.warning(
                "Checkpoint: no checkpoint was saved by step %d. With save_last=False, saving a checkpoint requires a "
                "value for %r, but validation did not run at any step where one was due. Change val_check_interval.",
                trainer.global_step, self.monitor,
            )  # fmt: skip
        if not trainer.state.epoch_ended:
            return  # stopped mid-epoch; resuming continues the epoch
        here = self.save_on_train_epoch_end
        trained = self._metric is not None and self._metric.is_from_training(trainer)
        if here is None:
            here = self._metric is None or trained
        due = trained and trainer.global_step in (self._newest_step, self._due_step)  # as in on_validation_end
        if (here and self._is_epoch_due(trainer)) or due:
            self.save(trainer)

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Synchronize the index across ranks and repeat a save that the change interrupted."""
        if self.dirpath is None:
            return
        # the index below drops incomplete checkpoints, so a background save must finish first
        trainer.saver.writer.wait()
        if self._given_dirpath is not None:
            trainer.saver.hold_for_all(self.dirpath, patient=True)
        self._agree_on_index(trainer)
        self._saved_at, begun_step = trainer.broadcast((self._saved_at, self._begun_step))
        if begun_step == trainer.global_step > self._newest_step:
            self.save(trainer)

    def save_cut_epoch(self, trainer: "Trainer") -> None:
        """If `save_last` is set, save before the last validation run if training stops mid-epoch."""
        if self.save_last and self.filename is None:  # a template may need values from the validation
            self.save(trainer)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save the last step."""
        self._is_cut_off = trainer.state.epoch_steps > 0
        if self.save_last:
            self.save(trainer)

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Delete checkpoints that a background save has replaced."""
        self._prune(trainer)

    def _is_epoch_due(self, trainer: "Trainer") -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    # --- saving -----------------------------------------------------------------------------------------------------
    @property
    def _newest_step(self) -> int:
        """Step of the newest checkpoint, or 0 if there is none. Step 0 is never saved."""
        return next((entry.step for entry in reversed(self.index.checkpoints.values())), 0)

    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Save the current state unless it is already saved.

        If `always` is False, skip a checkpoint that would not be kept. All ranks must call this.
        """
        if trainer.fast_dev_run or self.dirpath is None:
            return
        step, entries = trainer.global_step, self.index.checkpoints
        score = self._score(trainer, between=always and trainer.state.epoch_steps > 0)
        # already saved, possibly before validation: the weights are the same, so only update the index
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
        # a collective: `kept` is equal on all ranks, so either all ranks or none get here
        if trainer.nan == "ignore" and trainer.current_run.bad_weights():
            log.warning("Step %d was not saved, because its non-finite weights would replace finite ones.", step)
            return
        if self.asynchronous:
            self._prune(trainer)  # at most one save is in flight, so the previous one is complete by now
        # Write the index before the save, so that every complete checkpoint has its value. A failed save restores the
        # index: otherwise a later save would count the failed one among the best and delete a complete one instead.
        before = dict(entries)
        entries.pop(name, None)  # the new entry goes last
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
        # a background save is not complete yet, so the previous checkpoint is kept until it is
        if not self.asynchronous and not always:
            self._prune(trainer)

    def _kept_beside(self, new: Entry) -> set[str]:
        """Return the names that would be kept if `new` were saved. In the result, NEW represents `new` itself."""
        index = replace(self.index, checkpoints={**self.index.checkpoints, NEW: new})
        return index.kept(self.save_top_k, self.save_last)

    def _free_name(self, name: str, kept: set[str]) -> str:
        """Return `name`, with a version number appended if `kept` contains it."""
        if name not in kept:
            return name
        return next(version for number in itertools.count(1) if (version := f"{name}-v{number}") not in kept)

    def _name(self, trainer: "Trainer", plain: bool = False) -> str:
        """Return a name for the current step. If `plain` is true, ignore the template, so `resume="auto"` finds it."""
        if plain or self.filename is None:
            return trainer.saver.format.name(trainer.global_step)
        metrics = {name: float(value) for name, value in trainer.agreed_metrics.items()}
        return checkpoint_name(self.filename, metrics | {"step": trainer.global_step, "epoch": trainer.current_epoch})

    def _prune(self, trainer: "Trainer", changed: bool = False) -> None:
        """Delete surplus checkpoints. If `changed` is true, write the index even if nothing is deleted."""
        kept = self.index.kept(self.save_top_k, self.save_last)
        surplus = [name for name in self.index.checkpoints if name not in kept]
        for name in surplus:
            # only rank 0 deletes; the other ranks update their index too, since it decides whether to save
            trainer.saver.discard(to_location(self.path(name)))
            del self.index.checkpoints[name]
        if (surplus or changed) and self.dirpath is not None:
            trainer.saver.write_index(self.dirpath, self.index)

    def _score(self, trainer: "Trainer", between: bool = False) -> float | None:
        """Return the value to rank by, or None if it is outdated or is a training mean over an incomplete epoch.

        Args:
            between: Whether the run is stopping mid-epoch.
        """
        if self._metric is None or ((self._is_cut_off or between) and self._metric.is_from_training(trainer)):
            return None
        if self._metric.is_from_training(trainer) and not trainer.is_measured_now(self._metric.name):
            return None  # the value belongs to an earlier step, such as the previous epoch's mean
        score = self._metric.read(trainer)
        return score if score is not None and math.isfinite(score) else None
