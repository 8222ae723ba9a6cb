"""What optimization asks of optimizers, and the optimizer wrapper for manual optimization."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from .optimization import Optimization


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


class ManualOptimizer:
    """Optimizer as returned by `Task.optimizers()`; `step` goes through the strategy to reduce and unscale gradients.

    All other attributes are the optimizer's own, its class too: schedulers ask for an instance of `Optimizer`.
    """

    @property  # type: ignore[misc]
    # isinstance reads it, and torch's schedulers refuse what is no Optimizer
    def __class__(self) -> Any:
        return type(self.optimizer)

    def __init__(self, optimizer: Optimizer, optimization: "Optimization") -> None:
        self.optimizer = optimizer
        self._optimization = optimization

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step the optimizer, whose own `step` is given the options too, and return its result."""
        return self._optimization.manual_step(self.optimizer, closure, **options)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear the gradients, so that the closure of this step computes them anew."""
        if self._optimization is not None:
            self._optimization.are_cleared = True
        self.optimizer.zero_grad(*arguments, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Return a context in which only this optimizer's parameters require gradients."""
        self._optimization.task.toggle_optimizer(self)
        yield
        self._optimization.task.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # copy and pickle look it up before __init__ runs
            raise AttributeError(name)
        return getattr(self.optimizer, name)
