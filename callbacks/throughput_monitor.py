"""ThroughputMonitor: logs steps and samples per second, and tells where training waits for its loader."""

import logging
import time
from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")

LEAST_SECONDS = 5.0
"""Seconds between two logging steps from which waiting for the loader is judged."""
MOST_SHARE = 0.25


class ThroughputMonitor(Callback):
    """Logs `throughput/samples_per_second` (over all replicas), `throughput/steps_per_second` and `epoch`.

    Each is an average between two logging steps, without the time of validation. Warns once if training waits for its
    loader for more than a quarter of that time; on an accelerator only a wait in which it has run out of work counts.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._samples = 0
        self._step = 0
        self._validation_began = 0.0
        self._waited, self._ended = 0.0, 0.0
        """Seconds of waiting since the last logging step; the end of the newest batch, 0.0 if the next wait is not
        measured."""
        self._told = False
        self._device: torch.device | None = None
        """The device, if its work runs behind the program."""

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._device = trainer.strategy.device if trainer.strategy.queues_work else None
        self._restart(trainer, time.perf_counter())

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Measure how long the batch was waited for."""
        if self._ended and (self._device is None or self._is_idle()):
            self._waited += time.perf_counter() - self._ended

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, once per logging step."""
        step = trainer.state.global_step
        now = self._ended = time.perf_counter()
        # called for each batch of a step, of which the last one counts
        if step % trainer.log_every_n_steps or step == self._step:
            return
        seconds = max(now - self._since, 1e-9)  # clocks of some systems stand still for microseconds
        if seconds > LEAST_SECONDS and self._waited > MOST_SHARE * seconds and not self._told:
            self._told = True
            workers = getattr(trainer.train_dataloader, "num_workers", None)
            advice = "make it faster" if workers is None else f"raise its num_workers ({workers} now)"
            share = 100 * self._waited / seconds
            log.warning("Training waits for the training loader in %.0f %% of its time: %s.", share, advice)
        values = {
            "throughput/samples_per_second": (trainer.state.samples_seen - self._samples) / seconds,
            "throughput/steps_per_second": (step - self._step) / seconds,
            "epoch": trainer.current_epoch,
        }
        if trainer.is_global_zero:
            trainer.current_run.write(step, values)
        self._restart(trainer, now)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Do not count the start of the loader's workers as waiting."""
        self._ended = 0.0

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Do not count the time of a save as waiting."""
        self._ended = 0.0

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Restart the clock."""
        # as if the validation had taken no time, so that a short interval around a long one is not slow
        self._since += time.perf_counter() - self._validation_began
        self._ended = 0.0

    def _is_idle(self) -> bool:
        """Return whether the device has nothing left to do: the program may wait for a batch while it is busy."""
        import torch

        # query returns at once, where a synchronize would make the program wait in every step
        return bool(torch.accelerator.current_stream(self._device).query())

    def _restart(self, trainer: "Trainer", now: float) -> None:
        self._since, self._samples, self._step = now, trainer.state.samples_seen, trainer.global_step
        self._waited = self._ended = 0.0
