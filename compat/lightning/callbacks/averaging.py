"""StochasticWeightAveraging, WeightAveraging and EMAWeightAveraging, with the averages as a module."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.swa_utils import AveragedModel

from ....base.errors import ConfigError
from ....base.torch_private import batch_norms
from ....callbacks import ema, swa, weight_averaging
from ..aliases import alias
from ..placeholders import UnsupportedError
from .callback import Callback, with_optional_arguments

if TYPE_CHECKING:
    from ....tasks.task import Task
    from ....trainer.trainer import Trainer


class AveragedModule(weight_averaging.WeightAveraging):
    """Base class of callbacks that average weights: shows the averages as a module."""

    _source: "Task | None" = None
    _shown: torch.nn.Module | None = None
    """A copy of the module whose parameters are the averages."""

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the averages at the start of a training, and keep the module that it averages."""
        super().setup(trainer, task, stage)
        if stage == "fit":
            self._source, self._shown = task, None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the modules, which its run has."""
        return {**vars(self), "_source": None, "_shown": None}

    def averaged_module(self) -> Any:
        """Return a copy of the module that holds the averages; what is changed in it changes them. None before a fit.

        A copy that is made before weights were averaged has those of that moment.
        """
        if self._source is None:
            return None
        if self._shown is None:
            trainer = self._source.__dict__.pop("_trainer", None)
            try:
                self._shown = copy.deepcopy(self._source)
            finally:
                self._source.__dict__["_trainer"] = trainer
        whole, own = self.averaged_state_dict(), self._averaged(self._shown)  # type: ignore[arg-type]
        for name, average in whole.items():
            if own[name].dtype == average.dtype and own[name].device == average.device:
                own[name].data = average
            else:
                own[name].data.copy_(average)
        return self._shown

    def start_from(self, module: Any) -> None:
        """Take a module's weights as the averages."""
        self.averages = {name: tensor.detach() for name, tensor in self._averaged(module).items()}


class AveragedView(AveragedModel):
    """Averages as torch's AveragedModel: `module` holds them, `update_parameters` adds weights to them."""

    def __init__(self, averaging: "WeightAveraging", module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.averaging, self.module = averaging, module
        self.register_buffer("n_averaged", torch.tensor(averaging.updates))

    def update_parameters(self, model: Any) -> None:
        """Add a module's weights to the averages."""
        self.averaging.update(model)
        self.averaging.averaged_module()
        self.n_averaged.fill_(self.averaging.updates)


@with_optional_arguments("on_train_epoch_end")
class StochasticWeightAveraging(AveragedModule, swa.StochasticWeightAveraging, Callback):
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
        self._device = device
        self.momenta: dict[Any, float | None] = {}

    @staticmethod
    def avg_fn(averaged_model_parameter: Any, model_parameter: Any, num_averaged: Any) -> Any:
        """Return new averages: the mean of one more value."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    @property
    def n_averaged(self) -> torch.Tensor:
        """Number of times that weights were averaged."""
        return torch.tensor(self.updates)

    @n_averaged.setter
    def n_averaged(self, count: Any) -> None:
        self.updates = int(count)

    @property
    def swa_end(self) -> float:
        """The last epoch to average, counted from 0."""
        return math.inf if self._max_epochs in (None, -1) else self._max_epochs - 1

    _max_epochs: int | None = None

    # private in Lightning, and read by programs
    _swa_lrs, _swa_epoch_start, _annealing_epochs, _annealing_strategy, _avg_fn, _latest_update_epoch = map(
        alias, ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy", "avg_fn", "_last_epoch")
    )
    _model_contains_batch_norm: bool | None = None
    _initialized = property(lambda averaging: averaging._last_epoch >= 0)

    @property
    def _average_model(self) -> Any:
        return self.averaged_module()

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Refuse optimizers that it cannot average, and look for batch norms."""
        super().on_fit_start(trainer, task)
        self._model_contains_batch_norm = self.pl_module_contains_batch_norm(task)

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Find the first and the last epoch."""
        super().setup(trainer, task, stage)
        self._max_epochs = trainer.max_epochs
        if stage == "fit" and self._is_own("update_parameters"):
            self.averaged_module()  # a copy of the first weights, which that method may use

    def _is_own(self, name: str) -> bool:
        """Return whether a program's subclass has a method of this class."""
        return getattr(type(self), name) is not getattr(StochasticWeightAveraging, name)

    def update(self, task: "Task") -> None:
        """Add the current weights to the averages, by `update_parameters` where a subclass has its own."""
        if not self._is_own("update_parameters"):
            super().update(task)
            return
        count = self.n_averaged
        if not self.averages:
            self.start_from(self.averaged_module())
        self.update_parameters(self.averaged_module(), task, count, self.avg_fn)
        self.updates = int(count)

    def leave_averages(self, task: "Task") -> None:
        """Let the task hold the averages, by `transfer_weights` where a subclass has its own."""
        if self._is_own("transfer_weights") and self.updates:
            self.transfer_weights(self.averaged_module(), task)
        else:
            super().leave_averages(task)

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


class WeightAveraging(AveragedModule, weight_averaging.WeightAveraging, Callback):
    """Averages the weights after the steps that `should_update(step_idx, epoch_idx)` chooses."""

    def __init__(
        self, device: Any = None, use_buffers: bool = True, avg_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        self._kwargs = dict(kwargs) if avg_fn is None else {"avg_fn": avg_fn, **kwargs}
        multi_avg_fn = kwargs.pop("multi_avg_fn", None)
        if kwargs or (avg_fn is not None and multi_avg_fn is not None):
            raise UnsupportedError(
                f"WeightAveraging({', '.join(kwargs) or 'avg_fn, multi_avg_fn'}): averages are computed by Legato and "
                f"not by AveragedModel; give avg_fn or multi_avg_fn, or override average(averages, weights)."
            )
        super().__init__(use_buffers)
        self._device = torch.device(device) if isinstance(device, str) else device
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._latest_update_step, self._latest_update_epoch = 0, -1

    _use_buffers = alias("use_buffers")

    @property
    def _average_model(self) -> "AveragedView | None":
        """The averages as torch's AveragedModel; private in Lightning, and read by programs."""
        module = self.averaged_module()
        return None if module is None else AveragedView(self, module)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and what Lightning's callback asks for."""
        state = super().state_dict()
        return {**state, "latest_update_step": self._latest_update_step} if state else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages."""
        super().load_state_dict(state_dict)
        self._latest_update_step = state_dict.get("latest_update_step", 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average after this step, counted from 0, or at the end of this epoch."""
        return step_idx is not None

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Average after a step that was chosen; a batch that is accumulated ends none."""
        before, self._step = self._step, trainer.global_step
        if self._step != before and self.should_update(step_idx=self._step - 1):
            self.update(task)
            self._latest_update_step = self._step

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Average at the end of an epoch that was chosen."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self.update(task)
            self._latest_update_epoch = trainer.current_epoch

    def leave_averages(self, task: "Task") -> None:
        """Let the task hold the averages."""
        self._copy_average_to_current(task)

    # --- evaluation, by private methods of Lightning's that programs override ---------------------------------------
    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the trained weights until the first batch."""

    def on_validation_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Swap in the averages."""
        self._swap_models(task)

    on_validation_epoch_end = on_validation_epoch_start

    def _swap_models(self, pl_module: "Task") -> None:
        """Exchange the module's weights and the averages."""
        (self._swap_out if self._trained else self._swap_in)(pl_module)

    def _copy_average_to_current(self, pl_module: "Task") -> None:
        """Let the module hold the averages."""
        super().leave_averages(pl_module)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Put the averages into a checkpoint that a program makes itself, as its `state_dict`."""
        trained = dict(checkpoint.get("state_dict", {}))  # before the averages take their place
        super().on_save_checkpoint(trainer, task, checkpoint)
        averages = {} if "versions" in checkpoint else self.averaged_state_dict()
        if averages and trained:
            checkpoint["current_model_state"] = trained
            checkpoint["state_dict"] = {name: averages.get(name, value) for name, value in trained.items()}
            checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self.updates)}

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
