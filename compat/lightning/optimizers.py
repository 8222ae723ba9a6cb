"""LightningOptimizer: the class of the optimizers that `LightningModule.optimizers()` returns."""

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
    """An optimizer in a run. Its class is named LightningNAME and is derived from torch's NAME class.

    Programs can replace `_on_before_step` and `_on_after_step`. Steps are not counted if `_on_after_step` is replaced,
    so a program with two optimizers can count the steps of only one optimizer.
    """

    _on_before_step: Callable[[], Any] = staticmethod(do_nothing_closure)  # both are private in Lightning
    _on_after_step: Callable[[], Any] = staticmethod(do_nothing_closure)

    def __init__(self, optimizer: Optimizer, optimization: Any = None) -> None:
        super().__init__(optimizer, optimization)

    _optimizer = alias("optimizer")  # private in Lightning; programs read it

    @property
    def _strategy(self) -> Any:
        return self._optimization and self._optimization.strategy

    @classmethod
    def _to_lightning_optimizer(cls, optimizer: Any, strategy: Any) -> "LightningOptimizer":
        return optimizer if isinstance(optimizer, cls) else cls(optimizer)

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step the optimizer and return its result. Raises MisconfigurationException if the closure is not callable."""
        if closure is not None and not callable(closure):
            raise MisconfigurationException("When `optimizer.step(closure)` is called, the closure should be callable")
        if not self._optimization:  # an optimizer that the program created
            return self.optimizer.step(closure, **options)
        self._on_before_step()
        state = self._optimization.state
        steps, result = state.optimizer_steps, super().step(closure, **options)
        if self._on_after_step is not do_nothing_closure:
            state.optimizer_steps = steps
        self._on_after_step()
        return result


@dataclass
class LRSchedulerConfig(SchedulerConfig):
    """A learning rate scheduler. As in Lightning, the interval "step" counts batches within an epoch."""

    module: Any = field(default=None, repr=False, compare=False)
    """The module whose trainer counts epochs and batches."""

    def is_due(self, interval: str, count: int) -> bool:
        """Return whether the scheduler steps after `count` epochs or, if its interval is "step", after this batch."""
        return super().is_due(interval, self.module.trainer.state.epoch_rounds if interval == "step" else count)


def make_optimizers(module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return a module's optimizers and schedulers. Warn about any that Legato would reject in a task."""
    returned = module.configure_optimizers()
    if returned is None:
        rank_zero_warn(f"{type(module).__name__}.configure_optimizers returned None: fit will run with no optimizer.")
    optimizers, configs = read_optimizers(without_unknown_keys(returned), module.automatic_optimization)
    if fault := unknown_parameters(module, optimizers):
        rank_zero_warn(fault)
    return optimizers, [LRSchedulerConfig(**vars(config), module=module) for config in configs]


def without_unknown_keys(returned: Any) -> Any:
    """Return optimizers and schedulers without unknown dict keys. Warn about the keys that are removed."""
    if type(returned) in (list, tuple):
        return type(returned)(map(without_unknown_keys, returned))
    if not isinstance(returned, dict) or not returned.keys() & {"optimizer", "scheduler"}:
        return returned
    is_outer = "optimizer" in returned
    allowed = {"optimizer", "lr_scheduler", "monitor"} if is_outer else SchedulerConfig.__dataclass_fields__.keys()
    unknown = {name for name in returned if name not in allowed}
    if unknown:
        place = "optimizer configuration" if is_outer else "lr scheduler dict"
        rank_zero_warn(f"Found unsupported keys in the {place}: {unknown}", category=RuntimeWarning)
    return {name: without_unknown_keys(value) for name, value in returned.items() if name in allowed}


class SampleWeights:
    """Weights batches by their number of samples. As in Lightning, a "weight" in training_step's output is ignored."""

    used = False
    """Whether batches have weights that differ from their number of samples."""

    def __init__(self, trainer: Any) -> None:
        self.strategy = trainer.strategy

    def begin_step(self) -> None:
        """Do nothing, because the number of samples in the step is already known."""

    forget = begin_step

    def take(self, output: Any, item: Any, step: Any) -> float:
        """Return the factor for a batch's loss."""
        return float(item.samples * self.strategy.loss_scale / step.samples)

    def divide_gradients(self, step: Any) -> float:
        """Return the divisor for the step's gradients."""
        return 1.0
