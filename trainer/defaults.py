"""What a subclass of Trainer may choose otherwise: state, strategies, callbacks, run directory, points of the log.

A Trainer for programs that were written for another library overrides these; they change nothing by themselves.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..tasks.hyperparameters import Hyperparameters
from . import strategies
from .checkpoints import store
from .checkpoints.left_out import logged_hyperparameters
from .metrics.reduce import Reduced
from .state import State
from .view import TrainerView


class TrainerDefaults(TrainerView):
    """Choices of a Trainer that a subclass may override."""

    keeps_gradients: ClassVar[bool] = False
    """Whether the gradients of a step stay until the next step's first forward is done, for its hooks to read."""
    shows_newest_batch: ClassVar[bool] = False
    """Whether the value of a step is that of its newest batch rather than the mean over its batches."""
    refuses_near_names: ClassVar[bool] = True
    """Whether a method named almost like a hook is an error rather than a warning."""
    logs_cut_epochs: ClassVar[bool] = False
    """Whether the values of an epoch that ends within are written, though a resume will write those of all of it."""
    logs_evaluation_batches: ClassVar[bool] = False
    """Whether what an evaluation logs with `on_step` is written for each of its batches."""
    bar_names_steps: ClassVar[bool] = False
    """Whether the progress bar has names of steps, such as loss_step, for what is averaged over epochs, too."""
    sets_training_mode: ClassVar[bool] = True
    """Whether a task in evaluation mode is put into training mode when training begins."""
    splits_names: ClassVar[bool] = False
    """Whether a name logged both in steps and between them has a value of each, rather than being refused."""
    closure_runs_step: ClassVar[bool] = False
    """Whether a task's own optimizer_step begins before the forward and backward, which its closure then runs."""

    ends_epoch_with_last_batch: ClassVar[bool] = False
    """Whether schedulers that go by epochs step before on_train_batch_end of an epoch's last batch."""
    overfits_validation: ClassVar[bool] = True
    """Whether overfit_batches validates on the training batches, too, rather than on as many of the validation's."""
    keeps_seed: ClassVar[bool] = True
    """Whether a run that goes on must be given the seed that it began with."""
    keeps_added_code: ClassVar[bool] = False
    """Whether what hooks add to a checkpoint, and it cannot hold, stays in the process rather than being refused."""
    marks_output: ClassVar[bool] = True
    """Whether what ranks other than 0 print begins with `[rank N]`, line by line."""
    records_starts: ClassVar[bool] = True
    """Whether each call of fit, validate, test and predict adds a start to the record in its run directory."""
    logs_hyperparameters: bool = True
    """Whether loggers are given the hyperparameters when a run begins."""

    def new_state(self) -> State:
        """Return the state with which a fit begins."""
        return State()

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

    def new_run_dir(self) -> Path | None:
        """Return the directory of a new run, made now; None where nothing is to be written."""
        if self.loggers or self.checkpoint_callback is not None:
            return store.create(Path(self.default_root_dir), self.run_name)
        return None

    def hyperparameters_to_log(self, owners: Sequence[Hyperparameters]) -> dict[str, Any] | None:
        """Return what loggers are given when a run begins, of the data module and the task; None: nothing."""
        found: dict[str, Any] = {}
        for owner in owners:
            if owner.__dict__.get("_log_hyperparams", True):
                found |= logged_hyperparameters(owner)
        return found or None

    def publish_batch(self, reduced: Reduced, index: int) -> None:
        """Publish what rank 0 has logged for a batch of an evaluation, the `index`-th of its loader in this run."""
        self.logged_metrics.update(reduced.loggers)
        self.current_run.write(index, reduced.loggers)

    def log_point(self, values: dict[str, float]) -> tuple[int, dict[str, float]]:
        """Return the place of a point of the log on the x-axis, and its values."""
        return self.state.global_step, {**values, "epoch": self.state.epoch}
