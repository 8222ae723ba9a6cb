"""StochasticWeightAveraging: the mean of the weights of the last epochs, at a learning rate of their own."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from .weight_averaging import WeightAveraging

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer


class StochasticWeightAveraging(WeightAveraging):
    """Averages the weights at the beginning of the last epochs, and leaves the mean in the task after `fit`.

    From the first of these epochs on the learning rate goes to `swa_lrs` and stays there, whatever the task's scheduler
    says. The statistics of batch norms are computed for the averaged weights, by one more pass over the training data.
    Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (arXiv:1803.05407).

    Args:
        swa_lrs: the learning rate, or one for each parameter group.
        swa_epoch_start: the first epoch to average, counted from 1; a float is a fraction of `max_epochs`.
        annealing_epochs: epochs in which the learning rate gets there.
        annealing_strategy: "cos" or "linear".
        avg_fn: a function of averages, weights and the count of weights averaged so far, which returns new averages;
            None: the mean.
    """

    late = -1
    after_every_step = False
    evaluates = False

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None" = None,
    ) -> None:
        super().__init__()
        rates = list(swa_lrs) if isinstance(swa_lrs, Sequence) else [swa_lrs]
        if not rates or not all(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            raise ConfigError(f"StochasticWeightAveraging: swa_lrs={swa_lrs!r}: expected positive numbers.")
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
        self.annealing_epochs, self.annealing_strategy, self.avg_fn = annealing_epochs, annealing_strategy, avg_fn
        self.swa_start = 0
        """The first epoch to average, counted from 0."""
        self._last_epoch = -1
        """The newest epoch whose first weights are in the averages."""
        self._rates_before: list[float] = []
        """Learning rates at the beginning of the first averaged epoch."""

    # --- training ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Find the first epoch. Raises ConfigError without a last one where a fraction was given."""
        super().setup(trainer, task, stage)
        if stage != "fit":
            return
        trainer.strategy.elastic.refuse(
            "StochasticWeightAveraging ends with a pass over the training data of its own, which cannot be repeated "
            "where a process dies in it: remove it, or elastic=true."
        )
        start, self._last_epoch, self._rates_before = self.swa_epoch_start, -1, []
        if isinstance(start, float):
            if trainer.max_epochs in (None, -1):
                raise ConfigError("StochasticWeightAveraging: swa_epoch_start as a fraction needs max_epochs.")
            start = int((trainer.max_epochs or 0) * start)
        self.swa_start = max(start - 1, 0)

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Raise ConfigError unless there is one optimizer, with as many groups as learning rates."""
        groups = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        if len(groups) != 1 or len(self.swa_lrs) not in (1, groups[0]):
            raise ConfigError(
                f"StochasticWeightAveraging takes one optimizer, and one learning rate or one for each parameter group "
                f"of it; got {len(groups)} optimizers with {groups} groups and {len(self.swa_lrs)} rates."
            )

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

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave the averages to the beginning of the next epoch."""

    def average(self, averages: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Update averages in place by new weights."""
        import torch

        if self.avg_fn is None:
            super().average(averages, weights)
        else:
            averages.copy_(self.avg_fn(averages, weights, torch.tensor(self.updates, device=averages.device)))

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
        """Compute the statistics of batch norms as the mean over a pass over the training data."""
        import torch

        from ..base.torch_private import batch_norms

        found: list[Any] = [module for module in task.modules() if isinstance(module, batch_norms())]
        norms = [module for module in found if module.track_running_stats]
        momenta = [module.momentum for module in norms]
        for module in norms:
            module.reset_running_stats()
            # torch then keeps the mean over all batches instead of a moving average
            module.momentum = None
        if norms:
            with torch.no_grad():
                trainer.current_run.forward_training_data()
        for module, momentum in zip(norms, momenta, strict=True):
            module.momentum = momentum

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and the learning rates before them. Collective under a sharded strategy."""
        found = super().state_dict()
        return found and {**found, "last_epoch": self._last_epoch, "rates_before": self._rates_before}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages; they are sharded when training begins."""
        super().load_state_dict(state_dict)
        self._last_epoch, self._rates_before = state_dict["last_epoch"], list(state_dict["rates_before"])
