"""Closure: the loss of a step as a function, which optimizers and tasks call within an update, also repeatedly."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import ConfigError, TaskError
from ..base.torch_private import version_of
from . import masked
from .data.randomness import generator_states, set_generators
from .data.steps import StepInput
from .optimization.optimization import Optimization
from .optimization.optimizers import needs_closure, optimizer_parameters

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class Closure:
    """The loss of a step, whose gradients are there at the first call.

    Each further call, or a first one after the gradients were cleared or the weights changed, clears them, runs all
    batches of the step again without logging, and clips.
    """

    def __init__(self, trainer: "Trainer", step: Any, optimizer: Optimizer) -> None:
        self.trainer, self.step, self.optimizer = trainer, step, optimizer
        # what a task cleared in an earlier step, or before this step's update, is no reason to run the step again
        self.is_called = trainer.current_run.optimization.are_cleared = False
        self.versions = self._find_versions()

    def __call__(self) -> Tensor | None:
        """Return the loss, the mean over the samples of this process's batches; None if training_step returned none.

        Raises TaskError where it cannot run the step again.
        """
        optimization = self.trainer.current_run.optimization
        if self.is_called or optimization.are_cleared or self.versions != self._find_versions():
            self._run_again()
        self.is_called = True
        return optimization.loss_of_step(self.optimizer)

    def _find_versions(self) -> list[tuple[int, bool]]:
        """Return what shows that an optimizer, such as SAM, has moved weights or cleared gradients before it asks."""
        if not self.trainer.current_run.optimization.needs_closure:
            return []
        return [(version_of(parameter), parameter.grad is None) for parameter in optimizer_parameters(self.optimizer)]

    @torch.enable_grad()  # not every optimizer does that
    def _run_again(self) -> None:
        run, step = self.trainer.current_run, self.step
        optimization, draws = run.optimization, run.optimization.draws_in_updates
        if run.strategy.by_replica or run.strategy.lockstep or run.strategy.precision.scaler is not None:
            raise TaskError(
                "optimizer_step has its closure run the step again, which takes one replica for each process, weights "
                "that are not sharded, and no precision 16-mixed. Call the closure once, and before zero_grad()."
            )
        # The same random numbers at each call: a line search compares losses, which dropout would otherwise change.
        # Those of the update go on behind it.
        states = generator_states() if draws else None
        run.metrics.muted = True
        try:
            if not (optimization.clears_late and step.batches):
                optimization.zero_gradients(step)
            run_again(self.trainer, step, (run.open_batch(item, again=True) for item in step.batches))
            optimization.divide_gradients(step)
            if optimization.looks_at_gradients:
                optimization.prepare(self.optimizer)
        finally:
            run.metrics.muted = False
            optimization.are_cleared = False
            if states is not None:
                set_generators(states)


def run_again(trainer: "Trainer", step: StepInput, batches: Iterable[Any]) -> None:
    """Run forward and backward of a step again, on its batches as they are opened one after the other."""
    run = trainer.current_run
    run.optimization.weights.begin_step()
    if step.masked:
        masked.begin_step(run, step)
    for item, batch in zip(step.batches, batches, strict=True):
        trainer.train_batch(step, item, batch)
    if not step.batches:
        masked.stand_in(run, step)
    run.strategy.end_step()


def use_closures(call: Any, optimization: Optimization) -> None:
    """Give optimizers that evaluate the loss, and a task's own optimizer_step, a closure.

    Raises ConfigError where an optimizer that needs a closure cannot have one.
    """
    trainer, strategy = call.trainer, call.strategy
    # a process may run the replicas of others, or gradients are added up in one order
    several = call.local_replicas > 1 or call.bitwise or call.members_change or strategy.lockstep
    # as in Lightning, whose hooks before and in zero_grad may read the gradients of the step before
    optimization.clears_late = optimization.automatic and optimization.own_zero_grad and not several
    needed = [type(optimizer).__name__ for optimizer in optimization.optimizers if needs_closure(optimizer)]
    if not optimization.automatic or not (needed or optimization.own_optimizer_step):
        return
    is_alone = strategy.place.world_size == len(trainer.device_list) == 1
    fits = is_alone and not several and len(optimization.optimizers) == 1
    if needed and (not fits or strategy.precision.scaler is not None or trainer.nan == "skip"):
        raise ConfigError(
            f"{needed[0]} evaluates the loss several times a step: it needs one process with one replica on one "
            f"device, a single optimizer, and neither precision 16-mixed nor nan=skip. Or set automatic_optimization = "
            f"False, and call optimizer.step(closure) in training_step; then strategy ddp may have a process for each "
            f"replica."
        )
    optimization.losses, optimization.needs_closure = [], bool(needed)
    optimization.make_closure = lambda step, optimizer: Closure(trainer, step, optimizer)
    if needed:
        call.data.keys_forward = call.keyed  # whatever keyed its first forward, each further one is to draw the same
