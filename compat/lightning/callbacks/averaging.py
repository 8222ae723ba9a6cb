"""StochasticWeightAveraging, WeightAveraging and EMAWeightAveraging, with the averages as a module."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.swa_utils import AveragedModel, update_bn

from ....base.errors import ConfigError
from ....base.torch_private import batch_norms
from ....callbacks import weight_averaging
from ....loggers.logger import NoExperiment
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


MANUAL = ("manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer")
"""Methods by which a training_step trains the module itself."""


class TrainingSteps(torch.nn.Module):
    """A module whose forward is the training_step of a task."""

    def __init__(self, task: "Task") -> None:
        super().__init__()
        self.task, self.training = task, task.training

    def forward(self, arguments: tuple[Any, ...]) -> Any:
        """Call it with the first of (batch, batch_idx)."""
        return self.task.training_step(*arguments)


@with_optional_arguments("on_train_epoch_end")
class StochasticWeightAveraging(AveragedModule, Callback):
    """Averages the weights at the beginning of the last epochs, and leaves the mean in the module after `fit`.

    From the first of these epochs on the learning rate goes to `swa_lrs` and stays there, whatever the module's
    scheduler says. The statistics of batch norms are computed for the averaged weights, by one more pass over the
    training data. Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization
    (arXiv:1803.05407).
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[..., Any] | None = None,
        device: Any = "cpu",
    ) -> None:
        super().__init__()
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ConfigError(
                f"StochasticWeightAveraging: swa_lrs={swa_lrs!r}: expected a positive float or a list of them."
            )
        fraction = isinstance(swa_epoch_start, float)
        if not (0 <= swa_epoch_start <= 1 if fraction else swa_epoch_start >= 1):
            raise ConfigError(
                f"StochasticWeightAveraging: swa_epoch_start={swa_epoch_start!r}: expected an epoch from 1 on, or a "
                f"fraction of max_epochs from 0.0 to 1.0."
            )
        if annealing_strategy not in ("cos", "linear") or annealing_epochs < 0:
            raise ConfigError(
                f"StochasticWeightAveraging: expected annealing_strategy 'cos' or 'linear' and annealing_epochs of at "
                f"least 0, got {annealing_strategy!r} and {annealing_epochs!r}."
            )
        self.swa_lrs, self.swa_epoch_start = rates, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self.avg_fn = avg_fn or self.avg_fn  # type: ignore[method-assign]
        self.swa_start = 0
        """The first epoch to average, counted from 0."""
        self._last_epoch = -1
        """The newest epoch whose first weights are in the averages."""
        self._rates_before: list[float] = []
        """Learning rates at the beginning of the first averaged epoch."""
        self._device = device
        self.momenta: dict[Any, float | None] = {}

    @staticmethod
    def avg_fn(averaged_model_parameter: Any, model_parameter: Any, num_averaged: Any) -> Any:
        """Return new averages: the mean of one more value."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    def average(self, averages: torch.Tensor, weights: torch.Tensor) -> None:
        """Update averages in place by new weights."""
        averages.copy_(self.avg_fn(averages, weights, torch.tensor(self.updates, device=averages.device)))

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

    # --- training ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Find the first epoch. Raises ConfigError without a last one where a fraction was given."""
        super().setup(trainer, task, stage)
        self._max_epochs = trainer.max_epochs
        if stage != "fit":
            return
        trainer.strategy.elastic.refuse(
            "StochasticWeightAveraging ends with a pass over the training data of its own, which cannot be repeated "
            "where a process dies in it: remove it, or elastic=true."
        )
        start: Any
        start, self._last_epoch, self._rates_before = self.swa_epoch_start, -1, []
        if isinstance(start, float):
            if trainer.max_epochs in (None, -1):
                raise ConfigError("StochasticWeightAveraging: swa_epoch_start as a fraction needs max_epochs.")
            start = int((trainer.max_epochs or 0) * start)
        self.swa_start = max(start - 1, 0)
        if self._is_own("update_parameters"):
            self.averaged_module()  # a copy of the first weights, which that method may use

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Raise ConfigError unless there is one optimizer, with as many groups as learning rates."""
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        if len(groups) != 1 or len(self.swa_lrs) not in (1, groups[0]):
            raise ConfigError(
                f"StochasticWeightAveraging takes one optimizer, and one learning rate or one for each parameter group "
                f"of it; got {len(groups)} optimizers with {groups} groups and {len(self.swa_lrs)} rates."
            )
        self._model_contains_batch_norm = self.pl_module_contains_batch_norm(task)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Add the epoch's first weights to the averages."""
        epoch = trainer.current_epoch
        if epoch < self.swa_start:
            return
        if not self._rates_before:
            self._rates_before = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        # A function of the epoch, and no scheduler of its own: a checkpoint then holds the scheduler that
        # configure_optimizers makes, and a resume needs nothing but this callback's state.
        self._set_rates(trainer)
        if epoch > self._last_epoch:
            self._last_epoch = epoch
            self.update(task)

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Undo what a scheduler that goes by steps did to the learning rate."""
        if self._rates_before:
            self._set_rates(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Set the next epoch's learning rates, for what looks at them before it begins."""
        if self._rates_before:
            self._set_rates(trainer, trainer.current_epoch + 1)

    def _set_rates(self, trainer: "Trainer", epoch: int | None = None) -> None:
        """Set the learning rates of an epoch, by default the current one, between those before and `swa_lrs`."""
        done = (trainer.current_epoch if epoch is None else epoch) - self.swa_start
        share = min(1.0, done / self.annealing_epochs) if self.annealing_epochs else 1.0
        share = (1 - math.cos(math.pi * share)) / 2 if self.annealing_strategy == "cos" else share
        groups = trainer.optimizers[0].param_groups
        rates = self.swa_lrs * len(groups) if len(self.swa_lrs) == 1 else self.swa_lrs
        for group, before, after in zip(groups, self._rates_before, rates, strict=False):
            group["lr"] = after * share + before * (1 - share)

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the averages in the task if the run has reached its last epoch, or there is none."""
        if trainer.max_epochs in (None, -1) or trainer.current_epoch >= (trainer.max_epochs or 0):
            super().on_fit_end(trainer, task)
            if self.updates:
                self._measure_batch_norms(trainer, task)

    def _measure_batch_norms(self, trainer: "Trainer", task: "Task") -> None:
        """Compute the statistics of batch norms as the mean over a pass over the training data, without its logs."""
        if not self._model_contains_batch_norm:
            return
        run, steps = trainer.current_run, TrainingSteps(task)
        batches = (item for step in run.training_data.epoch(run.state.epoch) for item in step.batches)
        moved = ((item, item.batch if run.transfer is None else run.transfer(item.batch, 0)) for item in batches)
        run.metrics.muted = True
        # a module that calls backward and its optimizer itself must not do so here
        task.__dict__ |= dict.fromkeys(MANUAL, NoExperiment())
        try:
            # torch takes the first item of a tuple as a model's input
            update_bn((((batch, item.batch_idx)[: run.arity],) for item, batch in moved), steps)
        finally:
            run.metrics.muted = False
            for name in MANUAL:
                del task.__dict__[name]
        trainer.strategy.align_buffers()

    # --- evaluation, which is of the trained weights ----------------------------------------------------------------
    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the averages to the beginning of the next epoch."""

    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Keep the trained weights."""

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Keep the trained weights as the model's, also in a checkpoint of weights alone."""

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and the learning rates before them. Collective under a sharded strategy."""
        state = super().state_dict()
        return state and {**state, "last_epoch": self._last_epoch, "rates_before": self._rates_before}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages; they are sharded when training begins."""
        super().load_state_dict(state_dict)
        self._last_epoch, self._rates_before = state_dict["last_epoch"], list(state_dict["rates_before"])

    # --- Lightning's static methods -----------------------------------------------------------------------------
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

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Average after a step that was chosen."""
        self._step = trainer.global_step
        if self.should_update(step_idx=self._step - 1):
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
        weight_averaging.ExponentialMovingAverage(decay, every_n_steps=update_every_n_steps)  # refuses wrong values
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
