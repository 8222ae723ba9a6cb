"""ThroughputMonitor: logs steps and samples per second, and warns if training often waits for its loader."""

import logging
import time
from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")

LEAST_SECONDS = 5.0
"""Minimum seconds between logging points for a warning about waiting for the loader."""
MOST_SHARE = 0.25
"""Fraction of the time that training may spend waiting for the loader before a warning is issued."""


class ThroughputMonitor(Callback):
    """Logs `throughput/samples_per_second` (over all replicas), `throughput/steps_per_second` and `epoch`.

    Both rates are averages between logging points, excluding validation time. The callback warns once if training
    spends more than a quarter of the time between two logging points waiting for its loader. On an accelerator, waiting
    time is counted only while the device is idle.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._samples = 0
        self._step = 0
        self._validation_began = 0.0
        self._waited, self._ended = 0.0, 0.0
        """Seconds spent waiting since the last logging point, and the end time of the latest batch (0.0: do not measure
        the next wait)."""
        self._has_warned = False
        self._device: torch.device | None = None
        """The device, if it runs kernels asynchronously."""

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._device = trainer.strategy.device if trainer.strategy.queues_work else None
        self._restart(trainer, time.perf_counter())

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Add the time spent waiting for this batch to the total."""
        if self._ended and (self._device is None or self._is_idle()):
            self._waited += time.perf_counter() - self._ended

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log once per logging point."""
        step = trainer.state.global_step
        now = self._ended = time.perf_counter()
        # runs for each batch of a step; global_step advances after the last one
        if step % trainer.log_every_n_steps or step == self._step:
            return
        seconds = max(now - self._since, 1e-9)  # some systems' clocks advance in steps of microseconds
        if seconds > LEAST_SECONDS and self._waited > MOST_SHARE * seconds and not self._has_warned:
            self._has_warned = True
            workers = getattr(trainer.train_dataloader, "num_workers", None)
            advice = "Make it faster" if workers is None else f"Raise its num_workers (now {workers})"
            share = 100 * self._waited / seconds
            log.warning("Training spends %.0f%% of its time waiting for the training loader. %s.", share, advice)
        values = {
            "throughput/samples_per_second": (trainer.state.samples_seen - self._samples) / seconds,
            "throughput/steps_per_second": (step - self._step) / seconds,
            "epoch": trainer.current_epoch,
        }
        if trainer.is_global_zero:
            trainer.current_run.write(step, values)
        self._restart(trainer, now)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Exclude the startup of the loader's workers from the waiting time."""
        self._ended = 0.0

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Exclude the save from the waiting time."""
        self._ended = 0.0

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Restart the clock."""
        # exclude the validation time, which would make a short interval look slow
        self._since += time.perf_counter() - self._validation_began
        self._ended = 0.0

    def _is_idle(self) -> bool:
        """Return whether the device is idle. While it is busy, waiting for a batch costs no time."""
        import torch

        # query returns immediately; synchronize would block in every step
        return bool(torch.accelerator.current_stream(self._device).query())

    def _restart(self, trainer: "Trainer", now: float) -> None:
        self._since, self._samples, self._step = now, trainer.state.samples_seen, trainer.global_step
        self._waited = self._ended = 0.0
