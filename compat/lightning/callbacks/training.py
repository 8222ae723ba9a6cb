"""Callbacks that change training, with Lightning's names and arguments."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from ....callbacks import (
    device_stats_monitor,
    finetuning,
    gradient_accumulation_scheduler,
    lambda_callback,
    on_exception,
    prediction_writer,
    throughput_monitor,
)
from ....callbacks.finetuning import multiplicative as multiplicative
from ....tasks.task import Task
from ....trainer.hooks import overrides
from ..placeholders import UnsupportedError
from ..rank_zero import rank_zero_warn
from ..utilities import LightningEnum
from .callback import Callback
from .model_checkpoint import Checkpoint

if TYPE_CHECKING:
    from .... import Trainer


class BaseFinetuning(finetuning.BaseFinetuning, Callback):
    """Freezes layers before training and unfreezes them at the start of specified epochs."""

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Freeze the layers, even before an evaluation."""
        super().setup(trainer, task, stage)
        if stage != "fit":
            self.freeze_before_training(task)

    # private in Lightning; programs call it when they unfreeze within an epoch. Checkpoints always store the groups.
    def _store(self, pl_module: Any, opt_idx: int, num_param_groups: int, current_param_groups: list[Any]) -> None:
        pass


class BackboneFinetuning(finetuning.BackboneFinetuning, BaseFinetuning):
    """Freezes `backbone` until a given epoch, then trains it."""


def logs_stats(hook: str) -> Any:
    """Return a DeviceStatsMonitor hook that logs the current statistics under the name `hook`."""

    def log_stats(monitor: "DeviceStatsMonitor", trainer: "Trainer", *positional: Any, **named: Any) -> None:
        monitor._get_and_log_device_stats(trainer, hook)

    return wraps(getattr(Callback, hook))(log_stats)


class DeviceStatsMonitor(device_stats_monitor.DeviceStatsMonitor, Callback):
    """At logging points, logs device memory and CPU statistics before and after the batch."""

    on_train_batch_start, on_train_batch_end = map(logs_stats, ("on_train_batch_start", "on_train_batch_end"))
    on_validation_batch_start, on_validation_batch_end = map(
        logs_stats, ("on_validation_batch_start", "on_validation_batch_end")
    )
    on_test_batch_start, on_test_batch_end = map(logs_stats, ("on_test_batch_start", "on_test_batch_end"))

    # private in Lightning; programs replace it
    def _get_and_log_device_stats(self, trainer: Any, key: str) -> None:
        """Log rank 0's statistics under a hook's name."""
        if not trainer._logger_connector.should_update_logs or not trainer.is_global_zero:
            return
        prefix, step = f"{type(self).__qualname__}.{key}", trainer.fit_loop.epoch_loop._batches_that_stepped
        stats = self.stats(trainer)
        for logger in trainer.loggers if stats else ():
            named = {f"{prefix}{logger.group_separator}{name}": value for name, value in stats.items()}
            logger.log_metrics(named, step=step)


class GradientAccumulationScheduler(gradient_accumulation_scheduler.GradientAccumulationScheduler, Callback):
    """Accumulates gradients over the number of batches that `scheduling` specifies for each epoch."""

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not scheduling:
            raise TypeError("Empty dict cannot be interpreted correct")
        if min(scheduling) < 0:
            raise IndexError(f"Epochs indexing from 1, epoch {min(scheduling)} cannot be interpreted correct")
        super().__init__(scheduling)

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Warn if the module overrides optimizer_step, because it is called once per step, not once per batch."""
        if self.going_to_accumulate_grad_batches() and overrides(task, Task, "optimizer_step"):
            rank_zero_warn(f"{type(task).__name__}.optimizer_step is called once per step, not once per batch.")


class LambdaCallback(lambda_callback.LambdaCallback, Callback):
    """A callback whose hooks are the functions passed to the constructor."""


class OnExceptionCheckpoint(on_exception.OnExceptionCheckpoint, Checkpoint):
    """Saves a checkpoint of the last completed step when the run ends with an exception."""

    FILE_EXTENSION = ".ckpt"

    @property
    def file_extension(self) -> str:  # type: ignore[override]
        """Suffix of `filename`."""
        return self.FILE_EXTENSION


class WriteInterval(LightningEnum):
    """Times at which predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether to write after every batch."""
        return self in (self.BATCH, self.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Whether to write after the last batch."""
        return self in (self.EPOCH, self.BATCH_AND_EPOCH)


class BasePredictionWriter(prediction_writer.PredictionWriter, Callback):
    """Writes the outputs of predict_step. Each process writes its own outputs."""

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        super().__init__(write_interval)
        self.interval = WriteInterval(write_interval)  # type: ignore[assignment]

    def kept_for_epoch(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the predictions made so far and their dataset indices, each as one list per loader."""
        return self._predictions, self._indices


class ThroughputMonitor(throughput_monitor.ThroughputMonitor, Callback):
    """Logs steps and samples per second."""

    def __init__(
        self, batch_size_fn: Callable[[Any], int], length_fn: Callable[[Any], int] | None = None, **kwargs: Any
    ) -> None:
        if length_fn is not None or kwargs:
            named: Sequence[str] = [*(["length_fn"] if length_fn is not None else []), *kwargs]
            raise UnsupportedError(
                f"ThroughputMonitor({', '.join(named)}) is not supported. ThroughputMonitor counts samples and steps. "
                "To log other counts, call self.log in training_step."
            )
        super().__init__()
