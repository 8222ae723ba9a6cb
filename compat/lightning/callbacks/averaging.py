"""StochasticWeightAveraging, WeightAveraging and EMAWeightAveraging, with Lightning's arguments and file format."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.swa_utils import update_bn

from ....base.errors import ConfigError
from ....callbacks import weight_averaging
from ....loggers.logger import NoExperiment
from ..placeholders import UnsupportedError, refuse_overrides
from .callback import Callback

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task


MANUAL = ("manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer")
"""Methods that training_step calls to train the module in manual optimization."""


class TrainingSteps(torch.nn.Module):
    """A module whose forward method is a task's training_step."""

    def __init__(self, task: "Task") -> None:
        super().__init__()
        self.task, self.training = task, task.training

    def forward(self, arguments: tuple[Any, ...]) -> Any:
        """Call training_step with `arguments`: a batch and, if training_step accepts it, the batch index."""
        return self.task.training_step(*arguments)


OWN_AVERAGES = "Legato computes the averages. Pass avg_fn, or override average(averages, weights)."


class StochasticWeightAveraging(weight_averaging.WeightAveraging, Callback):
    """Averages the weights at the start of each epoch, beginning with epoch `swa_epoch_start`.

    After `fit`, the module holds the averaged weights. From that epoch on, the learning rate is annealed to
    `swa_lrs` and then kept constant, regardless of the module's scheduler. At the end, an extra pass over the training
    data computes batch norm statistics for the averaged weights.
    Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (arXiv:1803.05407).
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
        refuse_overrides(self, ("update_parameters", "transfer_weights"), OWN_AVERAGES)
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ConfigError(
                "StochasticWeightAveraging: expected swa_lrs to be a positive float or a list of positive floats, got "
                f"{swa_lrs!r}."
            )
        fraction = isinstance(swa_epoch_start, float)
        if not (0 <= swa_epoch_start <= 1 if fraction else swa_epoch_start >= 1):
            raise ConfigError(
                "StochasticWeightAveraging: expected swa_epoch_start to be an epoch number of 1 or greater, or a "
                f"fraction of max_epochs from 0.0 to 1.0, got {swa_epoch_start!r}."
            )
        if annealing_strategy not in ("cos", "linear") or annealing_epochs < 0:
            raise ConfigError(
                f"StochasticWeightAveraging: annealing_strategy must be 'cos' or 'linear' and annealing_epochs at "
                f"least 0, got {annealing_strategy!r} and {annealing_epochs!r}."
            )
        self.swa_lrs, self.swa_epoch_start = rates, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self.avg_fn = avg_fn or self.avg_fn  # type: ignore[method-assign]
        self.swa_start = 0
        """The first epoch to average, counted from 0."""
        self._last_epoch = -1
        """The latest epoch whose initial weights have been added to the averages."""
        self._rates_before: list[float] = []
        """Learning rates at the start of the first averaged epoch."""

    @staticmethod
    def avg_fn(averaged_model_parameter: Any, model_parameter: Any, num_averaged: Any) -> Any:
        """Return the mean, updated to include one more value."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    def average(self, averages: torch.Tensor, weights: torch.Tensor) -> None:
        """Update the averages in place with new weights."""
        averages.copy_(self.avg_fn(averages, weights, torch.tensor(self.updates, device=averages.device)))

    # --- training ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Compute the first epoch to average. Raises ConfigError for a fractional start if `max_epochs` is not set."""
        super().setup(trainer, task, stage)
        if stage != "fit":
            return
        if trainer.strategy.elastic:
            raise ConfigError(
                "StochasticWeightAveraging ends with an extra pass over the training data, which cannot be repeated "
                "if a process dies during this pass. Remove the callback or elastic=true."
            )
        start: Any
        start, self._last_epoch, self._rates_before = self.swa_epoch_start, -1, []
        if isinstance(start, float):
            if trainer.max_epochs in (None, -1):
                raise ConfigError("StochasticWeightAveraging: a fractional swa_epoch_start requires max_epochs.")
            start = int((trainer.max_epochs or 0) * start)
        self.swa_start = max(start - 1, 0)

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Raise ConfigError unless there is exactly one optimizer and `swa_lrs` has one rate or one per group."""
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        if len(groups) != 1 or len(self.swa_lrs) not in (1, groups[0]):
            raise ConfigError(
                "StochasticWeightAveraging: expected one optimizer, and either one learning rate or one for each "
                f"parameter group; got {len(groups)} optimizers with {groups} groups and {len(self.swa_lrs)} rates."
            )

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Add the epoch's initial weights to the averages."""
        epoch = trainer.current_epoch
        if epoch < self.swa_start:
            return
        if not self._rates_before:
            self._rates_before = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        # This callback computes the rate from the epoch, without a scheduler. A checkpoint then contains the scheduler
        # that configure_optimizers creates, and a resumed run needs only this callback's state.
        self._set_rates(trainer)
        # a resumed run restarts its epoch, whose initial weights are already in the averages
        if epoch > self._last_epoch:
            self._last_epoch = epoch
            self.update(task)

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Undo any changes that a per-step scheduler made to the learning rates."""
        if self._rates_before:
            self._set_rates(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Set the next epoch's learning rates now, for callbacks that read them before that epoch starts."""
        if self._rates_before:
            self._set_rates(trainer, trainer.current_epoch + 1)

    def _set_rates(self, trainer: "Trainer", epoch: int | None = None) -> None:
        """Set the rates for an epoch (default: the current one), interpolated from the previous rates to `swa_lrs`."""
        done = (trainer.current_epoch if epoch is None else epoch) - self.swa_start
        share = min(1.0, done / self.annealing_epochs) if self.annealing_epochs else 1.0
        share = (1 - math.cos(math.pi * share)) / 2 if self.annealing_strategy == "cos" else share
        groups = trainer.optimizers[0].param_groups
        rates = self.swa_lrs * len(groups) if len(self.swa_lrs) == 1 else self.swa_lrs
        for group, before, after in zip(groups, self._rates_before, rates, strict=False):
            group["lr"] = after * share + before * (1 - share)

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the averages in the task if the run has reached `max_epochs` or has no epoch limit."""
        if trainer.max_epochs in (None, -1) or trainer.current_epoch >= (trainer.max_epochs or 0):
            super().on_fit_end(trainer, task)
            if self.updates:
                self._measure_batch_norms(trainer, task)

    def _measure_batch_norms(self, trainer: "Trainer", task: "Task") -> None:
        """Compute batch norm statistics in a single pass over the training data, without logging values."""
        run, steps = trainer.current_run, TrainingSteps(task)
        batches = (item for step in run.training_data.epoch(run.state.epoch) for item in step.batches)
        moved = ((item, item.batch if run.transfer is None else run.transfer(item.batch, 0)) for item in batches)
        # training_step logs values, but the batches do not belong to the run
        run.metrics.muted = True
        # a module with manual optimization must not train here
        task.__dict__ |= dict.fromkeys(MANUAL, NoExperiment())
        try:
            # torch uses the first item of a tuple as the model's input
            update_bn((((batch, item.batch_idx)[: run.arity],) for item, batch in moved), steps)
        finally:
            run.metrics.muted = False
            for name in MANUAL:
                del task.__dict__[name]
        # each process has measured its own shard of the data
        trainer.strategy.align_buffers()

    # --- evaluation, which uses the trained weights -----------------------------------------------------------------
    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Do nothing, because the averages are updated at the start of the next epoch."""

    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Keep the training weights."""

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Store the training weights as the model's weights, even in a weights-only checkpoint."""

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the averages and previous learning rates. With sharded weights, every rank must call this method."""
        state = super().state_dict()
        return state and {**state, "last_epoch": self._last_epoch, "rates_before": self._rates_before}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages. They are sharded later, when training starts."""
        super().load_state_dict(state_dict)
        self._last_epoch, self._rates_before = state_dict["last_epoch"], list(state_dict["rates_before"])


class WeightAveraging(weight_averaging.WeightAveraging, Callback):
    """Averages the weights after the steps and epochs that `should_update(step_idx, epoch_idx)` selects."""

    def __init__(
        self, device: Any = None, use_buffers: bool = True, avg_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        multi_avg_fn = kwargs.pop("multi_avg_fn", None)
        if kwargs or (avg_fn is not None and multi_avg_fn is not None):
            raise UnsupportedError(f"WeightAveraging({', '.join(kwargs) or 'avg_fn, multi_avg_fn'}): {OWN_AVERAGES}")
        super().__init__(use_buffers)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._latest_update_step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, including the entries that Lightning's callback expects."""
        state = super().state_dict()
        return {**state, "latest_update_step": self._latest_update_step} if state else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages."""
        super().load_state_dict(state_dict)
        self._latest_update_step = state_dict.get("latest_update_step", 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the averages after a step or at the end of an epoch. Both indices start at 0."""
        return step_idx is not None

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Average after a selected step."""
        self._step = trainer.global_step
        if self.should_update(step_idx=self._step - 1):
            self.update(task)
            self._latest_update_step = self._step

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Average at the end of a selected epoch."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self.update(task)

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the training weights in place until the validation epoch starts."""

    def on_validation_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Replace the training weights with the averages."""
        self._swap_in(task)

    def on_validation_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Restore the training weights."""
        self._swap_out(task)

    def average(self, averages: Any, weights: Any) -> None:
        """Update the averages in place with new weights."""
        if self._multi_avg_fn is not None:
            self._multi_avg_fn([averages], [weights], self.updates)
        elif self._avg_fn is None:
            super().average(averages, weights)
        else:
            averages.copy_(self._avg_fn(averages, weights, self.updates))


class EMAWeightAveraging(WeightAveraging):
    """Maintains an exponential moving average of the weights."""

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
        weight_averaging.ExponentialMovingAverage(decay, every_n_steps=update_every_n_steps)  # validates the arguments
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the averages after a step or at the end of an epoch. Both indices start at 0."""
        if step_idx is not None:
            begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first

    def average(self, averages: Any, weights: Any) -> None:
        """Update the averages in place with new weights."""
        averages.lerp_(weights, 1.0 - self.decay)
