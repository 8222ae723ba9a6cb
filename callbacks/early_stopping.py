"""EarlyStopping: ends the run when a metric stops improving."""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from .callback import MonitoringCallback
from .monitor import Monitor

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")


class EarlyStopping(MonitoringCallback):
    """Ends the run when the monitored metric has not improved for `patience` consecutive checks.

    It checks the metric after each validation run that logs it, or at the end of each epoch if training logs it, and
    sets `trainer.should_stop`.

    Args:
        monitor: Metric to check, a name in `trainer.callback_metrics`.
        min_delta: Smallest change that counts as an improvement, in units of the metric.
        patience: Number of consecutive checks without improvement after which the run ends.
        verbose: Also log every improvement.
        mode: "min" if smaller values are better, "max" if larger values are better.
        strict: Raise ConfigError if nothing has logged the metric by the end of an epoch.
        check_finite: End the run when the metric is NaN or infinite.
        stopping_threshold: End the run when the metric is better than this value.
        divergence_threshold: End the run when the metric is worse than this value.
        check_on_train_epoch_end: True: check only at the end of each epoch; False: only after each validation run.
            None: after each validation run or at the end of each epoch, depending on where the metric is logged.

    Raises ConfigError if `patience` is negative or if `mode` is unknown.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        self.monitor, self.mode = monitor, mode
        if patience < 0:
            raise ConfigError(f"EarlyStopping: patience must be 0 or more, got {patience}.")
        self.min_delta, self.patience, self.verbose = abs(min_delta), patience, verbose
        self.strict, self.check_finite = strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._metric = Monitor(monitor, mode, "EarlyStopping")
        self.wait_count = 0
        self.best_score = self._metric.worst
        self.stopped_step = 0
        self.stopped_epoch = 0

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint, unique to its metric and mode."""
        # two EarlyStopping callbacks for two metrics are common, and callbacks must not share a key
        return f"EarlyStopping[{self.monitor}, {self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the wait count and best score. An infinite score becomes a string, since JSON cannot represent it."""
        return {
            "wait_count": self.wait_count,
            "best_score": self.best_score if math.isfinite(self.best_score) else str(self.best_score),
            "stopped_step": self.stopped_step,
            "stopped_epoch": self.stopped_epoch,
            "patience": self.patience,
            "metric": self._metric.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state. A larger `patience` lets a stopped run continue."""
        self.wait_count, self.best_score = state_dict["wait_count"], float(state_dict["best_score"])
        self.stopped_step, self.stopped_epoch = state_dict["stopped_step"], state_dict["stopped_epoch"]
        self._metric.load_state_dict(state_dict["metric"])
        if self.patience > state_dict["patience"]:
            self.stopped_step = self.stopped_epoch = 0

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the state of the previous run."""
        if stage == "fit":
            self.wait_count, self.best_score, self.stopped_step, self.stopped_epoch = 0, self._metric.worst, 0, 0
            self._metric.reset()

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """If this callback stopped the original run, stop the resumed run as well unless `patience` was increased."""
        # without this, resuming from the stopped run's checkpoint would train until the next check
        trainer.should_stop |= self.stopped_step > 0
        if trainer.is_global_zero and (problem := self._metric.lacks_validation(trainer)):
            log.warning("%s", problem)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Store the metric's previous value."""
        self._metric.start_validation(trainer)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check the metric if the validation run logged it."""
        fresh = self._metric.end_validation(trainer)
        if fresh and trainer.stage == "fit" and not trainer.sanity_checking and not self.check_on_train_epoch_end:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check the metric if training logs it. Raises ConfigError if nothing has logged it."""
        if self.strict and self._metric.is_missing(trainer):
            self._metric.refuse(trainer)
        if not trainer.state.epoch_ended:
            return  # stopped mid-epoch; resuming continues the epoch
        here = self.check_on_train_epoch_end
        if self._metric.is_from_training(trainer) if here is None else here:
            self._check(trainer)

    def _check(self, trainer: "Trainer") -> None:
        score = self._metric.read(trainer)
        if score is None or trainer.fast_dev_run:  # None: an earlier check already used that validation's value
            return
        reason = self._reason_to_stop(score)
        if reason is not None:
            trainer.should_stop = True
            self.stopped_step, self.stopped_epoch = trainer.global_step, trainer.current_epoch
        if trainer.is_global_zero and reason is not None:
            log.info("EarlyStopping at step %d: %s = %.6g %s", trainer.global_step, self.monitor, score, reason)
        elif trainer.is_global_zero and self.verbose and self.wait_count == 0:
            log.info("%s improved to %.6g at step %d.", self.monitor, score, trainer.global_step)

    def _reason_to_stop(self, score: float) -> str | None:
        import torch

        better = self._metric.is_better
        # first, since comparisons with NaN are False, so NaN would only count as a check without improvement
        if self.check_finite and not math.isfinite(score):
            return "is not finite."
        if self.stopping_threshold is not None and better(score, self.stopping_threshold):
            return f"has reached stopping_threshold = {self.stopping_threshold:.6g}."
        if self.divergence_threshold is not None and better(self.divergence_threshold, score):
            return f"is worse than divergence_threshold = {self.divergence_threshold:.6g}."
        margin = self.min_delta if self.mode == "min" else -self.min_delta
        # compare in the precision of logged values: in float64, a change of exactly min_delta may seem larger
        if better((torch.tensor(score) + margin).item(), self.best_score):
            self.best_score, self.wait_count = score, 0
            return None
        self.wait_count += 1
        # patience=0 and patience=1 are equivalent: the first check without improvement ends the run
        if self.wait_count < self.patience:
            return None
        return f"has not improved on {self.best_score:.6g} in {self.wait_count} checks."
