"""What optimization asks of optimizers."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


TRAINED = "trained_weights"
"""Key, in an optimizer's state, of the weights that it trains while its parameters hold those to evaluate by."""


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer trains other weights than are evaluated, and changes over by `train` and `eval`."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def to_evaluation(optimizer: Any) -> bool:
    """Change an optimizer with modes over to the weights to evaluate by; return False where they are there already."""
    states = [(one, optimizer.state[one]) for one in optimizer_parameters(optimizer) if optimizer.state.get(one)]
    # Before the first step both are the same, and eval() may fail.
    if not states or any(TRAINED in state for _, state in states):
        return False
    for parameter, state in states:
        state[TRAINED] = parameter.detach().clone()
    optimizer.eval()
    return True


@torch.no_grad()
def to_training(optimizer: Any) -> None:
    """Change an optimizer with modes over to the weights that it trains, to the last bit."""
    optimizer.train()
    for parameter in optimizer_parameters(optimizer):
        # train() computes them, with other last digits: a run with more validations or resumes would be another one
        trained = optimizer.state.get(parameter, {}).pop(TRAINED, None)
        if trained is not None:
            parameter.copy_(trained)


def may_draw(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may draw random numbers: torch's own draw none."""
    # torch.optim draws nothing; of others nobody can know, and seeding the generators costs microseconds
    return not f"{type(optimizer).__module__}.".startswith("torch.optim.")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step evaluates the loss itself, as that of LBFGS does, or of SAM."""
    # asked of the class: learning rate schedulers replace an instance's `step` by a wrapper
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if not parameters or parameters[0].name != "closure" or not may_draw(optimizer):
        return bool(parameters) and parameters[0].default is inspect.Parameter.empty
    # Others take None and raise: a copy with small parameters, which have no gradients, is asked for a step.
    try:
        made = copy_with(optimizer, lambda one: nn.Parameter(torch.zeros([1] * one.dim(), dtype=one.dtype)))
        made.step()
    except Exception as error:  # any kind: each package has its own
        return "closure" in f"{type(error).__name__} {error}".lower()
    return False


def copy_with(optimizer: Any, change: Callable[[Tensor], nn.Parameter]) -> Any:
    """Return a copy of an optimizer that trains `change(parameter)` in the place of each parameter."""
    memo: dict[int, Any] = {id(one): change(one) for one in optimizer_parameters(optimizer)}

    def changed(states: Any) -> Any:
        found: dict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter, values in states.items():  # what the constructor has made already
            for name, value in values.items():
                is_like = isinstance(value, Tensor) and value.shape == parameter.shape
                found[memo[id(parameter)]][name] = change(value).detach().clone() if is_like else value
        return found

    def copied(value: Any) -> Any:
        if not isinstance(value, Optimizer):
            return copy.deepcopy(value, memo) if isinstance(value, list | dict) else value
        if id(value) not in memo:  # of a wrapper the optimizer within, which may share its groups and states
            made = memo[id(value)] = object.__new__(type(value))
            memo.setdefault(id(value.state), changed(value.state))
            made.__dict__.update({name: copied(one) for name, one in vars(value).items() if name != "step"})
        return memo[id(value)]

    return copied(optimizer)
