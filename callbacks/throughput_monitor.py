"""ThroughputMonitor: logs steps and samples per second."""

import time
from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer


class ThroughputMonitor(Callback):
    """Logs `throughput/samples_per_second` (over all replicas), `throughput/steps_per_second` and `epoch`.

    Each is an average between two logging steps, without the time of validation.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._samples = 0
        self._step = 0
        self._validation_began = 0.0

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._restart(trainer, time.perf_counter())

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, once per logging step."""
        step = trainer.state.global_step
        # called for each batch of a step, of which the last one counts
        if step % trainer.log_every_n_steps or step == self._step:
            return
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        values = {
            "throughput/samples_per_second": (trainer.state.samples_seen - self._samples) / seconds,
            "throughput/steps_per_second": (step - self._step) / seconds,
            "epoch": trainer.current_epoch,
        }
        if trainer.is_global_zero:
            trainer.current_run.write(step, values)
        self._restart(trainer, now)

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Restart the clock."""
        self._since += time.perf_counter() - self._validation_began

    def _restart(self, trainer: "Trainer", now: float) -> None:
        self._since, self._samples, self._step = now, trainer.state.samples_seen, trainer.global_step
