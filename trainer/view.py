"""Read-only properties of a trainer, using Lightning's names, for callbacks, tasks and scripts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ..base.arguments import TrainerArguments
from ..base.messages import STDOUT
from ..base.quantities import first_validation
from ..callbacks.checkpoint_callback import CheckpointCallback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.progress_bar import ProgressDisplay
from ..tasks.optimizers import SchedulerConfig
from .optimization.optimization import ManualOptimizer
from .processes.devices import find_devices
from .processes.gather import gather
from .state import State

if TYPE_CHECKING:
    from torch import Tensor

    from ..callbacks.callback import Callback
    from ..loggers.logger import Logger
    from ..tasks.data_module import DataModule
    from ..tasks.task import Task
    from .metrics.log import Metrics
    from .resume.saver import Saver
    from .run import Call, Run
    from .strategies.strategy import Strategy

Value = TypeVar("Value")


class TrainerView(TrainerArguments):
    """Read-only properties of a trainer and its run."""

    run: "Call | None"
    """The latest run; during setup, the parts built so far."""
    state: State
    run_dir: Path | None
    assigned_dir: Path | None
    """The run directory to use, if a subclass or the parent process has chosen one."""
    config_text: str | None
    """The config as YAML with every default, or None for a Trainer created by a script."""
    explicit_config: str | None
    """The config as YAML without defaults, with the origin of each value."""
    command: dict[str, Any]
    """The program's command line and this Trainer's position in the program, which a replay uses to find its fits."""
    lengths: dict[str, Any]
    """Lengths of the latest run's loaders, keyed by "train", "validation" and so on."""
    strategy: "Strategy"
    saver: "Saver"
    callbacks: "list[Callback]"
    logger: "Logger | None"
    loggers: "list[Logger]"
    agreed_metrics: "dict[str, Tensor]"
    """The latest value logged under each name, the same on all ranks, so that all ranks make the same decisions."""
    logged_metrics: dict[str, float]
    progress_bar_metrics: dict[str, float]

    # --- progress ---------------------------------------------------------------------------------------------------
    @property
    def current_epoch(self) -> int:
        """Index of the current epoch, starting from 0; after a run, the number of finished epochs."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps completed."""
        return self.state.global_step

    @property
    def elapsed(self) -> float:
        """Elapsed time of the run in seconds, across all resumes. The value is the same on all ranks."""
        # not this process's clock, which would let ranks with a time limit stop at different steps
        return self.run.agreement.elapsed if self.run is not None else self.state.elapsed

    @property
    def stage(self) -> str | None:
        """The method that is running: "fit", "validate", "test" or "predict"; None if no method is running."""
        return self.run.stage if self.run is not None and self.run.loop.open else None

    @property
    def running(self) -> bool:
        """Whether fit, validate, test or predict is in progress."""
        return self.stage is not None

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check before training is in progress."""
        return self.running and self.current_run.loop.doing == "sanity_check"

    @property
    def training(self) -> bool:
        """Whether training is in progress; False during validation."""
        return self.running and self.current_run.loop.doing == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is in progress."""
        return self.running and self.current_run.loop.doing == "validation"

    @property
    def testing(self) -> bool:
        """Whether a test is in progress."""
        return self.running and self.current_run.loop.doing == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is in progress."""
        return self.running and self.current_run.loop.doing == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or test run is in progress."""
        return self.validating or self.testing

    # --- processes --------------------------------------------------------------------------------------------------
    @property
    def global_rank(self) -> int:
        """Rank of this process in the run."""
        return self.strategy.place.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.strategy.place.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return self.strategy.place.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
        return self.strategy.place.world_size

    @property
    def num_devices(self) -> int:
        """Number of devices on this machine that the run uses."""
        return len(self.device_list)

    @property
    def device_list(self) -> list[torch.device]:
        """The devices on this machine that the run uses."""
        return find_devices(self.accelerator, self.devices)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, the only rank that writes logs."""
        return self.global_rank == 0

    # --- the run's parts --------------------------------------------------------------------------------------------
    @property
    def current_run(self) -> "Run":
        """The latest run, which may not be fully set up yet. Raises RuntimeError before the first run."""
        if self.run is None:
            raise RuntimeError("The trainer has no run yet: call fit, validate, test or predict first.")
        return cast("Run", self.run)

    @property
    def task(self) -> "Task":
        """The task of the run."""
        return self.current_run.task

    model = lightning_module = task

    @property
    def datamodule(self) -> "DataModule | None":
        """The data module of the run."""
        return self.current_run.datamodule

    @property
    def metrics(self) -> "Metrics":
        """Collector of logged values."""
        return self.current_run.metrics

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The task's optimizers; empty until setup has created them."""
        return self.current_run.optimization.optimizers if self.current_run.is_complete else []

    @property
    def manual_optimizers(self) -> list[ManualOptimizer]:
        """The task's optimizers, wrapped for manual optimization."""
        return self.current_run.optimization.manual_optimizers if self.current_run.is_complete else []

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The task's learning rate schedulers and their settings."""
        return self.current_run.optimization.schedulers if self.current_run.is_complete else []

    @property
    def log_dir(self) -> str | None:
        """The run directory as a string."""
        return None if self.run_dir is None else str(self.run_dir)

    @property
    def train_dataloader(self) -> Any:
        """The user's training loader."""
        return self.current_run.data.loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The user's validation loaders."""
        return self.current_run.data.loaders.get("validation")

    @property
    def test_dataloaders(self) -> Any:
        """The user's test loaders."""
        return self.current_run.data.loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The user's prediction loaders."""
        return self.current_run.data.loaders.get("predict")

    # --- metrics and lengths ----------------------------------------------------------------------------------------
    @property
    def callback_metrics(self) -> "dict[str, Tensor]":
        """The latest value logged under each name, including values that callbacks add."""
        return self.agreed_metrics

    def is_measured_now(self, name: str) -> bool:
        """Return whether `callback_metrics[name]` was measured at the current step or set by a hook."""
        return self.current_run.metrics.measured_at.get(name, self.state.global_step) == self.state.global_step

    @property
    def num_training_batches(self) -> int | float:
        """Number of batches per replica in an epoch, or infinity if the loader has no length."""
        data = None if self.lengths and self.run is None else self.current_run.data.training
        rounds = self.lengths.get("train") if data is None else data.rounds
        return float("inf") if rounds is None else rounds

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is a replica's last in the training epoch; False if the loader has no length."""
        # `epoch_rounds` counts finished steps only; within a step, its batches are added
        total, done, metrics = self.num_training_batches, self.state.epoch_rounds, self.metrics
        if total == float("inf") or metrics.step != self.state.global_step:  # the two differ between steps
            return done >= total
        rounds = min(self.accumulate_grad_batches, int(total) - done)
        return done + rounds >= total and metrics.batches_of_step % rounds == 0

    @property
    def num_val_batches(self) -> list[int | float]:
        """Number of batches per replica in each validation loader."""
        return self._counts("validation")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Number of batches per replica in each test loader."""
        return self._counts("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Number of batches per replica in each prediction loader."""
        return self._counts("predict")

    @property
    def steps_per_epoch(self) -> int | float:
        """Number of optimizer steps in an epoch, or infinity if the loader has no length."""
        batches = self.num_training_batches
        return batches if batches == float("inf") else -(-int(batches) // self.accumulate_grad_batches)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of optimizer steps in the entire run, or infinity if the run has no limit."""
        epochs = float("inf") if self.max_epochs in (None, -1) else float(self.max_epochs or 0)
        steps = epochs * self.steps_per_epoch if epochs else 0  # 0 * infinity is NaN
        limit = float("inf") if self.max_steps == -1 else self.max_steps
        total = min(steps, limit)
        return total if total == float("inf") else int(total)

    @property
    def first_validation_step(self) -> int | None:
        """Step at which a run started now would first validate; None if it never validates or the step is unknown."""
        if not sum(self.num_val_batches):
            return None
        every = self.check_val_every_n_epoch
        return first_validation(self.val_check_interval, every, self.accumulate_grad_batches, self.steps_per_epoch)

    # --- callbacks --------------------------------------------------------------------------------------------------
    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints, or None."""
        return self._first(CheckpointCallback)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Every callback that saves checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, CheckpointCallback)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback, or None."""
        return self._first(EarlyStopping)

    @property
    def progress_bar_callback(self) -> Any:
        """The first callback that shows progress, or None."""
        return self._first(ProgressDisplay)

    def _first(self, kind: type[Value]) -> Value | None:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def _counts(self, stage: str) -> list[int | float]:
        # of the latest call with such loaders
        return list(self.lengths.get(stage, []))

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        return self.strategy.collectives.broadcast(value)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every rank's `data`; see `Task.all_gather`."""
        return gather(self.strategy, self.run, data, group, sync_grads)

    def leave_out_update(self) -> None:
        """Skip this step's update. Weights and optimizers remain unchanged, but the step still counts.

        With automatic optimization, all ranks must call this from a callback's or the task's
        `on_before_optimizer_step`.
        """
        self.current_run.optimization.leaves_out_update = True

    def print(self, *arguments: Any, **options: Any) -> None:
        """Print on rank 0 only. If standard output is closed, do nothing."""
        if self.is_global_zero:
            print(*arguments, **{"file": STDOUT, **options})
