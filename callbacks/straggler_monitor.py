"""StragglerMonitor: says which rank is the slowest, and how long the others wait for it."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..trainer.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

log = logging.getLogger("legato")


class StragglerMonitor(Callback):
    """Logs `straggler/slowest_rank`, `straggler/wait_seconds` and `straggler/wait_share` at logging steps.

    A rank's own work of a step is the time from the end of the step before, through loading and forward, to the last
    gradient of its backward: what comes after that is waiting for the others. `wait_seconds` is how much longer the
    slowest rank works on a step than the others do on average, `wait_share` the part of its step that this is. The
    numbers travel with the agreement of the ranks (`processes/sync.py`), which costs no message of their own.

    Under sharded strategies the ranks wait for each other in forward too; there only loading is a rank's own work.
    """

    def __init__(self, *, threshold: float = 0.2, repeat_seconds: float = 60.0) -> None:
        """Warn where the others wait for more than the part `threshold` of a step, twice in a row for the same rank.

        The warning comes again after `repeat_seconds`, or when another rank becomes the slowest.
        """
        if not 0.0 < threshold < 1.0:
            raise ConfigError(f"StragglerMonitor: threshold={threshold!r}: expected a part of a step, between 0 and 1.")
        self.threshold, self.repeat_seconds = threshold, repeat_seconds
        self.slowest, self.wait_seconds, self.wait_share = -1, 0.0, 0.0
        self._clock: HostClock | CudaClock = HostClock()
        self._spans: list[tuple[Any, Any]] = []
        """Beginning and end of this rank's own work in each step since the last meeting."""
        self._began: Any = None
        self._ready: Any = None
        """When the newest gradient of this step was there."""
        self._last: Any = None
        """The parameter whose gradient comes last, and the handles of what listens for it."""
        self._listeners: list[Any] = []
        self._loaded: Any = None
        self._step, self._warm = 0, False
        self._suspect, self._warned, self._warned_at = -1, -1, float("-inf")

    # --- the run ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Join the agreement of the ranks."""
        if trainer.world_size == 1:
            return
        trainer.strategy.elastic.refuse(
            "StragglerMonitor compares ranks, which change in an elastic run: leave it out, or elastic=true."
        )
        self._clock = CudaClock() if trainer.strategy.device.type == "cuda" else HostClock()
        self._step, self._warm, self._suspect, self._warned = trainer.global_step, False, -1, -1
        agreement = trainer.current_run.agreement
        rank, ranks = trainer.global_rank, trainer.world_size
        agreement.contribute = lambda: [self._own_work() if one == rank else -1.0 for one in range(ranks)]
        agreement.on_result = lambda said: self._hear(said, rank)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave it."""
        self._listen([])

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Listen to no parameter any more, however the run has ended."""
        self._listen([])

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Note when the first batch of a step was there."""
        if trainer.world_size == 1 or self._loaded is not None:
            return
        if not self._listeners:  # the first step finds out which gradient comes last
            self._listen([parameter for parameter in task.parameters() if parameter.requires_grad])
        self._loaded = self._clock.stamp()
        self._began = self._began or self._loaded

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close a step, and log in a logging step."""
        step = trainer.global_step
        if trainer.world_size == 1 or step == self._step:
            return
        if self._began is not None:
            self._spans.append((self._began, self._ready or self._loaded))
        if self._last is not None and len(self._listeners) > 1:
            self._listen([self._last])
        elif self._ready is None:  # that parameter is trained no more
            self._listen([])
        self._step, self._began = step, self._clock.stamp()
        self._ready = self._last = self._loaded = None
        if step % trainer.log_every_n_steps == 0 and self.slowest >= 0 and trainer.is_global_zero:
            values = {
                "straggler/slowest_rank": float(self.slowest),
                "straggler/wait_seconds": self.wait_seconds,
                "straggler/wait_share": self.wait_share,
            }
            for logger in trainer.loggers:
                logger.log_metrics(values, step)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Count the writing of a checkpoint, for which all wait, as nobody's work."""
        self._began = None

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Count a validation as none either."""
        self._began = None

    # --- measuring --------------------------------------------------------------------------------------------------
    def _listen(self, parameters: "Sequence[torch.nn.Parameter]") -> None:
        for listener in self._listeners:
            listener.remove()
        self._listeners = [one.register_post_accumulate_grad_hook(self._note) for one in parameters]

    def _note(self, parameter: "torch.Tensor") -> None:
        self._last, self._ready = parameter, self._clock.stamp()

    def _own_work(self) -> float:
        """Return the seconds of own work of a step, on average since the last meeting; 0 where there was no step."""
        spans, self._spans = self._spans, []
        found = [seconds for begin, end in spans if (seconds := self._clock.seconds(begin, end)) is not None]
        return sum(found) / len(found) if found else 0.0

    def _hear(self, said: list[float], rank: int) -> None:
        """Take in what all ranks have said. The wait for each other, just now, is nobody's work."""
        self._began = None
        if min(said) <= 0.0:  # a rank had no step
            return
        if not self._warm:  # the first steps are unlike all others
            self._warm = True
            return
        slowest = said.index(max(said))
        others = [said[slowest] - seconds for one, seconds in enumerate(said) if one != slowest]
        self.slowest, self.wait_seconds = slowest, sum(others) / len(others)
        self.wait_share = self.wait_seconds / said[slowest]
        if rank == 0:
            self._warn(said[slowest])

    def _warn(self, longest: float) -> None:
        suspect, self._suspect = self._suspect, self.slowest if self.wait_share > self.threshold else -1
        now = time.monotonic()
        fresh = self._warned != self._suspect or now > self._warned_at + self.repeat_seconds
        if self._suspect < 0 or suspect != self._suspect or not fresh:
            return
        self._warned, self._warned_at = self._suspect, now
        log.warning(
            "Rank %d is the slowest: it works %.3g s on a step, the others wait %.3g s for it on average (%.0f %%).",
            self.slowest,
            longest,
            self.wait_seconds,
            100 * self.wait_share,
        )


class HostClock:
    """The clock of a process whose work is done when a call returns."""

    def stamp(self) -> float:
        """Return the moment."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        """Return the seconds between two moments."""
        return end - begin


class CudaClock:
    """The clock of a CUDA stream, on which work is done after the call that asks for it."""

    def stamp(self) -> "torch.cuda.Event":
        """Return the moment at which the stream will have come as far as now asked for."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: "torch.cuda.Event", end: "torch.cuda.Event") -> float | None:
        """Return the seconds between two moments; None where the later one has not come yet."""
        return begin.elapsed_time(end) / 1000 if end.query() else None
