"""Bytes of a run's state, computed from a number of parameters or measured on a task on the meta device.

torch is imported only for measuring.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from ...base.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

VALUES_PER_PARAMETER = {
    "sgd": 0,
    "sgd_momentum": 1,
    "adam": 2,
    "adamw": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "adam_amsgrad": 3,
    "adagrad": 1,
    "adadelta": 2,
    "rmsprop": 1,
    "rprop": 2,
    "asgd": 1,
    "muon": 1,
}
"""Values per parameter in the state of torch's optimizers, without step counts and other scalars."""


@dataclass(frozen=True)
class StateSize:
    """State of one process, of a replicated model or of its shard; in bytes, except `parameters`."""

    parameters: int
    """Number of parameters, trainable or not."""
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    """None if unknown."""
    optimizer: str
    """The optimizer's name, or the reason why its size is unknown."""

    @property
    def process_bytes(self) -> int:
        """Parameters, buffers, gradients and, if known, optimizer state."""
        return self.parameter_bytes + self.buffer_bytes + self.gradient_bytes + (self.optimizer_bytes or 0)

    def of_rank(self, weight_parts: int, optimizer_parts: int) -> "StateSize":
        """Return the state of a rank, with weights and optimizer state sharded into so many parts."""
        kept = None if self.optimizer_bytes is None else -(-self.optimizer_bytes // optimizer_parts)
        weights, gradients = -(-self.parameter_bytes // weight_parts), -(-self.gradient_bytes // weight_parts)
        return replace(self, parameter_bytes=weights, gradient_bytes=gradients, optimizer_bytes=kept)

    @property
    def checkpoint_bytes(self) -> int:
        """Parameters, buffers and, if known, optimizer state; the remaining few KiB are not counted."""
        return self.parameter_bytes + self.buffer_bytes + (self.optimizer_bytes or 0)


@dataclass(frozen=True)
class Share:
    """State of some ranks."""

    ranks: range
    what: str
    """Part of the model that they hold; empty if all ranks hold equal parts."""
    size: StateSize
    at_most: bool = False
    """Whether some of these ranks hold less, because a tensor does not divide evenly."""


def from_parameters(parameters: int, optimizer: str = "adamw", width: int = 4) -> StateSize:
    """Return the state of a model with so many trained parameters of `width` bytes each.

    `optimizer` is a key of VALUES_PER_PARAMETER or a number of values per parameter. Raises ConfigError for others.
    """
    if parameters < 0:
        raise ConfigError(f"parameters={parameters}: expected a count.")
    kept = int(optimizer) if optimizer.isdecimal() else VALUES_PER_PARAMETER.get(optimizer.lower())
    if kept is None:
        raise ConfigError(
            f"optimizer={optimizer!r} is not known.{did_you_mean(optimizer, VALUES_PER_PARAMETER)} There are "
            f"{', '.join(VALUES_PER_PARAMETER)}, or give its number of values per parameter: optimizer=2."
        )
    name = f"{kept} values a parameter" if optimizer.isdecimal() else optimizer
    size = parameters * width
    return StateSize(parameters, size, 0, size, kept * size, name)


def measure(
    task: "nn.Module", optimizers: "Sequence[Optimizer]", unknown: str = "", own: "set[int] | None" = None
) -> StateSize:
    """Return the state of a task on the meta device, where its optimizers take a step to create theirs.

    unknown: reason why there are no optimizers.
    own: ids of the parameters that the process holds; None for all.
    """
    import torch

    parameters = [parameter for parameter in task.parameters() if own is None or id(parameter) in own]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in task.parameters():
        parameter.grad = None
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    name = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)) or "no optimizer"
    for optimizer in optimizers:
        try:
            optimizer.step()
        except Exception as error:  # custom optimizers may read values, but mostly after they created their state
            owners = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
            if not all(optimizer.state.get(one) for one in owners):
                unknown = f"{name} cannot be measured without data ({type(error).__name__}); give optimizer=NAME"
    states = (state.values() for optimizer in optimizers for state in optimizer.state.values())
    kept = sum_bytes(value for value in chain.from_iterable(states) if isinstance(value, torch.Tensor))
    return StateSize(
        sum(parameter.numel() for parameter in parameters),
        sum_bytes(parameters),
        sum_bytes(task.buffers()),
        sum_bytes(trained),
        None if unknown else kept,
        unknown or name,
    )


def sum_bytes(tensors: "Iterable[Tensor]") -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
