"""StragglerMonitor: finds the slowest rank and measures how long the other ranks wait for it."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..callbacks.callback import Callback

if TYPE_CHECKING:
    import torch

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

log = logging.getLogger("legato")


class StragglerMonitor(Callback):
    """Logs `straggler/slowest_rank`, `straggler/wait_seconds` and `straggler/wait_share` at logging points.

    In each step, a rank's own work lasts from the end of the previous step to the last gradient of the backward pass.
    After that, the rank waits for the others. `wait_seconds` is how much longer the slowest rank works per step than
    the others do on average. `wait_share` is that time as a fraction of the slowest rank's work. The measurements are
    exchanged as part of the ranks' regular agreement (`processes/agreement.py`), so they need no extra collective.

    Under sharded strategies, ranks also wait for each other in the forward pass, so only data loading is counted as a
    rank's own work.
    """

    def __init__(self, *, threshold: float = 0.2) -> None:
        """Warn once about each rank whose `wait_share` exceeds `threshold` twice in a row."""
        if not 0.0 < threshold < 1.0:
            raise ConfigError(
                f"StragglerMonitor: threshold must be a fraction of a step between 0 and 1, got {threshold!r}."
            )
        self.threshold = threshold
        self.slowest, self.wait_seconds, self.wait_share = -1, 0.0, 0.0
        self._clock: HostClock | DeviceClock = HostClock()
        self._spans: list[tuple[Any, Any]] = []
        """Start and end of this rank's own work in each step since the last agreement."""
        self._began: Any = None
        self._ready: Any = None
        """Time of this step's latest gradient."""
        self._last: Any = None
        """The parameter whose gradient comes last."""
        self._hooks: list[Any] = []
        self._loaded: Any = None
        self._warm = False
        self._suspect, self._warned = -1, set[int]()

    # --- the run ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Register measurements for the ranks to exchange whenever they agree. Raises ConfigError in an elastic run."""
        if trainer.world_size == 1:
            return
        if trainer.strategy.elastic:
            raise ConfigError(
                "StragglerMonitor compares ranks, which change in an elastic run. Remove the callback or elastic=true."
            )
        # kernels run asynchronously, so the host's clock would only measure their launches
        self._clock = DeviceClock(trainer.strategy.device) if trainer.strategy.queues_work else HostClock()
        self._warm, self._suspect, self._warned = False, -1, set()
        rank, ranks = trainer.global_rank, trainer.world_size
        # -1 for other ranks: the agreement takes maxima, so each entry ends up with its rank's own number
        trainer.current_run.agreement.add(
            lambda: [self._own_work() if each == rank else -1.0 for each in range(ranks)],
            lambda seconds_of: self._compare(seconds_of, rank),
        )

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove the gradient hooks, even after an exception."""
        self._set_hooks([])

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Record when the step's first batch was loaded."""
        if trainer.world_size == 1 or self._loaded is not None:
            return
        if not self._hooks:  # the first step determines which gradient comes last
            self._set_hooks([parameter for parameter in task.parameters() if parameter.requires_grad])
        self._loaded = self._clock.stamp()
        self._began = self._began or self._loaded

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record this rank's own work in the step and log at logging points."""
        if trainer.world_size == 1 or self._loaded is None:  # a step without a batch on this rank
            return
        if self._began is not None:
            # without a gradient, only loading counts as own work; stamps are kept, since a pending event has no time
            # yet
            self._spans.append((self._began, self._ready or self._loaded))
        if self._last is not None and len(self._hooks) > 1:
            # hooks on all parameters cost time in each step, and the order of gradients does not change
            self._set_hooks([self._last])
        elif self._ready is None:  # the parameter was frozen
            self._set_hooks([])
        step, self._began = trainer.global_step, self._clock.stamp()
        self._ready = self._last = self._loaded = None
        if step % trainer.log_every_n_steps == 0 and self.slowest >= 0 and trainer.is_global_zero:
            values = {
                "straggler/slowest_rank": float(self.slowest),
                "straggler/wait_seconds": self.wait_seconds,
                "straggler/wait_share": self.wait_share,
            }
            trainer.current_run.write(step, values)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Exclude the time that all ranks spend waiting for a checkpoint to be written."""
        self._began = None

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Exclude the validation time."""
        self._began = None

    # --- measuring --------------------------------------------------------------------------------------------------
    def _set_hooks(self, parameters: "Sequence[torch.nn.Parameter]") -> None:
        for listener in self._hooks:
            listener.remove()
        self._hooks = [weight.register_post_accumulate_grad_hook(self._on_gradient) for weight in parameters]

    def _on_gradient(self, parameter: "torch.Tensor") -> None:
        self._last, self._ready = parameter, self._clock.stamp()

    def _own_work(self) -> float:
        """Return the seconds this rank has worked per step since the ranks last agreed, or 0 if there were no steps."""
        spans, self._spans = self._spans, []
        times = [seconds for begin, end in spans if (seconds := self._clock.seconds(begin, end)) is not None]
        return sum(times) / len(times) if times else 0.0

    def _compare(self, seconds_of: list[float], rank: int) -> None:
        """Compare the ranks' own work in seconds. The wait for the exchange is not counted in the next step."""
        self._began = None
        if min(seconds_of) <= 0.0:  # some rank had no step
            return
        if not self._warm:  # the first steps are slower than later ones
            self._warm = True
            return
        slowest = seconds_of.index(max(seconds_of))
        # compare the others' wait, not the slowest rank's time: a step that is slow on all ranks has no straggler
        waits = [seconds_of[slowest] - seconds for each, seconds in enumerate(seconds_of) if each != slowest]
        self.slowest, self.wait_seconds = slowest, sum(waits) / len(waits)
        self.wait_share = self.wait_seconds / seconds_of[slowest]
        if rank == 0:
            self._warn(seconds_of[slowest])

    def _warn(self, longest: float) -> None:
        # only twice in a row: a single slow step may be due to a page fault or garbage collection
        suspect, self._suspect = self._suspect, self.slowest if self.wait_share > self.threshold else -1
        if self._suspect < 0 or suspect != self._suspect or self._suspect in self._warned:
            return
        self._warned.add(self._suspect)
        log.warning(
            "Rank %d is the slowest: it works for %.3g s per step, while the others wait %.3g s on average (%.0f%%).",
            self.slowest,
            longest,
            self.wait_seconds,
            100 * self.wait_share,
        )


class HostClock:
    """Clock for devices without asynchronous execution."""

    def stamp(self) -> float:
        """Return the current time."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        """Return the seconds between two stamps."""
        return end - begin


class DeviceClock:
    """Clock for a device's current stream, which runs asynchronously with respect to the host."""

    def __init__(self, device: "torch.device") -> None:
        self.device = device

    def stamp(self) -> "torch.Event":
        """Return an event at the stream's current position."""
        import torch

        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: "torch.Event", end: "torch.Event") -> float | None:
        """Return the seconds between two events, or None if the later event has not completed yet."""
        # never wait for the device: skip pending events
        return begin.elapsed_time(end) / 1000 if end.query() else None
