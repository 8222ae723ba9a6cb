"""ClosureStep: the last batch of a step, its backward and the update, where the optimizer calls them as a closure."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..base.errors import ConfigError, TaskError
from .data.randomness import seed_generators
from .data.sampling import mix
from .data.steps import ReplicaBatch, StepInput
from .optimization.optimization import Optimization
from .optimization.optimizers import needs_closure
from .optimization.outputs import losses_of
from .run import JoinedCall, Run


class ClosureStep:
    """The end of a step as a closure, which an optimizer may call several times.

    The first call runs the forward and backward of the step's last batch, the earlier ones being done; each further
    call clears the gradients and runs all batches of the step again, without logging.
    """

    def __init__(self, find_run: Callable[[], Run], optimization: Optimization) -> None:
        """`find_run` returns the run, once it is complete."""
        self.find_run, self.optimization = find_run, optimization
        self.calls = 0
        """Number of calls of the closure in this step."""
        self.output: Any = None
        """The last output of training_step."""

    def __call__(self, step: StepInput, arguments: Sequence[Any]) -> Any:
        """Finish a step; return the output of its last batch. `arguments`: those of its training_step.

        Raises TaskError if the task's optimizer_step does not call the closure.
        """
        run, optimization, self.calls = self.find_run(), self.optimization, 0

        def closure() -> Tensor | None:
            self.calls += 1
            loss = self._first(run, step, arguments) if self.calls == 1 else self._again(run, step)
            divisor = optimization.weights.divide_gradients(step)
            return None if loss is None else loss / divisor

        if optimization.own_optimizer_step:
            optimizer: Any = optimization.manual_optimizers[0]
            run.task.optimizer_step(run.state.epoch, step.batches[-1].batch_idx, optimizer, closure)
        else:
            run.strategy.optimizer_step(optimization.optimizers[0], self.prepared(closure))
        run.metrics.muted = False
        if not self.calls:
            raise TaskError(
                f"{type(run.task).__name__}.optimizer_step did not run its closure, which computes the gradients: pass "
                f"it on, optimizer.step(closure=optimizer_closure), or call it."
            )
        return self.output

    def prepared(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        """Return a closure that also calls the hooks before an update, and clips."""

        def both() -> Any:
            loss = None if closure is None else closure()
            if self.optimization.looks_at_gradients:
                self.optimization.prepare(self.optimization.optimizers[0])
            return loss

        return both

    def _first(self, run: Run, step: StepInput, arguments: Sequence[Any]) -> Tensor | None:
        optimization, alone = self.optimization, len(step.batches) == 1
        # of several batches the gradients were cleared after the forward of the first one
        share = self._run(run, step, step.batches[-1], arguments, clears=alone and optimization.clears_late)
        if share is not None and optimization.losses is not None:
            optimization.losses.append((0, share))
        return optimization.loss_of_step()

    def _again(self, run: Run, step: StepInput) -> Tensor | None:
        run.metrics.muted, total = True, None
        self.optimization.weights.begin_step()
        for item in step.batches:
            run.metrics.return_to_batch(item.replica, item.samples)
            if run.data.keys_forward:
                # the same random numbers at each call: a line search compares losses, which dropout would otherwise
                # change
                seed_generators(mix(run.state.seed, run.state.global_step, item.replica, item.batch_idx))
            batch = item.batch if run.transfer is None else run.transfer(item.batch, 0)
            arguments = (batch, item.batch_idx)[: run.arity]
            loss = self._run(run, step, item, arguments, clears=item is step.batches[0])
            total = loss if total is None or loss is None else total + loss
        return total

    def _run(
        self, run: Run, step: StepInput, item: ReplicaBatch, arguments: Sequence[Any], clears: bool
    ) -> Tensor | None:
        strategy, hooks, last = run.strategy, run.hooks, item is step.batches[-1]
        self.output = strategy.training_step(arguments, last)
        if clears:
            self.optimization.zero_gradients(step, late=True)
        losses = losses_of(self.output, 1)
        if not losses:
            if self.calls == 1:
                run.metrics.leave_out_batch()
            strategy.leave_out(last, after_forward=True)
            return None
        weight = self.optimization.weights.take(self.output, item, step)
        scaled = losses[0] if isinstance(weight, float) and weight == 1.0 else losses[0] * weight
        hooks.call("on_before_backward", scaled if run.trainer.hooks_see_scaled_loss else losses[0])
        if self.optimization.watches_losses:
            run.metrics.watch(losses[0])
        strategy.backward(scaled, last)
        hooks.call("on_after_backward")
        share: Tensor = losses[0].detach() * weight
        return share


def use_closure(call: JoinedCall, optimization: Optimization) -> None:
    """Let the end of a step be a closure, where the optimizer or the task's optimizer_step calls one.

    Raises ConfigError where an optimizer that needs a closure cannot have one.
    """
    trainer, strategy = call.trainer, call.strategy
    # a process may run the replicas of others, or gradients are added up in one order
    several = call.local_replicas > 1 or call.bitwise or call.members_change or strategy.lockstep
    optimization.clears_late = optimization.automatic and trainer.keeps_gradients and not several
    needed = [type(one).__name__ for one in optimization.optimizers if needs_closure(one)]
    wanted = optimization.own_optimizer_step and trainer.closure_runs_step
    if not optimization.automatic or not (needed or wanted):
        return
    fits = not several and len(optimization.optimizers) == 1
    fits = fits and strategy.precision.scaler is None and trainer.nan != "skip"
    if needed and (not fits or strategy.data_ranks.size > 1):
        raise ConfigError(
            f"{needed[0]} evaluates the loss several times a step: it needs one process with one replica, a single "
            f"optimizer, and neither precision 16-mixed nor nan=skip. Or set automatic_optimization = False, and call "
            f"optimizer.step(closure) in training_step; then strategy ddp may have a process for each replica."
        )
    if fits:
        optimization.losses = []
        call.data.keys_forward = call.keyed  # whatever keyed its first forward, each further one is to draw the same
        optimization.closure_step = ClosureStep(lambda: trainer.current_run, optimization)
