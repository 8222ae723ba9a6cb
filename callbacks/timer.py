"""Timer: ends the run after a given duration."""

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from ..base.quantities import Duration, parse_duration
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")


class Timer(Callback):
    """Ends the run when its training time, including time before it was resumed, reaches `duration`.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a mapping such as {"hours": 2}. None: no limit.
        interval: When to check: after every "step" or every "epoch".
        verbose: Log the reason when the run ends.

    Raises ConfigError if `interval` has any other value.
    """

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigError(f"Timer: interval must be 'step' or 'epoch', got {interval!r}.")
        self.duration = None if duration is None else parse_duration(duration).total_seconds()
        """Seconds."""
        self.interval, self.verbose = interval, verbose

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint, unique to its duration and interval."""
        return f"Timer[{self.duration}, {self.interval}]"

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Stop immediately if no time is left."""
        self._check(trainer)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check the time."""
        if self.interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check the time."""
        self._check(trainer)

    def _check(self, trainer: "Trainer") -> None:
        # unlike a process's local clock, trainer.elapsed continues after a resume and is equal on all ranks
        if self.duration is None or trainer.should_stop or trainer.elapsed < self.duration:
            return
        trainer.should_stop = True
        if self.verbose and trainer.is_global_zero:
            log.info(
                "Timer: %s have passed. Stopping at step %d.", timedelta(seconds=self.duration), trainer.global_step
            )
