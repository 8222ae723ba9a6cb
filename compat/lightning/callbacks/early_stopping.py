"""EarlyStopping, with Lightning's arguments and attributes. It checks the metric when Lightning's callback would."""

import logging
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ....base.errors import ConfigError
from ....callbacks import early_stopping
from .callback import Callback

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task

log = logging.getLogger("legato")


class EarlyStoppingReason(Enum):
    """The reason a run stopped."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(early_stopping.EarlyStopping, Callback):
    """Sets `trainer.should_stop` when the monitored metric has not improved for `patience` consecutive checks."""

    mode_dict: ClassVar[dict[str, Callable[..., Tensor]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}
    best_score: Tensor  # type: ignore[assignment]

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super(early_stopping.EarlyStopping, self).__init__()  # calls the constructor of a class that a program mixes in
        if mode not in self.mode_dict:
            raise ConfigError(f"EarlyStopping: mode must be 'min' or 'max', got {mode!r}.")
        self.monitor, self.mode, self.patience, self.verbose = monitor, mode, patience, verbose  # type: ignore[assignment]
        # Lightning stores the signed value, which programs read
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.strict, self.check_finite = strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.wait_count, self.stopped_epoch = 0, 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self.best_score = torch.tensor(float("inf") if mode == "min" else -float("inf"))

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """The comparison function, which returns true if a value is an improvement."""
        return self.mode_dict[self.mode]

    # --- state ------------------------------------------------------------------------------------------------------
    @property
    def state_key(self) -> str:
        """Key for this callback's state in a checkpoint, unique to its metric and mode."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the wait count, the best score and the stopping reason."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state, including `patience`."""
        self.wait_count, self.stopped_epoch = state_dict["wait_count"], state_dict["stopped_epoch"]
        self.best_score, self.patience = state_dict["best_score"], state_dict["patience"]
        reason = state_dict.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED.value)
        self.stopping_reason = EarlyStoppingReason(reason)
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    # --- when to check ----------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """If validation runs once per epoch, check at the epoch's end. Otherwise, check after each validation run."""
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Do nothing, because a resumed run waits for the next scheduled check."""

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Do nothing, because the previous value is not needed."""

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check after validation."""
        if not self._check_on_train_epoch_end and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check at the end of an epoch."""
        if self._check_on_train_epoch_end and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def _should_skip_check(self, trainer: "Trainer") -> bool:
        return trainer.stage != "fit" or trainer.sanity_checking

    # --- the check --------------------------------------------------------------------------------------------------
    def _run_early_stopping_check(self, trainer: Any) -> None:
        metrics = trainer.newest_agreed()  # every rank has the same values, so all make the same decision
        if trainer.fast_dev_run or not self._validate_condition_metric(metrics):
            return
        should_stop, reason = self._evaluate_stopping_criteria(metrics[self.monitor].squeeze())
        trainer.should_stop = trainer.should_stop or should_stop
        if should_stop:
            self.stopped_epoch, self.stopping_reason_message = trainer.current_epoch, reason
        if reason and self.verbose:
            self._log_info(trainer, reason, self.log_rank_zero_only)

    def _validate_condition_metric(self, logs: Mapping[str, Tensor]) -> bool:
        """Return whether the metric was logged. Raises RuntimeError if it was not logged and `strict` is True."""
        if self.monitor in logs:
            return True
        problem = (
            f"Early stopping conditioned on metric `{self.monitor}` which is not available. Pass in or modify your "
            f"`EarlyStopping` callback to use any of the following: `{'`, `'.join(logs)}`"
        )
        if self.strict:
            raise RuntimeError(problem)
        if self.verbose:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
        return False

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Return whether a new value of the metric stops the run, and a message that gives the reason."""
        name, order, better, reasons = self.monitor, self.order_dict[self.mode], self.monitor_op, EarlyStoppingReason
        end = "Signaling Trainer to stop."
        if self.check_finite and not torch.isfinite(current):
            self.stopping_reason = reasons.NON_FINITE_METRIC
            best = f"Previous best value was {self.best_score:.3f}."
            return True, f"Monitored metric {name} = {current} is not finite. {best} {end}"
        if self.stopping_threshold is not None and better(current, self.stopping_threshold):
            self.stopping_reason = reasons.STOPPING_THRESHOLD
            return True, f"Stopping threshold reached: {name} = {current} {order} {self.stopping_threshold}. {end}"
        if self.divergence_threshold is not None and better(-current, -self.divergence_threshold):
            self.stopping_reason = reasons.DIVERGENCE_THRESHOLD
            return True, f"Divergence threshold reached: {name} = {current} {order} {self.divergence_threshold}. {end}"
        if better(current - self.min_delta, self.best_score.to(current.device)):
            message = self._improvement_message(current)
            self.best_score, self.wait_count = current, 0
            return False, message
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = reasons.PATIENCE_EXHAUSTED
        best = f"Best score: {self.best_score:.3f}."
        return True, f"Monitored metric {name} did not improve in the last {self.wait_count} records. {best} {end}"

    def _improvement_message(self, current: Tensor) -> str:
        if not torch.isfinite(self.best_score):
            return f"Metric {self.monitor} improved. New best score: {current:.3f}"
        by = f"{abs(self.best_score - current):.3f} >= min_delta = {abs(self.min_delta)}"
        return f"Metric {self.monitor} improved by {by}. New best score: {current:.3f}"

    @staticmethod
    def _log_info(trainer: "Trainer", message: str, log_rank_zero_only: bool) -> None:
        several = trainer.world_size > 1
        if not several or not log_rank_zero_only or trainer.is_global_zero:
            log.info("%s%s", f"[rank: {trainer.global_rank}] " if several else "", message)
