"""Closure: a function that returns a step's loss. Optimizers and tasks may call it multiple times per update."""

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
    """Callable that returns a step's loss. When it is first called, the gradients have already been computed.

    Each later call clears the gradients, reruns all of the step's batches without logging, and clips the new gradients.
    The first call does the same if the gradients have been cleared or the weights have changed.
    """

    def __init__(self, trainer: "Trainer", step: Any, optimizer: Optimizer) -> None:
        self.trainer, self.step, self.optimizer = trainer, step, optimizer
        # gradients that a task cleared before this update don't require rerunning the step
        self.is_called = trainer.current_run.optimization.are_cleared = False
        self.versions = self._find_versions()

    def __call__(self) -> Tensor | None:
        """Return the mean loss over the samples of this process's batches, or None if training_step returned None.

        Raises TaskError if the step cannot be rerun.
        """
        optimization = self.trainer.current_run.optimization
        if self.is_called or optimization.are_cleared or self.versions != self._find_versions():
            self._run_again()
        self.is_called = True
        return optimization.loss_of_step(self.optimizer)

    def _find_versions(self) -> list[tuple[int, bool]]:
        """Return values that show whether an optimizer such as SAM has changed weights or cleared gradients."""
        if not self.trainer.current_run.optimization.needs_closure:
            return []
        return [(version_of(parameter), parameter.grad is None) for parameter in optimizer_parameters(self.optimizer)]

    @torch.enable_grad()  # some optimizers don't enable gradients themselves
    def _run_again(self) -> None:
        run, step = self.trainer.current_run, self.step
        optimization, draws = run.optimization, run.optimization.draws_in_updates
        if run.strategy.by_replica or run.strategy.lockstep or run.strategy.precision.scaler is not None:
            raise TaskError(
                "The closure in optimizer_step must rerun the step, which requires one replica per process, unsharded "
                "weights and a precision other than 16-mixed. Call the closure only once, before zero_grad()."
            )
        # Each call draws the same random numbers: a line search compares losses, which dropout would otherwise change.
        # Afterwards the update's own random numbers continue.
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
    """Rerun a step's forward and backward passes, opening its batches one at a time."""
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
    """Pass a closure to optimizers that need one and to a task's own optimizer_step.

    Raises ConfigError if an optimizer needs a closure that this run cannot provide.
    """
    trainer, strategy = call.trainer, call.strategy
    # a process may run multiple replicas, or gradients may be summed in a fixed order
    several = call.local_replicas > 1 or call.bitwise or call.members_change or strategy.lockstep
    # as in Lightning, where hooks before and in zero_grad may read the previous step's gradients
    optimization.clears_late = optimization.automatic and optimization.own_zero_grad and not several
    needed = [type(optimizer).__name__ for optimizer in optimization.optimizers if needs_closure(optimizer)]
    if not optimization.automatic or not (needed or optimization.own_optimizer_step):
        return
    is_alone = strategy.place.world_size == len(trainer.device_list) == 1
    fits = is_alone and not several and len(optimization.optimizers) == 1
    if needed and (not fits or strategy.precision.scaler is not None or trainer.nan == "skip"):
        raise ConfigError(
            f"{needed[0]} evaluates the loss several times a step, which requires a single process, replica, device "
            f"and optimizer, and rules out precision 16-mixed and nan=skip. Otherwise, set "
            f"automatic_optimization = False and call optimizer.step(closure) in training_step; strategy=ddp then "
            f"requires one process per replica."
        )
    optimization.losses, optimization.needs_closure = [], bool(needed)
    optimization.make_closure = lambda step, optimizer: Closure(trainer, step, optimizer)
    if needed:
        call.data.keys_forward = call.keyed  # key every forward pass, so that repeats draw the same random numbers
