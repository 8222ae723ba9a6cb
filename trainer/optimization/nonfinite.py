"""SkipGuard: skips steps with NaN or infinite gradients (`trainer.nan=skip`)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...base.errors import ConfigError, NonFiniteError
from ...base.torch_private import mark_stepped
from ..metrics.log import PENDING_LIMIT, Metrics
from ..metrics.reduce import Reduced, to_floats
from .diagnosis import explained
from .finite import are_finite
from .optimizers import optimizer_parameters

if TYPE_CHECKING:
    from ...base.contracts import Task, Trainer


class SkipGuard:
    """Guard that skips the update of a step whose gradients are not finite.

    Reduced gradients are identical on all ranks, so all ranks skip the same steps without a collective. When a step is
    skipped, its changes to buffers, torchmetrics states and logged values are reverted, but the step still counts.
    """

    def __init__(
        self, trainer: "Trainer", task: "Task", metrics: Metrics, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        if not task.automatic_optimization:
            raise ConfigError(
                "trainer.nan=skip skips a step's update, but with manual optimization, training_step updates the "
                "weights itself. Check the gradients before optimizer.step(), or set nan=raise or nan=ignore."
            )
        self.trainer, self.task, self.metrics, self.optimizers = trainer, task, metrics, optimizers
        self.state, self.strategy = trainer.state, trainer.strategy
        self.buffers: list[Tensor] = []
        self.before: list[Tensor] = []
        self.metrics_before = metrics.states.snapshot()

    def begin_step(self) -> None:
        """Copy everything that a step may change, except the weights, and clear the previous step's losses."""
        metrics = self.metrics
        metrics.losses.clear()
        if len(metrics.pending) > PENDING_LIMIT // 2:
            metrics.flush()  # a flush within the step would make its values impossible to drop
        # in each step, since only its gradients show whether it will be skipped
        self.metrics_before = metrics.states.snapshot()
        self.buffers = list(self.task.buffers())
        self.before = [buffer.detach().clone() for buffer in self.buffers]

    def drops_step(self) -> bool:
        """Return whether to skip the update. The step's gradient must be complete.

        Raises NonFiniteError after too many skipped steps in a row.
        """
        state, ranks = self.state, self.strategy.collectives
        # reduced gradients: all ranks see the same values, and skip the same steps without a collective
        parameters = (parameter for optimizer in self.optimizers for parameter in optimizer_parameters(optimizer))
        finite = are_finite(parameter.grad for parameter in parameters if parameter.grad is not None)
        if self.strategy.gradients_in_parts:  # an inf may be in only one rank's part
            finite = not ranks.any(not finite)
        if finite or not self._loss_is_bad():
            state.skipped_in_a_row = 0
            return False
        self._roll_back()
        state.skipped_in_a_row += 1
        limit = self.trainer.nan_skips
        # a scaled loss may overflow occasionally, but a diverged model skips every further step
        if state.skipped_in_a_row > limit:
            step, skipped = state.global_step + 1, state.skipped_in_a_row
            error = NonFiniteError(
                f"{skipped} steps in a row, up to step {step}, had non-finite gradients, but nan_skips is {limit}. "
                f"Lower the learning rate or set gradient_clip_val. The weights are from step {step - skipped}."
            )
            raise explained(self.trainer, error)
        return True

    def _roll_back(self) -> None:
        """Restore everything that `begin_step` copied and count the step as skipped."""
        with torch.no_grad():
            for buffer, value in zip(self.buffers, self.before, strict=True):
                buffer.copy_(value)
        self.metrics.drop_step()
        self.metrics.states.restore(self.metrics_before)
        for optimizer in self.optimizers:
            mark_stepped(optimizer)  # otherwise a scheduler warns that it ran before the first optimizer step
        self.state.skipped_steps += 1

    def _loss_is_bad(self) -> bool:
        """Return whether the loss itself is non-finite, rather than only its scaled gradient."""
        if self.strategy.precision.scaler is None:
            return True
        values = to_floats([loss for loss, _ in self.metrics.losses])
        return self.strategy.collectives.any(any(value - value != 0.0 for value in values))

    def report(self, reduced: Reduced) -> None:
        """Add the number of skipped steps to a logging point."""
        reduced.all["skipped_steps"] = reduced.loggers["skipped_steps"] = float(self.state.skipped_steps)
