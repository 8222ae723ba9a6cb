"""Timer: ends the run after a given time, and measures the time of its stages."""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from ..base.quantities import Duration, parse_duration
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")

STAGES = ("train", "validate", "test")


class Timer(Callback):
    """Sets `trainer.should_stop` when the run, including earlier parts before resumes, has taken `duration`.

    Args:
        duration: "DD:HH:MM:SS", a timedelta or a mapping of its arguments; None: only measure.
        interval: whether to check after every step or after every epoch.
        verbose: log the reason when the run ends.
    """

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigError(f"Timer: interval must be 'step' or 'epoch', got {interval!r}.")
        self.duration = None if duration is None else parse_duration(duration).total_seconds()
        """Seconds."""
        self.interval, self.verbose = interval, verbose
        self._starts: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._earlier: dict[str, float] = {}
        self._stopped = False

    def start_time(self, stage: str = "train") -> float | None:
        """Return the start of a stage ("train", "validate", "test") on the monotonic clock."""
        return self._starts.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the end of a stage on the monotonic clock."""
        return self._ends.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that a stage has taken, including time before a resume."""
        start = self.start_time(stage)
        now = 0.0 if start is None else self._ends.get(stage, time.monotonic()) - start
        return now + self._earlier.get(stage, 0.0)

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds; None without a duration."""
        return None if self.duration is None else self.duration - self.time_elapsed(stage)

    @property
    def state_key(self) -> str:
        """One key per duration and interval."""
        return f"Timer[{self.duration}, {self.interval}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds that each stage has taken."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Add the time before the resume."""
        self._earlier = dict(state_dict["time_elapsed"])

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock, and stop at once if no time is left."""
        self._stopped = False
        self._start("train")
        self._check(trainer)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check the time."""
        if self.interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Check the time."""
        self._check(trainer)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._ends["train"] = time.monotonic()

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._start("validate")

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._ends["validate"] = time.monotonic()

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._start("test")

    def on_test_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._ends["test"] = time.monotonic()

    def _start(self, stage: str) -> None:
        """Start a stage's clock, keeping the time of earlier runs of the stage."""
        if stage in self._starts:
            self._earlier[stage] = self.time_elapsed(stage)
        self._ends.pop(stage, None)
        self._starts[stage] = time.monotonic()

    def _check(self, trainer: "Trainer") -> None:
        # trainer.elapsed is the same on every rank, unlike this process's own clock
        if self._stopped or self.duration is None or trainer.elapsed < self.duration:
            return
        self._stopped = trainer.should_stop = True
        if self.verbose and trainer.is_global_zero:
            log.info(
                "Timer: %s have passed, stopping at step %d.", timedelta(seconds=self.duration), trainer.global_step
            )


def _known(stage: str) -> str:
    if stage not in STAGES:
        raise ValueError(f"A Timer knows the stages {', '.join(STAGES)}, not {stage!r}.")
    return stage
