"""What optimization asks of optimizers."""

import inspect

from torch import nn
from torch.optim import Optimizer


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def may_draw(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may draw random numbers: torch's own draw none."""
    # torch.optim draws nothing; of others nobody can know, and seeding the generators costs microseconds
    return not f"{type(optimizer).__module__}.".startswith("torch.optim.")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step evaluates the loss itself, as that of LBFGS does."""
    # asked of the class: learning rate schedulers replace an instance's `step` by a wrapper
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return bool(parameters) and parameters[0].name == "closure" and parameters[0].default is inspect.Parameter.empty
