"""Callbacks that change training, with Lightning's names and arguments."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ....callbacks import (
    device_stats_monitor,
    ema,
    finetuning,
    gradient_accumulation_scheduler,
    lambda_callback,
    on_exception,
    prediction_writer,
    swa,
    throughput_monitor,
    weight_averaging,
)
from ....callbacks.finetuning import multiplicative as multiplicative
from ....trainer.errors import ConfigError
from ....trainer.torch_private import batch_norms
from ..placeholders import UnsupportedError
from ..utilities import LightningEnum
from .callback import Callback, with_optional_arguments
from .model_checkpoint import Checkpoint

if TYPE_CHECKING:
    from ....tasks.task import Task
    from ....trainer.trainer import Trainer


class BaseFinetuning(finetuning.BaseFinetuning, Callback):
    """Freezes parts before training, and unfreezes them at the beginning of epochs."""

    # private in Lightning, and called by programs that unfreeze within an epoch
    def _store(self, pl_module: Any, opt_idx: int, num_param_groups: int, current_param_groups: list[Any]) -> None:
        self.record_groups(pl_module.trainer, pl_module)


class BackboneFinetuning(finetuning.BackboneFinetuning, BaseFinetuning):
    """Freezes `backbone`, and trains it from an epoch on."""


class DeviceStatsMonitor(device_stats_monitor.DeviceStatsMonitor, Callback):
    """Logs what a device's memory and the processor do."""


@with_optional_arguments("on_train_epoch_start")
class GradientAccumulationScheduler(gradient_accumulation_scheduler.GradientAccumulationScheduler, Callback):
    """Accumulates as many batches for a step as `scheduling` says for the epoch."""

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not scheduling:
            raise TypeError("Empty dict cannot be interpreted correct")
        if min(scheduling) < 0:
            raise IndexError(f"Epochs indexing from 1, epoch {min(scheduling)} cannot be interpreted correct")
        super().__init__(scheduling)


class LambdaCallback(lambda_callback.LambdaCallback, Callback):
    """Calls the given functions as hooks."""


class OnExceptionCheckpoint(on_exception.OnExceptionCheckpoint, Checkpoint):
    """Saves the last finished step when the run ends by an exception."""

    FILE_EXTENSION = ".ckpt"

    @property
    def file_extension(self) -> str:  # type: ignore[override]
        """Suffix of `filename`."""
        return self.FILE_EXTENSION


class WriteInterval(LightningEnum):
    """Moments at which predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether after every batch."""
        return self in (self.BATCH, self.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Whether after the last batch."""
        return self in (self.EPOCH, self.BATCH_AND_EPOCH)


class BasePredictionWriter(prediction_writer.PredictionWriter, Callback):
    """Writes what predict_step returns, each process its own."""

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        super().__init__(write_interval)
        self.interval = WriteInterval(write_interval)  # type: ignore[assignment]

    def kept_for_epoch(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the predictions so far, and their dataset indices; a list for each loader."""
        return self._predictions, self._indices


@with_optional_arguments("on_train_epoch_end")
class StochasticWeightAveraging(swa.StochasticWeightAveraging, Callback):
    """Averages the weights at the beginning of the last epochs."""

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[..., Any] | None = None,
        device: Any = "cpu",
    ) -> None:
        if not isinstance(swa_lrs, (float, list)):
            raise ConfigError(f"StochasticWeightAveraging: swa_lrs={swa_lrs!r}: expected a float or a list of floats.")
        super().__init__(swa_lrs, swa_epoch_start, annealing_epochs, annealing_strategy, avg_fn or self.avg_fn)
        self.momenta: dict[Any, float | None] = {}

    @staticmethod
    def avg_fn(averaged_model_parameter: Any, model_parameter: Any, num_averaged: Any) -> Any:
        """Return new averages: the mean of one more value."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    @property
    def n_averaged(self) -> torch.Tensor:
        """Number of times that weights were averaged."""
        return torch.tensor(self.updates)

    @property
    def swa_end(self) -> float:
        """The last epoch to average, counted from 0."""
        return math.inf if self._max_epochs in (None, -1) else self._max_epochs - 1

    _max_epochs: int | None = None

    _module: torch.nn.Module | None = None

    @property
    def _initialized(self) -> bool:  # private in Lightning, and asked by programs whether averaging has begun
        return self._last_epoch >= 0

    @property
    def _model_contains_batch_norm(self) -> bool:  # private in Lightning, and read by programs
        return self._module is not None and self.pl_module_contains_batch_norm(self._module)

    @property
    def _average_model(self) -> torch.nn.Module | None:  # private in Lightning, and called by programs: a copy
        return None if self._module is None else self.averaged_copy(self._module)

    def averaged_copy(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of a module with the averages so far."""
        trainer = module.__dict__.pop("_trainer", None)
        try:
            copied = copy.deepcopy(module)
        finally:
            module.__dict__["_trainer"] = trainer
        own = copied.state_dict()
        for name, average in self.averaged_state_dict().items():
            own[name].copy_(average)
        return copied

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Refuse optimizers that it cannot average, and keep the module that it averages."""
        super().on_fit_start(trainer, task)
        self._module = task

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the module, which its run has."""
        return {**vars(self), "_module": None}

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Find the first and the last epoch."""
        super().setup(trainer, task, stage)
        self._max_epochs = trainer.max_epochs

    @staticmethod
    def pl_module_contains_batch_norm(pl_module: torch.nn.Module) -> bool:
        """Return whether a module has batch norms."""
        return any(isinstance(module, batch_norms()) for module in pl_module.modules())

    @staticmethod
    def update_parameters(average_model: Any, model: Any, n_averaged: Any, avg_fn: Callable[..., Any]) -> None:
        """Average the parameters of `model` into those of `average_model`, and count that in `n_averaged`."""
        for averages, weights in zip(average_model.parameters(), model.parameters(), strict=True):
            new = weights.detach().to(averages.device)
            averages.detach().copy_(avg_fn(averages.detach(), new, n_averaged) if n_averaged else new)
        n_averaged += 1

    @staticmethod
    def transfer_weights(src_pl_module: torch.nn.Module, dst_pl_module: torch.nn.Module) -> None:
        """Copy the parameters of one module to another."""
        for source, target in zip(src_pl_module.parameters(), dst_pl_module.parameters(), strict=True):
            target.detach().copy_(source)

    def reset_batch_norm_and_save_state(self, pl_module: torch.nn.Module) -> None:
        """Clear the statistics of batch norms, and let them become means over batches until `reset_momenta`."""
        for module in pl_module.modules():
            if isinstance(module, batch_norms()):
                self.momenta[module] = module.momentum  # type: ignore[assignment]
                module.reset_running_stats()  # type: ignore[operator]
                module.momentum = None  # type: ignore[assignment]

    def reset_momenta(self) -> None:
        """Give batch norms the momenta that they had."""
        for module, momentum in self.momenta.items():
            module.momentum = momentum
        self.momenta = {}


class WeightAveraging(weight_averaging.WeightAveraging, Callback):
    """Averages the weights after the steps that `should_update(step_idx, epoch_idx)` chooses."""

    def __init__(
        self, device: Any = None, use_buffers: bool = True, avg_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        multi_avg_fn = kwargs.pop("multi_avg_fn", None)
        if kwargs or (avg_fn is not None and multi_avg_fn is not None):
            raise UnsupportedError(
                f"WeightAveraging({', '.join(kwargs) or 'avg_fn, multi_avg_fn'}): averages are computed by Legato and "
                f"not by AveragedModel; give avg_fn or multi_avg_fn, or override average(averages, weights)."
            )
        super().__init__(use_buffers)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average after this step, counted from 0, or at the end of this epoch."""
        return step_idx is not None

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Average after a step that was chosen; a batch that is accumulated ends none."""
        before, self._step = self._step, trainer.global_step
        if self._step != before and self.should_update(step_idx=self._step - 1):
            self.update(task)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Average at the end of an epoch that was chosen."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self.update(task)

    def average(self, averages: Any, weights: Any) -> None:
        """Update averages in place by new weights."""
        if self._multi_avg_fn is not None:
            self._multi_avg_fn([averages], [weights], self.updates)
        elif self._avg_fn is None:
            super().average(averages, weights)
        else:
            averages.copy_(self._avg_fn(averages, weights, self.updates))


class EMAWeightAveraging(WeightAveraging):
    """Averages the weights exponentially."""

    def __init__(
        self,
        device: Any = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device, use_buffers, **kwargs)
        ema.ExponentialMovingAverage(decay, every_n_steps=update_every_n_steps)  # refuses wrong values
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average after this step, counted from 0, or at the end of this epoch."""
        if step_idx is not None:
            begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first

    def average(self, averages: Any, weights: Any) -> None:
        """Update averages in place by new weights."""
        averages.lerp_(weights, 1.0 - self.decay)


class ThroughputMonitor(throughput_monitor.ThroughputMonitor, Callback):
    """Logs steps and samples per second."""

    def __init__(
        self, batch_size_fn: Callable[[Any], int], length_fn: Callable[[Any], int] | None = None, **kwargs: Any
    ) -> None:
        if length_fn is not None or kwargs:
            named: Sequence[str] = [*(["length_fn"] if length_fn is not None else []), *kwargs]
            raise UnsupportedError(
                f"ThroughputMonitor({', '.join(named)}): Legato counts samples and steps; log items of your own by "
                f"self.log in training_step."
            )
        super().__init__()
