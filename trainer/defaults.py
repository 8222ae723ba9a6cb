"""Choices that a subclass of Trainer may override: state, strategies, callbacks, run directory, points of the log.

A Trainer for programs that were written for another library overrides these; they change nothing by themselves.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..tasks.hyperparameters import Hyperparameters
from . import strategies
from .optimization.optimizers import ManualOptimizer
from .resume.left_out import logged_hyperparameters
from .resume.rebuild import averaged_weights
from .runs import places
from .state import State
from .view import TrainerView


class TrainerDefaults(TrainerView):
    """The Trainer without its loop; each choice may be overridden."""

    pads_shares: ClassVar[bool] = False
    """Whether an epoch's last round repeats samples rather than leaving a replica with fewer: in training, and in a
    validation or test whose steps call collectives."""

    reads_streams_whole: ClassVar[bool] = False
    """Whether each process trains on all that an IterableDataset gives it, rather than on one batch in turn."""
    evaluates_with_states: ClassVar[bool] = False
    """Whether callbacks and the data module are given their states of a checkpoint that is evaluated, too."""
    fits_continue: ClassVar[bool] = False
    """Whether a second fit goes on where the first one ended, so that no point of the log is void."""
    optimizer_wrapper: ClassVar[type[ManualOptimizer]] = ManualOptimizer
    """Class of what a task gets from `optimizers()`."""
    logs_hyperparameters: bool = True
    """Whether loggers are given the hyperparameters when a run begins."""

    def strategy_class(self, name: str) -> type[Any]:
        """Return the class behind the name of a strategy."""
        found: type[Any] = getattr(strategies, strategies.STRATEGIES[name].split(":")[1])
        return found

    def default_callbacks(self) -> list[tuple[bool, type[Any], dict[str, Any]]]:
        """Return the callbacks that the arguments ask for: whether to add it, its class, its arguments."""
        from .. import callbacks as known

        logs = bool(self.loggers)
        return [
            (self.enable_progress_bar, known.ProgressBar, {}),
            (self.enable_model_summary, known.ModelSummary, {}),
            (logs, known.LearningRateMonitor, {}),
            (logs, known.ThroughputMonitor, {}),
            (self.max_time is not None, known.Timer, {"duration": self.max_time}),
            (self.enable_checkpointing, known.Checkpoint, {}),
        ]

    def weights_of(self, saved: Mapping[str, Any]) -> Any:
        """Return the weights of a checkpoint from which a run begins.

        For an evaluation those that were evaluated then, unless a callback of this run takes the averages itself.
        """
        if self.stage == "fit":
            return saved.get("state_dict")
        return averaged_weights(saved, [callback.state_key for callback in self.callbacks])

    def new_run_dir(self, identity: str, stage: str) -> Path | None:
        """Return the directory of a new run, made now; None where nothing is to be written."""
        if self.loggers or self.checkpoint_callback is not None:
            return places.create(Path(self.default_root_dir), self.run_name, identity, stage)
        return None

    def hyperparameters_to_log(self, owners: Sequence[Hyperparameters]) -> dict[str, Any] | None:
        """Return what loggers are given when a run begins, of the data module and the task; None: nothing."""
        found: dict[str, Any] = {}
        for owner in owners:
            if owner.__dict__.get("_log_hyperparams", True):
                found |= logged_hyperparameters(owner)
        return found or None

    def log_point(self, values: dict[str, float]) -> tuple[int, dict[str, float]]:
        """Return the place of a point of the log on the x-axis, and its values."""
        step, epoch = self.current_run.evaluated_point or (self.state.global_step, self.state.epoch)
        return step, {**values, "epoch": epoch}
