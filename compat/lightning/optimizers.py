"""LightningOptimizer: what `LightningModule.optimizers()` returns."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ...trainer.data.steps import ReplicaBatch, StepInput
from ...trainer.optimization.batch_weights import BatchWeights
from ...trainer.optimization.optimizers import ManualOptimizer
from .exceptions import MisconfigurationException

if TYPE_CHECKING:
    from ...trainer.optimization.optimization import Optimization

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

    def __new__(cls, optimizer: Optimizer, optimization: "Optimization | None" = None) -> "LightningOptimizer":
        """Make an object of a class with the optimizer's name."""
        return super().__new__(type(f"Lightning{type(optimizer).__name__}", (cls,), {}))

    def __init__(self, optimizer: Optimizer, optimization: "Optimization | None" = None) -> None:
        super().__init__(optimizer, optimization)  # type: ignore[arg-type]
        name = type(self).__name__
        self._shown_class = type(name, (LightningOptimizer, type(optimizer)), {})

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._shown_class

    @property
    def _optimizer(self) -> Optimizer:  # private in Lightning, and read by programs
        return self.optimizer

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


class SampleWeights(BatchWeights):
    """Weights by samples: under Lightning a "weight" in what training_step returns is the program's own."""

    def begin_step(self) -> None:
        """Let the weights of this step be its samples."""
        self.used = False

    def take(self, output: Any, item: ReplicaBatch, step: StepInput) -> float:
        """Return the factor of a batch's loss."""
        return item.samples * self.strategy.reducer.scale / step.samples
