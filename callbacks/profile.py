"""Profile: a trace of some training steps, recorded by torch.profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..base.run_names import require_local
from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer


class Profile(Callback):
    """Records a few optimizer steps of a fit, and writes traces that TensorBoard's plugin and Perfetto open.

    Each process writes `rank-N.*.pt.trace.json`. Optimizer steps are counted from the start of the fit: `wait` are left
    out, `warmup` recorded and thrown away, `active` kept, and that `repeat` times (see torch.profiler.schedule).

    Args:
        dirpath: the folder of the traces; None: `profile` in the run directory.
        options: further arguments of torch.profiler.profile, such as `profile_memory=True`.

    Raises ConfigError without a folder to write to.
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
        """Begin to count steps."""
        from torch import profiler

        folder = self.dirpath or (trainer.run_dir and Path(trainer.run_dir, "profile"))
        if folder is None:
            raise ConfigError("Profile has no folder to write to: this trainer has no run directory; give dirpath.")
        handler = profiler.tensorboard_trace_handler(str(folder), f"rank-{trainer.global_rank}")
        # torch warns when a cycle begins and the events of the last one, written by then, are forgotten
        options = {"acc_events": True, **self.options}
        schedule = profiler.schedule(**self.steps)
        self._profiler = profiler.profile(schedule=schedule, on_trace_ready=handler, **options)
        self._profiler.start()

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Count a step, also one without a batch on this process."""
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """End recording; a cycle that is under way is written."""
        self._stop()

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """End recording, also after an exception."""
        self._stop()

    def _stop(self) -> None:
        # training's end and the teardown both come here: the first of them writes the trace
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
