"""BatchWeights: the weights, if any, that training_step returns for a step's batches.

The gradient of a step is the mean over its batches, weighted by their sample counts or by the weights that
training_step returns:

    {"loss": loss, "weight": tokens}       sum(tokens * gradient of loss) / sum(tokens)

Before the backward pass, the weights of later batches and of other ranks' batches are unknown, so each loss is
multiplied by its weight, and the reduced gradients are divided by the sum of all weights.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import TaskError
from ...base.tensors import local_part
from ...base.torch_private import divide_each
from ..accelerators import widest_float
from ..data.steps import ReplicaBatch, StepInput

if TYPE_CHECKING:
    from ...base.contracts import Trainer

# Factor of all weights until the first step shows their magnitude
FIRST_SCALE = 2.0**-10


class BatchWeights:
    """A step's batch weights, summed for each replica.

    The object also records whether this run uses batch weights.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.strategy, self.state, self.task = trainer.strategy, trainer.state, trainer.task
        # Whether batches have weights; None until the ranks have compared the outputs of their first step
        self.used: bool | None = None
        # The latest batch's weight, or its number of samples
        self.newest: Any = 0
        self.sums = torch.zeros(0)
        # Numbers of batches without and with a weight, until the ranks have compared them
        self.counts = [0, 0]

    def begin_step(self) -> None:
        """Clear the weights of the previous step."""
        device = self.strategy.device
        sums = torch.zeros(self.state.replicas, dtype=widest_float(device), device=device)
        self.sums, self.counts = sums, [0, 0]

    def take(self, output: Any, item: ReplicaBatch, step: StepInput) -> Any:
        """Add the batch's weight to the step's weights and return the factor for the batch's loss."""
        weight = weight_of(output)
        self.newest = item.samples if weight is None else weight
        if output is not None:
            self.counts[weight is not None] += 1
            if self.used not in (None, weight is not None):
                raise TaskError(MIXED)
        if weight is None:
            return item.samples * self.strategy.loss_scale / step.samples
        self.sums[item.replica] += weight
        return self.factor(weight, step)

    def factor(self, weight: Any, step: StepInput) -> Any:
        """Return the factor for the loss of a batch with the given weight."""
        return weight * (self.strategy.loss_scale / step.samples * self._scale())

    def divide_gradients(self, step: StepInput) -> Tensor | float:
        """Divide the step's gradients by the sum of its batches' weights. All ranks must call this.

        Returns the divisor, which is 1.0 if no batch has a weight. Raises TaskError on all ranks if only some batches
        have a weight.
        """
        ranks = self.strategy.data_ranks
        if self.used is False:
            return 1.0
        if self.used is None:
            without, weighted = ranks.all_reduce(torch.tensor(self.counts), "sum").tolist()
            if without and weighted:
                raise TaskError(MIXED)
            if without or not weighted:
                self.used = False if without else None  # still unknown without a batch
                return 1.0
        # by replica, so that the sum is the same on any number of processes
        total = ranks.all_reduce(self.sums, "sum").sum()
        divisor = total * self._scale() / step.samples
        divisor = torch.where(divisor == 0.0, 1.0, divisor)  # all weights are 0
        if self.used is None:
            self._settle(float(total) / step.samples)
        self._divide(divisor)
        return divisor

    def _divide(self, divisor: Tensor) -> None:
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in self.task.parameters():
            if parameter.grad is not None:
                gradient = local_part(parameter.grad).detach()
                kinds.setdefault((gradient.device, gradient.dtype, gradient.layout), []).append(gradient)
        for (device, dtype, _), gradients in kinds.items():
            # in the gradients' dtype, torch divides all at once; half precision would round the divisor
            divide_each(gradients, divisor.to(device).to(dtype if dtype.itemsize >= 4 else divisor.dtype))

    def _scale(self) -> float:
        return self.state.weight_scale or FIRST_SCALE

    def _settle(self, weight_of_sample: float) -> None:
        """Record that batches have weights, and how large the weights are.

        Raises TaskError for invalid weights.
        """
        if not 0.0 <= weight_of_sample < math.inf:
            raise TaskError(f"The weights returned by training_step sum to {weight_of_sample}; {EXPECTED_WEIGHT}.")
        self.used = True
        # Losses multiplied by thousands of tokens would overflow in half precision. A power of two changes no other
        # bits; the run stores it, so that a resumed run uses the same one.
        if not self.state.weight_scale and weight_of_sample:
            self.state.weight_scale = 2.0 ** -round(math.log2(weight_of_sample))


EXPECTED_WEIGHT = "expected a nonnegative number or a one-element tensor, such as the batch's number of tokens"
MIXED = (
    "training_step returned a 'weight' with the loss for some batches but not for others, so the step's mean is "
    'undefined. Return {"loss": loss, "weight": weight} for every batch, or for none.'
)


def weight_of(output: Any) -> Any:
    """Return the weight in training_step's output, as a number or a 0-dim tensor, or None if there is no weight.

    Raises TaskError for an invalid weight.
    """
    weight = output.get("weight") if isinstance(output, Mapping) else None
    if weight is None:
        return None
    if isinstance(weight, Real) and 0.0 <= float(weight) < math.inf:
        return float(weight)
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        weight = weight.detach().reshape(())
        return weight.to(widest_float(weight.device))
    description = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    raise TaskError(f"training_step returned the weight {description}; {EXPECTED_WEIGHT}.")
