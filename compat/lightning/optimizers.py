"""LightningOptimizer: what `LightningModule.optimizers()` returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from ...tasks.optimizers import SchedulerConfig, read_optimizers, unknown_parameters
from ...trainer.optimization.optimization import ManualOptimizer
from .aliases import alias
from .exceptions import MisconfigurationException
from .rank_zero import rank_zero_warn

MODULE_OPTIMIZERS = Optimizer | ManualOptimizer | list[Optimizer] | list[ManualOptimizer]


def do_nothing_closure() -> None:
    """Do nothing."""


class LightningOptimizer(ManualOptimizer):
    """Optimizer of a run, of a class LightningNAME; an instance of the torch class NAME, too.

    Programs put functions in the place of `_on_before_step` and `_on_after_step`; with another one of the latter a step
    is not counted, so that of two optimizers one counts.
    """

    _on_before_step: Callable[[], Any] = staticmethod(do_nothing_closure)  # both are private in Lightning
    _on_after_step: Callable[[], Any] = staticmethod(do_nothing_closure)

    def __init__(self, optimizer: Optimizer, optimization: Any = None) -> None:
        super().__init__(optimizer, optimization)

    _optimizer = alias("optimizer")  # private in Lightning, and read by programs

    @property
    def _strategy(self) -> Any:
        return self._optimization and self._optimization.strategy

    @classmethod
    def _to_lightning_optimizer(cls, optimizer: Any, strategy: Any) -> "LightningOptimizer":
        return optimizer if isinstance(optimizer, cls) else cls(optimizer)

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step the optimizer, and return its result. Raises MisconfigurationException for a closure that is none."""
        if closure is not None and not callable(closure):
            raise MisconfigurationException("When `optimizer.step(closure)` is called, the closure should be callable")
        if not self._optimization:  # made by a program
            return self.optimizer.step(closure, **options)
        self._on_before_step()
        state = self._optimization.state
        steps, found = state.optimizer_steps, super().step(closure, **options)
        if self._on_after_step is not do_nothing_closure:
            state.optimizer_steps = steps
        self._on_after_step()
        return found


@dataclass
class LRSchedulerConfig(SchedulerConfig):
    """A learning rate scheduler and its interval; "step" counts the batches of an epoch, as in Lightning."""

    module: Any = field(default=None, repr=False, compare=False)
    """The module whose trainer counts them."""

    def is_due(self, interval: str, count: int) -> bool:
        """Return whether it steps after `count` epochs, or after the newest step's batches."""
        return super().is_due(interval, self.module.trainer.state.epoch_rounds if interval == "step" else count)


def make_optimizers(module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers of a module; warn of what Legato refuses in a task."""
    returned = module.configure_optimizers()
    if returned is None:
        rank_zero_warn(f"{type(module).__name__}.configure_optimizers returned None: fit will run with no optimizer.")
    optimizers, configs = read_optimizers(without_unknown(returned), module.automatic_optimization)
    if fault := unknown_parameters(module, optimizers):
        rank_zero_warn(fault)
    return optimizers, [LRSchedulerConfig(**vars(config), module=module) for config in configs]


def without_unknown(returned: Any) -> Any:
    """Return optimizers and schedulers in the form given, their dicts without keys that are unknown; warn of those."""
    if type(returned) in (list, tuple):
        return type(returned)(map(without_unknown, returned))
    if not isinstance(returned, dict) or not returned.keys() & {"optimizer", "scheduler"}:
        return returned
    whole = "optimizer" in returned
    known = {"optimizer", "lr_scheduler", "monitor"} if whole else SchedulerConfig.__dataclass_fields__.keys()
    unknown = {name for name in returned if name not in known}
    if unknown:
        place = "optimizer configuration" if whole else "lr scheduler dict"
        rank_zero_warn(f"Found unsupported keys in the {place}: {unknown}", category=RuntimeWarning)
    return {name: without_unknown(value) for name, value in returned.items() if name in known}


class SampleWeights:
    """Weights by samples: under Lightning a "weight" in what training_step returns is the program's own."""

    used = False
    """What the loop asks: whether batches have weights of their own."""

    def __init__(self, trainer: Any) -> None:
        self.strategy = trainer.strategy

    def begin_step(self) -> None:
        """Do nothing: a step has its samples."""

    forget = begin_step

    def take(self, output: Any, item: Any, step: Any) -> float:
        """Return the factor of a batch's loss."""
        return float(item.samples * self.strategy.loss_scale / step.samples)

    def divide_gradients(self, step: Any) -> float:
        """Return the divisor of the step's gradients."""
        return 1.0
