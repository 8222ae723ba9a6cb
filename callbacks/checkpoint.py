"""Checkpoint: saves the run periodically, and keeps the best and the newest checkpoints."""

import logging
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import CheckpointError, ConfigError
from .monitor import Monitor
from .retention import Retention, checkpoint_name, is_name

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")


class Checkpoint(Retention):
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
        dirpath: another folder; `resume="auto"` finds what the same run saved there.
        save_on_train_epoch_end: save at the end of the training epoch (True) or after validation (False).
        save_weights_only: leave out everything that only a resume needs.
        asynchronous: write in the background; the previous checkpoint is deleted when the next save begins.
        filename: a template for names, such as "epoch={epoch}-{val/acc:.3f}": fields are `step`, `epoch` and names in
            `trainer.callback_metrics`. A checkpoint of the same name is replaced if it would not be kept; else the new
            one gets a number, such as "best-v1".
    """

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
    ) -> None:
        from ..base.run_names import require_local

        if save_top_k < -1:
            raise ConfigError(f"Checkpoint: save_top_k must be a count, 0 (none) or -1 (all), got {save_top_k}.")
        for name, count in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if count is not None and count < 0:
                raise ConfigError(f"Checkpoint: {name} must be 0 (never) or more, got {count}.")
        if isinstance(train_time_interval, timedelta):
            train_time_interval = train_time_interval.total_seconds() / 60
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self._given_dirpath = None if dirpath is None else str(dirpath)
        # absolute, in case the process changes its directory
        require_local(dirpath, "Checkpoint's dirpath")
        self.dirpath = None if dirpath is None else Path(os.path.abspath(dirpath))
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps or 0, every_n_epochs or 0
        self.seconds_between = 60 * train_time_interval if train_time_interval else math.inf
        self.save_on_train_epoch_end, self.asynchronous = save_on_train_epoch_end, asynchronous
        self.save_weights_only, self.filename = save_weights_only, filename
        self._metric = None if monitor is None else Monitor(monitor, mode, "Checkpoint")
        self.scores: dict[str, float | None] = {}
        self._newest_step, self._seen_step, self._saved_at = -1, -1, 0.0
        self._newest_name = ""
        self._begun_step, self._begun_name = -1, ""
        """Step of the newest save that was begun."""
        self._due_step = -1
        """Newest step at which a save was due by steps or time."""
        self._is_cut_off = False
        """Whether training ended in the middle of an epoch."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it saves to a given folder instead of the run directory."""
        return self._given_dirpath is not None

    @property
    def state_key(self) -> str:
        """One key for the run directory, and one per other folder."""
        return "Checkpoint" if self._given_dirpath is None else f"Checkpoint[{self._given_dirpath}]"

    def state_dict(self) -> dict[str, Any]:
        """Return names and values of the checkpoints; the folder is informative only."""
        saved = {"scores": dict(self.scores), "newest_step": self._newest_step, "saved_at": self._saved_at}
        metric = {} if self._metric is None else self._metric.state_dict()
        return {**saved, "wanted_step": self._begun_step, "metric": metric, "dirpath": str(self.dirpath or "")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the checkpoints of a resumed run; names that are not checkpoint names are ignored.

        The state may come from an untrusted file, so its `dirpath` is not used. Raises CheckpointError for a value of
        the wrong type.
        """
        scores = state_dict["scores"]
        numbers = {name: state_dict[name] for name in ("newest_step", "saved_at", "wanted_step")}
        if isinstance(scores, Mapping):
            numbers |= {f"scores[{name!r}]": score for name, score in scores.items() if score is not None}
        else:
            numbers["scores"] = scores
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise CheckpointError(f"{self.state_key}: {name} must be a number in the state, got {value!r:.80}.")
        self.scores = {name: score for name, score in scores.items() if is_name(name)}
        self._newest_step, self._saved_at = state_dict["newest_step"], state_dict["saved_at"]
        self._begun_step = state_dict["wanted_step"]
        if self._metric is not None and state_dict["metric"]:
            self._metric.load_state_dict(state_dict["metric"])

    # --- when to save -----------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the state of the last run. Raises ConfigError if two Checkpoint callbacks share a folder."""
        if stage != "fit":
            return
        for callback in trainer.checkpoint_callbacks:
            callback.find_folder(trainer)
        folders = [os.path.realpath(c.dirpath) for c in trainer.checkpoint_callbacks if c.dirpath is not None]
        if self.dirpath is not None and folders.count(os.path.realpath(self.dirpath)) > 1:
            reason = "where each would delete what the other keeps. Give one of them a dirpath of its own."
            raise ConfigError(f"Two Checkpoint callbacks write to the same folder, {self.dirpath}, {reason}")
        self.scores, self._newest_step, self._saved_at = {}, -1, 0.0
        if self._metric is not None:
            self._metric.reset()

    def find_folder(self, trainer: "Trainer") -> None:
        """Set `dirpath` to the run directory's folder, unless one was given."""
        if self._given_dirpath is None:
            self.dirpath = None if trainer.run_dir is None else Path(trainer.run_dir) / "checkpoints"

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Set the folder, and forget checkpoints in the restored state that another run wrote.

        Raises ConfigError if a new run would overwrite the checkpoints of another one.
        """
        self.find_folder(trainer)
        if trainer.is_global_zero and self._metric and (problem := self._metric.lacks_validation(trainer)):
            log.warning("%s", problem)
        if self.dirpath is not None and self._given_dirpath is not None and not trainer.fast_dev_run:
            trainer.saver.hold_for_all(self.dirpath)
            if trainer.global_step == 0:
                self._refuse_foreign(trainer)
        # only rank 0 reads the folder: what is there decides what is deleted, and must be the same list on all
        self.scores = trainer.broadcast(self._present(trainer))
        newest = next(reversed(self.scores), "") if self._newest_step == trainer.global_step else ""
        self._newest_name = newest if self.filename is not None else self._name(trainer)
        # Without a new step there is nothing to save, unless another Checkpoint wrote the one that the run resumes
        # from: the validation that is now repeated may find the best value of all.
        saved = trainer.global_step == 0 or self._newest_name in self.scores
        self._newest_step = trainer.global_step if saved else min(self._newest_step, trainer.global_step - 1)
        self._seen_step, self._begun_step = trainer.global_step, -1
        self._due_step, self._is_cut_off = -1, False

    def _present(self, trainer: "Trainer") -> dict[str, float | None]:
        """Return the checkpoints that this run wrote and that exist; empty on other ranks than 0."""
        if not trainer.is_global_zero or self.dirpath is None:
            return {}
        own = trainer.saver.own_in(self.dirpath)
        return {name: score for name, score in self.scores.items() if name in own}

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save every n steps, or after the time interval."""
        step = trainer.state.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        if self.asynchronous:
            trainer.saver.check()
        due = self.every_n_train_steps > 0 and step % self.every_n_train_steps == 0
        if trainer.elapsed - self._saved_at >= self.seconds_between:
            self._saved_at, due = trainer.elapsed, True
        if due:
            self._due_step = step
            if self._metric is not None and step % trainer.log_every_n_steps == 0:
                trainer.log_step()  # else the monitored value would be that of an earlier step
            elif self._metric is not None and not self._metric.from_validation:
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
        idle = self._due_step > 0 and not self.scores and not self.save_last and self.save_top_k != 0
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
        """Adopt rank 0's list of checkpoints, and repeat a save that the change interrupted."""
        if self.dirpath is None:
            return
        trainer.saver.wait()
        if self._given_dirpath is not None:
            trainer.saver.hold_for_all(self.dirpath, patient=True)
        present = self._present(trainer)
        interrupted = self._begun_step == trainer.global_step and self._begun_name not in present
        # as if the save had not begun, so that `save` writes it again
        newest = min(self._newest_step, trainer.global_step - 1) if interrupted else self._newest_step
        found = trainer.broadcast((present, newest, self._saved_at, interrupted))
        self.scores, self._newest_step, self._saved_at, interrupted = found
        if interrupted:
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
    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Write the current state, unless it exists or would not be kept; `always` writes it even then. Collective."""
        if trainer.fast_dev_run or self.dirpath is None:
            return
        step, score = trainer.global_step, self._score(trainer, between=always and trainer.state.epoch_steps > 0)
        if step <= self._newest_step:
            if score is not None and self._newest_name in self.scores:
                self.scores[self._newest_name] = score
                self._prune(trainer)
            return
        if not always and not self.keeps(score):
            return
        name = self._name(trainer, plain=True) if always else self.free_name(self._name(trainer), score)
        # collective, and after `keeps`, which decides alike on all ranks: every rank comes here or none
        if trainer.nan == "ignore" and trainer.current_run.bad_weights():
            log.warning("Step %d is not saved: its weights are not finite and would replace finite ones.", step)
            return
        if self.asynchronous:
            self._prune(trainer)  # at most one save is in flight, so the previous one is complete by now
        # Before the save, as the saved state must list the checkpoint that it is part of. Undone if the save fails: a
        # later one would otherwise count it among the best, and delete a whole one for it.
        before = self._newest_step, self._newest_name, dict(self.scores)
        self.scores.pop(name, None)  # the newest is the last
        self._newest_step, self._newest_name, self.scores[name] = step, name, score
        self._begun_step, self._begun_name = step, name
        try:
            trainer.save_checkpoint(
                self.path(name), weights_only=self.save_weights_only, asynchronous=self.asynchronous
            )
        except BaseException:
            self._newest_step, self._newest_name, self.scores = before
            raise
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
        if not self.asynchronous and not always:
            self._prune(trainer)

    def _name(self, trainer: "Trainer", plain: bool = False) -> str:
        """Return the name of a checkpoint of this moment; `plain`: one that `resume="auto"` knows in any case."""
        if plain or self.filename is None:
            return trainer.saver.format.name(trainer.global_step)
        metrics = {name: float(value) for name, value in trainer.agreed_metrics.items()}
        return checkpoint_name(self.filename, metrics | {"step": trainer.global_step, "epoch": trainer.current_epoch})

    def _refuse_foreign(self, trainer: "Trainer") -> None:
        from ..base.environment import restart_count
        from ..trainer.checkpoints.find import checkpoints_in

        folder, found = Path(self.dirpath or ""), False
        if trainer.is_global_zero and restart_count() == 0:
            found = len(trainer.saver.own_in(folder)) < len(checkpoints_in(folder))
        if trainer.broadcast(found):
            raise ConfigError(
                f"Checkpoint: dirpath {str(self.dirpath)!r} has checkpoints of another run, which would be "
                f"overwritten. Resume from one, choose another folder, or omit dirpath to use the run directory."
            )

    def _prune(self, trainer: "Trainer") -> None:
        for name in self.surplus():
            trainer.saver.discard(Path(self.path(name)))
            del self.scores[name]

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
