"""Profile: records traces of selected training steps with torch.profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..base.run_names import require_local
from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer


class Profile(Callback):
    """Records selected optimizer steps during fit as traces for Perfetto or TensorBoard's profiler plugin.

    Each process writes `rank-N.*.pt.trace.json`. `wait`, `warmup`, `active` and `repeat` are the arguments of
    torch.profiler.schedule.

    Args:
        dirpath: Local folder for the traces. None: `profile` in the run directory.
        wait: Number of optimizer steps to skip at the start of each cycle. The first cycle begins when fit starts.
        warmup: Number of optimizer steps to record and discard.
        active: Number of optimizer steps to record and keep.
        repeat: Number of cycles of wait, warmup and active. 0: repeat until fit ends.
        options: Additional arguments for torch.profiler.profile, such as `profile_memory=True`.

    Raises ConfigError if `dirpath` is in an object store, or if it is None and the run has no run directory.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        wait: int = 10,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        **options: Any,
    ) -> None:
        require_local(dirpath, "The dirpath of Profile")
        self.dirpath, self.options = dirpath, options
        self.steps = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._profiler: torch.profiler.profile | None = None

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the profiler."""
        from torch import profiler

        folder = self.dirpath or (trainer.run_dir and Path(trainer.run_dir, "profile"))
        if folder is None:
            raise ConfigError("Profile has no folder to write to, since this run has no run directory. Set dirpath.")
        handler = profiler.tensorboard_trace_handler(str(folder), f"rank-{trainer.global_rank}")
        # without acc_events, torch warns that a new cycle clears the previous one's events, but those are saved already
        options = {"acc_events": True, **self.options}
        schedule = profiler.schedule(**self.steps)
        self._profiler = profiler.profile(schedule=schedule, on_trace_ready=handler, **options)
        self._profiler.start()

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Count a step, even if this process has no batch for it."""
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop recording and write the cycle in progress."""
        self._stop()

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Stop recording, even after an exception."""
        self._stop()

    def _stop(self) -> None:
        # called by on_train_end and teardown; the first call writes the trace
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
