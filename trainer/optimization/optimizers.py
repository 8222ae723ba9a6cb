"""Properties of optimizers: their parameters, modes, random numbers and closures."""

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
"""Key of the trained weights in an optimizer's state, used while the parameters contain the evaluation weights."""


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has different weights for training and evaluation, selected by `train` and `eval`."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def to_evaluation(optimizer: Any) -> bool:
    """Switch an optimizer with modes to its evaluation weights. Return False if there is nothing to switch."""
    states = [(item, optimizer.state[item]) for item in optimizer_parameters(optimizer) if optimizer.state.get(item)]
    # before the first step, both weights are equal, and eval() may fail
    if not states or any(TRAINED in state for _, state in states):
        return False
    for parameter, state in states:
        state[TRAINED] = parameter.detach().clone()
    optimizer.eval()
    return True


@torch.no_grad()
def to_training(optimizer: Any) -> None:
    """Switch an optimizer with modes back to exactly the weights it trains."""
    optimizer.train()
    for parameter in optimizer_parameters(optimizer):
        # train() recomputes them with rounding, so that validating or resuming would change the run
        trained = optimizer.state.get(parameter, {}).pop(TRAINED, None)
        if trained is not None:
            parameter.copy_(trained)


def may_draw(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may draw random numbers. The optimizers in torch.optim don't."""
    # other optimizers might, and seeding the generators only costs microseconds
    return not f"{type(optimizer).__module__}.".startswith("torch.optim.")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step evaluates the loss itself, as LBFGS and SAM do."""
    # the class's signature: learning rate schedulers replace an instance's `step` by a wrapper
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if not parameters or parameters[0].name != "closure" or not may_draw(optimizer):
        return bool(parameters) and parameters[0].default is inspect.Parameter.empty
    # Some accept None but raise: try a step of a copy with tiny parameters and no gradients.
    try:
        probe = copy_with(optimizer, lambda like: nn.Parameter(torch.zeros([1] * like.dim(), dtype=like.dtype)))
        probe.step()
    except Exception as error:  # of any class: packages raise different ones
        return "closure" in f"{type(error).__name__} {error}".lower()
    return False


def copy_with(optimizer: Any, change: Callable[[Tensor], nn.Parameter]) -> Any:
    """Return a copy of an optimizer that trains `change(parameter)` in place of each parameter."""
    memo: dict[int, Any] = {id(parameter): change(parameter) for parameter in optimizer_parameters(optimizer)}

    def changed(states: Any) -> Any:
        copies: dict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter, values in states.items():  # states made by the constructor
            for name, value in values.items():
                is_like = isinstance(value, Tensor) and value.shape == parameter.shape
                copies[memo[id(parameter)]][name] = change(value).detach().clone() if is_like else value
        return copies

    def copied(value: Any) -> Any:
        if not isinstance(value, Optimizer):
            return copy.deepcopy(value, memo) if isinstance(value, list | dict) else value
        if id(value) not in memo:  # a wrapper's inner optimizer may share its groups and states
            duplicate = memo[id(value)] = object.__new__(type(value))
            memo.setdefault(id(value.state), changed(value.state))
            duplicate.__dict__.update({name: copied(item) for name, item in vars(value).items() if name != "step"})
        return memo[id(value)]

    return copied(optimizer)
