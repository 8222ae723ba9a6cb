"""Checkpoint: saves the run, keeps the best and the newest, and deletes the rest."""

import logging
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..trainer.errors import CheckpointError, ConfigError
from .monitor import Monitor
from .retention import Retention, is_name

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

log = logging.getLogger("legato")


class Checkpoint(Retention):
    """Saves to `checkpoints/step-00001200` in the run directory.

    Kept are the `save_top_k` best by `monitor` (without one: the newest; -1: all) and, with `save_last`, the newest.
    When neither steps, epochs nor a time is given, it saves every epoch: at the end of a validation when validation
    logs the monitored metric, else at the end of the training epoch. Nothing is deleted that this run did not write,
    and nothing before what replaces it is whole.

    Args:
        monitor: a name in `trainer.callback_metrics`. A value that validation measured at an earlier step does not
            count for a later one, and one that is not finite never counts as good.
        every_n_train_steps: save after so many optimizer steps. It, `every_n_epochs` and `train_time_interval` may be
            combined; 0 switches one off.
        train_time_interval: save after this much time; a number is minutes.
        dirpath: another folder; `resume="auto"` looks in the run directory only.
        save_on_train_epoch_end: True or False instead of the choice above.
        save_weights_only: leave out what a resume needs.
        asynchronous: write in the background; the one before is deleted when the next is begun.
    """

    late = 2

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
    ) -> None:
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
        self._given = None if dirpath is None else str(dirpath)
        # wherever the process goes later
        self.dirpath = None if dirpath is None else Path(os.path.abspath(dirpath))
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps or 0, every_n_epochs or 0
        self.seconds_between = 60 * train_time_interval if train_time_interval else math.inf
        self.save_on_train_epoch_end, self.asynchronous = save_on_train_epoch_end, asynchronous
        self.save_weights_only = save_weights_only
        self._metric = None if monitor is None else Monitor(monitor, mode, "Checkpoint")
        self.scores: dict[str, float | None] = {}
        self._newest_step, self._seen_step, self._saved_at = -1, -1, 0.0
        self._wanted_step = -1
        """The step of the newest save that was begun."""
        self._due_step = -1
        """The newest step after which a save was due by steps or time."""
        self._is_cut_off = False
        """Whether training has ended in the middle of an epoch."""

    @property
    def state_key(self) -> str:
        """One for the run directory, and one for each other folder."""
        return "Checkpoint" if self._given is None else f"Checkpoint[{self._given}]"

    def state_dict(self) -> dict[str, Any]:
        """Names and values of the checkpoints, and where they stand now; a resume finds the folder anew."""
        saved = {"scores": dict(self.scores), "newest_step": self._newest_step, "saved_at": self._saved_at}
        metric = {} if self._metric is None else self._metric.state_dict()
        return {**saved, "wanted_step": self._wanted_step, "metric": metric, "dirpath": str(self.dirpath or "")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the checkpoints of the run that is resumed, as far as names are such as Legato gives.

        The state may come from anywhere: `dirpath` in it says where the checkpoints were, and is not gone to. Raises
        CheckpointError where a value is of another kind.
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
        self._wanted_step = state_dict["wanted_step"]
        if self._metric is not None and state_dict["metric"]:
            self._metric.load_state_dict(state_dict["metric"])

    # --- when to save -----------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Begin anew; a resume puts its state in here later. Raises ConfigError where two write to one folder."""
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
        """Find the folder of the trainer's run directory, unless it was given one."""
        if self._given is None:
            self.dirpath = None if trainer.run_dir is None else Path(trainer.run_dir) / "checkpoints"

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Find the folder, and forget checkpoints of which this run has none there: this began from another run's.

        Raises ConfigError where a run that begins anew would write over another one's.
        """
        self.find_folder(trainer)
        if self.dirpath is not None and self._given is not None and not trainer.fast_dev_run:
            trainer.saver.hold_for_all(self.dirpath)
            if trainer.global_step == 0:
                self._refuse_anothers(trainer)
        self.scores = trainer.broadcast(self._present(trainer))
        # where nothing is trained, nothing is saved
        self._newest_step = trainer.global_step
        self._seen_step, self._wanted_step = trainer.global_step, -1
        self._due_step, self._is_cut_off = -1, False

    def _present(self, trainer: "Trainer") -> dict[str, float | None]:
        """Return the names with values that this run wrote and that are there; for rank 0, which alone writes."""
        if not trainer.is_global_zero or self.dirpath is None:
            return {}
        own = trainer.saver.own_in(self.dirpath)
        return {name: score for name, score in self.scores.items() if name in own}

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save after every n-th step, or when the time has come."""
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
                trainer.log_step()  # the monitored value of this very step
            self.save(trainer)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Remember the metric's old value."""
        if self._metric is not None:
            self._metric.start_validation(trainer)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save, if validation logs the metric; or give the checkpoint of this step its value."""
        fresh = self._metric is not None and self._metric.end_validation(trainer)
        if trainer.sanity_checking or trainer.stage != "fit":
            return
        here = fresh if self.save_on_train_epoch_end is None else not self.save_on_train_epoch_end
        due = trainer.global_step in (self._newest_step, self._due_step)  # a save that came before the value was there
        if (here and self._is_epoch_due(trainer)) or (fresh and due):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save, unless validation does. Raises ConfigError where the metric was logged nowhere."""
        if self._metric is not None and self._metric.is_missing(trainer):
            self._metric.refuse(trainer)
        idle = self._due_step > 0 and not self.scores and not self.save_last and self.save_top_k != 0
        if idle and trainer.is_global_zero:
            log.warning(
                "Checkpoint: nothing was saved by step %d. With save_last=False a checkpoint needs a value of %r, and "
                "validation measured none at the steps that were due; let val_check_interval come at these.",
                trainer.global_step, self.monitor,
            )  # fmt: skip
        if not trainer.state.epoch_ended:
            return  # the run stops in the middle of the epoch, and may be resumed there
        here = self.save_on_train_epoch_end
        if here is None:
            here = self._metric is None or self._metric.is_from_training(trainer)
        if here and self._is_epoch_due(trainer):
            self.save(trainer)

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Go by what rank 0 finds, which may be another process now, and do a save again that the break has spoilt."""
        if self.dirpath is None:
            return
        trainer.saver.wait()
        if self._given is not None:
            trainer.saver.hold_for_all(self.dirpath, patient=True)
        present = self._present(trainer)
        spoilt = self._wanted_step == trainer.global_step and f"step-{trainer.global_step:08d}" not in present
        newest = min(self._newest_step, trainer.global_step - 1) if spoilt else self._newest_step
        found = trainer.broadcast((present, newest, self._saved_at, spoilt))
        self.scores, self._newest_step, self._saved_at, spoilt = found
        if spoilt:
            self.save(trainer)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Save the last step."""
        self._is_cut_off = trainer.state.epoch_steps > 0
        if self.save_last:
            self.save(trainer)

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Delete what had to wait for a checkpoint that was written in the background."""
        self._prune(trainer)

    def _is_epoch_due(self, trainer: "Trainer") -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    # --- saving -----------------------------------------------------------------------------------------------------
    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Write the present state, unless it is there or would not be kept; `always`: even if it would not be kept.

        Every rank calls it at the same moment.
        """
        if trainer.fast_dev_run or self.dirpath is None:
            return
        step, score = trainer.global_step, self._score(trainer, between=always and trainer.state.epoch_steps > 0)
        name = f"step-{step:08d}"
        if step <= self._newest_step:
            if score is not None and name in self.scores:
                self.scores[name] = score
                self._prune(trainer)
            return
        if not always and not self.keeps(name, score):
            return
        if trainer.nan == "ignore" and trainer.current_run.bad_weights():
            log.warning("Step %d is not saved: its weights are not finite, and would replace good ones.", step)
            return
        if self.asynchronous:
            self._prune(trainer)  # what the one before replaces; that one is whole before the next is begun
        # the state that is saved knows of the checkpoint that it stands in
        before, self._newest_step, self.scores[name], self._wanted_step = self._newest_step, step, score, step
        try:
            trainer.save_checkpoint(
                self.path(name), weights_only=self.save_weights_only, asynchronous=self.asynchronous
            )
        except BaseException:
            del self.scores[name]
            self._newest_step = before
            raise
        if not self.asynchronous and not always:
            self._prune(trainer)

    def _refuse_anothers(self, trainer: "Trainer") -> None:
        from ..trainer.checkpoints.store import checkpoints_in
        from ..trainer.processes.environment import restart_count

        found = checkpoints_in(Path(self.dirpath or "")) if restart_count() == 0 else []
        if trainer.broadcast(bool(found)):
            raise ConfigError(
                f"Checkpoint: dirpath {str(self.dirpath)!r} has checkpoints of another run, which would be written "
                f"over. Resume from one of them, name another folder, or leave dirpath out: then each run has its own."
            )

    def _prune(self, trainer: "Trainer") -> None:
        for name in self.surplus():
            trainer.saver.discard(Path(self.path(name)))
            del self.scores[name]

    def _score(self, trainer: "Trainer", between: bool = False) -> float | None:
        """Return the value to compare by; `between`: the run is stopped within an epoch, which has no mean yet."""
        if self._metric is None or ((self._is_cut_off or between) and self._metric.is_from_training(trainer)):
            return None  # the mean over a part of an epoch is no value to compare
        score = self._metric.read(trainer)
        return score if score is not None and math.isfinite(score) else None
