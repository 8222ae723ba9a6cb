"""Optimization: zero_grad, clipping, optimizer and scheduler steps, for automatic or manual optimization."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.errors import ConfigError, TaskError, did_you_mean, first_names
from ...base.torch_private import count_graphs, mark_stepped
from ...tasks.optimizers import SchedulerConfig
from ...tasks.task import Task
from ..data.randomness import UPDATE, hook_key, keyed_generators, mix, seed_generators
from ..data.steps import StepInput
from ..hooks import Hooks, overrides
from ..metrics.log import Metrics
from .batch_weights import BatchWeights
from .kernels import NOTHING_COMPILED
from .model_checks import require_told_sparse
from .nonfinite import SkipGuard
from .optimizers import has_modes, may_draw, optimizer_parameters, to_evaluation, to_training
from .outputs import describe_bad_loss
from .training_mode import set_training_mode
from .weight_watch import WeightWatch

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")


class Optimization:
    """The optimizers and learning rate schedulers of a run."""

    def __init__(
        self,
        trainer: "Trainer",
        task: Task,
        hooks: Hooks,
        metrics: Metrics,
        optimizers: Sequence[Optimizer] = (),
        schedulers: Sequence[SchedulerConfig] = (),
    ) -> None:
        self.trainer, self.task, self.hooks, self.metrics = trainer, task, hooks, metrics
        self.state, self.strategy = trainer.state, trainer.strategy
        self.optimizers, self.schedulers = list(optimizers), list(schedulers)
        # Whether a learning rate scheduler uses a metric and has the interval "step"
        self.has_plateau_by_steps = any(item.reduce_on_plateau and item.interval == "step" for item in self.schedulers)
        self.manual_optimizers = [ManualOptimizer(optimizer, self) for optimizer in optimizers]
        self.automatic = task.automatic_optimization
        self.own_optimizer_step = overrides(task, Task, "optimizer_step")
        self.own_scheduler_step = overrides(task, Task, "lr_scheduler_step")
        self.own_zero_grad, self.looks_at_gradients = self._has_own_zero_grad(), self._looks_at_gradients()
        self.draws_in_updates, self.draws_before_updates, self.draws_before_steps = self._find_draws()
        self.prepares_steps = self.looks_at_gradients or self.draws_in_updates or self.own_optimizer_step
        self.prepares_steps |= self.strategy.precision.scaler is not None or metrics.shares
        """Whether anything runs right before or after an optimizer step."""
        # Whether weights and State may not match: from a step's first update until the step is counted
        self.updating = False
        # Whether gradients are cleared only after the forward pass of a step's first batch
        self.clears_late = False
        # Whether a hook skips this step's update; see `Trainer.leave_out_update`
        self.leaves_out_update = False
        # Returns a step's loss as a function, for an optimizer or a task's optimizer_step that calls it
        self.make_closure: Callable[[StepInput, Optimizer], Callable[[], Tensor | None]] | None = None
        # `needs_closure`: an optimizer evaluates the loss itself; `are_cleared`: the task cleared the gradients
        self.needs_closure = self.are_cleared = False
        # Graphs created by torch's compiler before this run's first step: a larger count shows that it is compiling
        self.graphs = count_graphs()
        self.epoch = self.regrouped_at = -1  # epoch of the latest step; step before which parameters were (un)frozen
        # Under manual optimization: the latest step, and the number of updates within it
        self.updates = 0, 0
        # Under manual optimization: optimizers that have stepped since the loss scale was last updated
        self.stepped: list[Optimizer] = []
        # Checks gradients before an update, or None
        fits, skips = trainer.stage == "fit", trainer.nan == "skip"
        self.guard = SkipGuard(trainer, task, metrics, self.optimizers) if fits and skips else None
        # Whether to check losses and gradients before the next update: the first one of this set of processes
        self.checks_first = True
        self.recheck: Any = None  # computes some steps twice if trainer.recheck_every is set
        # Finds weights that training_step changes, during the first few steps
        self.watch = WeightWatch(task) if self.automatic and self._repeats_steps() else None
        # Weights of batches in a step's gradient, if training_step returns them
        self.weights = BatchWeights(trainer)
        # a scaled gradient may overflow harmlessly: only a non-finite loss then shows a real problem
        scaled = self.strategy.precision.scaler is not None
        self.watches_losses = trainer.nan == "raise" or (trainer.nan == "skip" and scaled)
        # Index and share of each loss of the latest step, if a closure returns them; else None
        self.losses: list[tuple[int, Tensor]] | None = [] if self.own_optimizer_step else None
        # With multiple losses, the parameters that each loss's gradient reaches; None: all
        self.loss_inputs: list[list[nn.Parameter] | None] = [None]
        if self.automatic and len(self.optimizers) > 1 and not self.strategy.takes_one_loss:
            # otherwise, as in a GAN, the gradient of one network's loss would reach the other network
            self.loss_inputs = [optimizer_parameters(optimizer) for optimizer in self.optimizers]

    def _find_draws(self) -> tuple[bool, bool, bool]:
        """Return whether updates, hooks before updates, and hooks before steps may draw random numbers.

        If a result is True, the generators must be seeded at that point.
        """
        if self.trainer.reproducible == "off":
            return False, False, False
        clips, hooks = overrides(self.task, Task, "configure_gradient_clipping"), self.hooks.may_draw
        in_updates = self.own_optimizer_step or any(map(may_draw, self.optimizers))
        return in_updates, clips or "on_before_optimizer_step" in hooks, "on_before_zero_grad" in hooks

    def _has_own_zero_grad(self) -> bool:
        hooked = overrides(self.task, Task, "optimizer_zero_grad") or bool(self.hooks["on_before_zero_grad"])
        return hooked or any(overrides(optimizer, Optimizer, "zero_grad") for optimizer in self.optimizers)

    def _looks_at_gradients(self) -> bool:
        clips = self.trainer.gradient_clip_val is not None or overrides(self.task, Task, "configure_gradient_clipping")
        return clips or bool(self.hooks["on_before_optimizer_step"])

    def _repeats_steps(self) -> bool:
        """Return whether training_step runs more than once per step, for multiple replicas or parts of a batch."""
        return self.state.replicas > 1 or self.strategy.cuts_batches

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers with others that have the same parameters."""
        self.optimizers[:] = optimizers
        self.manual_optimizers[:] = [ManualOptimizer(optimizer, self) for optimizer in optimizers]

    def restart(self) -> None:
        """Repeat the first step's checks in the next step, because the set of ranks has changed."""
        self.checks_first, self.weights.used = True, None

    def begin_training(self) -> None:
        """Put the modules being trained into training mode, and log those that were in evaluation mode."""
        self.end_evaluation()
        names = set_training_mode(self.task)
        if names and self.trainer.is_global_zero:
            log.info(
                "%s started in evaluation mode and %s now in training mode, so dropout is active. To keep "
                "evaluation mode, call .eval() in on_train_epoch_start.",
                first_names(names),
                "is" if len(names) == 1 else "are",
            )

    def warn_if_nothing_compiled(self) -> None:
        """Warn if `trainer.compile` has not compiled any graphs so far."""
        if self.trainer.compile and count_graphs() == self.graphs and self.trainer.is_global_zero:
            log.warning(NOTHING_COMPILED)

    def begin_evaluation(self) -> list[Optimizer]:
        """Switch optimizers with modes to their evaluation weights, and return the optimizers that were switched."""
        changed = []
        for optimizer in filter(has_modes, self.optimizers):
            with keyed_generators(self._update_key(optimizer)):  # some optimizers round stochastically
                changed += [optimizer] * to_evaluation(optimizer)
        return changed

    def end_evaluation(self) -> None:
        """Switch optimizers back to the weights they train."""
        for optimizer in filter(has_modes, self.optimizers):
            to_training(optimizer)

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Switch optimizers to their evaluation weights within this context, even outside an evaluation."""
        changed = self.begin_evaluation()
        try:
            yield
        finally:
            for optimizer in changed:
                to_training(optimizer)

    # --- automatic --------------------------------------------------------------------------------------------------
    def begin_step(self, step: StepInput) -> None:
        """Prepare a step before its first forward pass and regroup parameters that hooks have frozen or unfrozen."""
        if self.guard is not None:
            self.guard.begin_step()
        # callbacks unfreeze between epochs; comparing all parameters in every step would slow down every run
        if self.strategy.frozen or self.epoch != self.state.epoch:
            self.epoch = self.state.epoch
            frozen = [id(parameter) for parameter in self.task.parameters() if not parameter.requires_grad]
            if frozen != list(map(id, self.strategy.frozen)):
                self.strategy.regroup(self.strategy.layout)
                self.regrouped_at = self.state.global_step
        if self.watch is not None:
            self.watch.begin_step()
        if self.weights.used is not False:
            self.weights.begin_step()
        if not (self.clears_late and step.batches):
            self.zero_gradients(step)
        if self.recheck is not None:
            self.recheck.begin_step(step)

    def zero_gradients(self, step: StepInput) -> None:
        """Clear the gradients and the losses they were computed from."""
        if self.losses is not None:
            self.losses.clear()
        if self.own_zero_grad:
            self._call_zero_grad(step)
        else:  # torch's zero_grad spends 12 us on its profiler range
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

    def _call_zero_grad(self, step: StepInput) -> None:
        batch_idx = step.batches[0].batch_idx if step.batches else self.state.epoch_rounds
        replica, samples, in_batch = self.metrics.replica, self.metrics.samples, self.metrics.in_batch
        # values logged by a hook here count for the step, weighted by its number of samples
        self.metrics.leave_batches(step.samples)
        # loading may already have seeded the generators for the forward pass, which hooks must not change
        with self._keyed_hooks("on_before_zero_grad", self.draws_before_steps):
            for optimizer in self.optimizers:
                self.hooks.call("on_before_zero_grad", optimizer)
                self.task.optimizer_zero_grad(self.state.epoch, batch_idx, optimizer)
        if in_batch:
            self.metrics.return_to_batch(replica, samples)

    def step(self, step: StepInput) -> None:
        """Update the weights using a step's complete gradients."""
        if not step.samples:  # all samples are left out: the weights stay the same, as in a step skipped by nan=skip
            for optimizer in self.optimizers:
                mark_stepped(optimizer)  # otherwise a scheduler warns that it ran before the first optimizer step
            return
        if not self.automatic:
            return
        if self.watch is not None:
            self._require_same_weights(self.watch)
        if self.recheck is not None:
            self.recheck.end_step(step)
        if self.weights.used is not False:
            self.divide_gradients(step)
        for parameter in self.strategy.frozen:  # if unfrozen since the step began, it is trained from the next step on
            parameter.grad = None
        # before clipping and unscaling, which would hide non-finite values
        if self.checks_first:
            self._check_first_update()
        if self.guard is not None and self.guard.drops_step():
            return
        # with nothing to prepare, the list itself, which saves a generator in the step
        for optimizer in self._prepared(step) if self.prepares_steps else self.optimizers:
            self.updating = True
            closure = None if self.make_closure is None else self.make_closure(step, optimizer)
            self.strategy.optimizer_step(optimizer, closure)

    def _check_first_update(self) -> None:
        self.checks_first = False  # later losses are checked at logging points, since a check waits for the device
        require_told_sparse(self.task)
        if self.trainer.nan == "raise":
            self.trainer.current_run.check_losses()

    def divide_gradients(self, step: StepInput) -> None:
        """Divide gradients and losses by the weights of the step's batches, if the batches have weights.

        All ranks must call this.
        """
        divisor = self.weights.divide_gradients(step)
        if self.losses is not None:
            self.losses = [(index, share / divisor) for index, share in self.losses]

    def _require_same_weights(self, watch: WeightWatch) -> None:
        """Raise TaskError if training_step changes parameters. Warn if it changes buffers."""
        (parameters, buffers), replicas = watch.end_step(), self.state.replicas
        self.watch = watch if watch.steps_left and not parameters else None
        if parameters:
            raise TaskError(
                f"training_step changed weights in step {self.state.global_step + 1}: {first_names(parameters)}. It "
                f"runs for each batch on {replicas} replicas, so the result would depend on which process runs each "
                f"replica. Change such weights (of a teacher, for example) in on_step_end, which runs once per step, "
                f"after the optimizers. If an Embedding has max_norm, call weight.renorm_ there instead."
            )
        if buffers and self.strategy.place.rank == 0:
            log.warning(
                "training_step changes the buffers %s. With %d replicas, only the first one's changes are kept.",
                first_names(buffers), replicas,
            )  # fmt: skip

    def _prepared(self, step: StepInput) -> Iterator[Optimizer]:
        strategy, shares = self.strategy, self.metrics.shares
        self.metrics.leave_batches(step.samples)
        self.leaves_out_update = False
        for optimizer in self.optimizers:
            if self.looks_at_gradients:
                self.prepare(optimizer)
            if shares:  # once per step, before its first update
                self.metrics.share_step()
                shares = False
            if self.leaves_out_update:
                mark_stepped(optimizer)  # otherwise a scheduler warns that it ran before the first optimizer step
                continue
            if self.draws_in_updates:  # not restored: the next batch seeds the generators again
                seed_generators(self._update_key(optimizer))
            if self.own_optimizer_step:
                self._call_optimizer_step(optimizer, step)
            else:
                yield optimizer
        self.state.skipped_steps += self.leaves_out_update
        if strategy.precision.scaler is not None:
            strategy.precision.update()

    def prepare(self, optimizer: Optimizer) -> None:
        """Unscale and clip an optimizer's gradients, and call the hooks that read them."""
        # unscale first: otherwise clipping and hooks would see gradients times the loss scale
        self.strategy.precision.unscale(optimizer)
        if self.draws_before_updates:
            seed_generators(self._hook_key("on_before_optimizer_step", optimizer))
        self.hooks.call("on_before_optimizer_step", optimizer)
        limit, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        self.task.configure_gradient_clipping(optimizer, limit, algorithm)

    def _call_optimizer_step(self, optimizer: Optimizer, step: StepInput) -> None:
        assert self.make_closure is not None
        batch_idx = step.batches[-1].batch_idx if step.batches else self.state.epoch_rounds
        wrapped: Any = self.trainer.manual_optimizers[self.optimizers.index(optimizer)]
        self.task.optimizer_step(self.state.epoch, batch_idx, wrapped, self.make_closure(step, optimizer))

    def loss_of_step(self, optimizer: Optimizer) -> Tensor | None:
        """Return an optimizer's loss for the latest step: the mean over the samples of this process's batches."""
        losses, number = self.losses or (), self.optimizers.index(optimizer)
        is_shared = all(index == 0 for index, _ in losses)  # a single loss trains the parameters of all optimizers
        shares = [share for index, share in losses if is_shared or index == number]
        return sum(shares[1:], shares[0]) if shares else None

    def _update_key(self, optimizer: Optimizer) -> int:
        """Return the key for an update's random numbers. It is the same on all ranks that update the same weights."""
        index, call, state = self.optimizers.index(optimizer), self._call_of_step, self.state
        return mix(state.seed, UPDATE, state.global_step, index, call, self.strategy.shard)

    def _hook_key(self, hook: str, optimizer: Optimizer | None = None) -> int:
        index = -1 if optimizer is None else self.optimizers.index(optimizer)
        return hook_key(self.state.seed, hook, self.state.global_step, index, self._call_of_step)

    def _keyed_hooks(
        self, hook: str, may_draw: bool, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[object]:
        """Return a context manager that keys generators for hooks within a replica's step, and then restores them."""
        return keyed_generators(self._hook_key(hook, optimizer)) if may_draw else nullcontext()

    @property
    def _call_of_step(self) -> int:
        step, calls = self.updates
        return calls if step == self.state.global_step else 0

    def step_schedulers(self, interval: str, count: int, plateau: bool) -> None:
        """Step the learning rate schedulers that are due after `count` intervals ("step" or "epoch").

        Args:
            plateau: True to step the schedulers that use a metric, False to step the others.
        """
        if not self.automatic:
            return
        for config in self.schedulers:
            if config.is_due(interval, count) and config.reduce_on_plateau is plateau:
                if config.reduce_on_plateau and interval == "step":
                    self.publish_newest()
                metric = self._monitored(config) if config.reduce_on_plateau else None
                if metric is not None or not config.reduce_on_plateau:
                    self.task.lr_scheduler_step(config.scheduler, metric)

    def publish_newest(self) -> None:
        """Update `agreed_metrics`, which may be up to log_every_n_steps steps old, with the latest step's values.

        All ranks must call this.
        """
        self.trainer.agreed_metrics.update(self.metrics.newest_values().tensors())

    def _monitored(self, config: SchedulerConfig) -> Any:
        metrics = self.trainer.agreed_metrics
        if config.monitor in metrics:
            is_old = config.interval == "epoch" and not self._is_of_epoch(config.monitor)
            return None if is_old else metrics[config.monitor]  # each value counts once
        if config.strict:
            name = str(config.monitor)
            # the mistake only shows at the end of an epoch: save the work until then
            if self.trainer.checkpoint_callback is not None:
                self.trainer.checkpoint_callback.save(self.trainer, always=True)
            raise ConfigError(
                f"The learning rate scheduler monitors {name!r}, which was never logged. Logged: {sorted(metrics)}."
                f"{did_you_mean(name, metrics)} To continue anyway, set strict=False in the lr_scheduler dict."
            )
        return None

    def _is_of_epoch(self, name: str) -> bool:
        """Return whether a metric was measured in the current epoch."""
        state, measured_at = self.state, self.metrics.measured_at.get(name)
        if measured_at == -1:  # from the checkpoint: training logs its values again, validation may not
            measured_at = state.validated_at
        return measured_at is None or measured_at > state.global_step - state.epoch_steps

    # --- manual -----------------------------------------------------------------------------------------------------
    def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Run backward for manual optimization."""
        if self.automatic:
            raise TaskError("manual_backward needs automatic_optimization = False. Set it, or return the loss.")
        if not loss.requires_grad:
            raise TaskError(describe_bad_loss(loss))
        # torch.amp.GradScaler has one scale for all optimizers: if it changed before all have used it, the others'
        # gradients would be divided by a factor that they were not multiplied with
        if self.stepped:
            self.update_scale()
        self.hooks.call("on_before_backward", loss)
        if self.watches_losses and loss.numel() == 1:
            self.metrics.watch(loss)
        self.task.backward(self.strategy.precision.scale(loss), *arguments, **options)
        self.hooks.call("on_after_backward")

    def manual_step(self, optimizer: Optimizer, closure: Any = None, **options: Any) -> Any:
        """Step an optimizer for manual optimization, or from within a task's own optimizer_step."""
        strategy = self.strategy
        if self.automatic:
            self.updating = True
            return strategy.optimizer_step(optimizer, closure, **options)
        # averaged here, since backward ran inside DDP's forward, before its hooks were ready (docs/decisions.md)
        strategy.average(optimizer_parameters(optimizer))
        if self.checks_first:
            self._check_first_update()
        # hooks draw the same random numbers on every rank; the rest of training_step draws those of its replica
        with self._keyed_hooks("on_before_optimizer_step", self.draws_before_updates, optimizer):
            self.hooks.call("on_before_optimizer_step", optimizer)
        if strategy.precision.scaler is not None:
            if optimizer in self.stepped:
                self.update_scale()
            self.stepped.append(optimizer)
        if closure is not None and strategy.data_ranks.size > 1:
            closure = self._averaged(optimizer, closure)
        if self.draws_in_updates:
            with keyed_generators(self._update_key(optimizer)) as outside:
                closure = None if closure is None else partial(outside, closure)
                returned = strategy.optimizer_step(optimizer, closure, **options)
        else:
            returned = strategy.optimizer_step(optimizer, closure, **options)
        self.updates = self.state.global_step, self._call_of_step + 1
        self.state.optimizer_steps += 1
        return returned

    def _averaged(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that averages gradients and loss across ranks, so that all ranks make the same decisions."""
        ranks = self.strategy.data_ranks

        def evaluate() -> Any:
            loss = closure()
            self.strategy.average(optimizer_parameters(optimizer))
            if not isinstance(loss, Tensor):
                return loss
            return ranks.all_reduce(loss.detach().clone(), "sum") / ranks.size

        return evaluate

    def update_scale(self) -> None:
        """Update the loss scale after all optimizers have used the scaled gradients.

        This is called before the first backward pass that follows an optimizer step, and at the end of training_step.
        """
        self.stepped.clear()
        self.strategy.precision.update()

    def clip_gradients(self, optimizer: Any, limit: float | None = None, algorithm: str | None = None) -> None:
        """Clip the gradients of an optimizer's parameters. The arguments default to the Trainer's settings."""
        limit = self.trainer.gradient_clip_val if limit is None else limit
        if limit is None:
            return
        optimizer, strategy = getattr(optimizer, "optimizer", optimizer), self.strategy
        if not self.automatic:
            strategy.average(optimizer_parameters(optimizer))
            strategy.precision.unscale(optimizer)
        strategy.clip(optimizer, limit, algorithm or self.trainer.gradient_clip_algorithm)


def forwarding(name: str) -> Callable[..., Any]:
    """Return a method that calls the wrapped optimizer's method with the given name."""

    def call(self: "ManualOptimizer", *arguments: Any, **options: Any) -> Any:
        return getattr(self.optimizer, name)(*arguments, **options)

    return call


@cache
def wrapper_class(wrapper: Any, kind: Any) -> Any:
    """Return a class that derives from a wrapper and the optimizer's class, and forwards methods to the optimizer."""
    methods = {name for name in dir(kind) if not name.startswith("__") and callable(getattr(kind, name))}
    return type(
        wrapper.__name__.removesuffix("Optimizer") + kind.__name__,
        (wrapper, kind),
        {name: forwarding(name) for name in methods.difference(dir(wrapper))},
    )


class ManualOptimizer:
    """Optimizer returned by `Task.optimizers()`. Its `step` reduces and unscales gradients through the strategy.

    All other attributes are those of the wrapped optimizer. The object is also an instance of that optimizer's class.
    """

    def __new__(cls, optimizer: Optimizer, optimization: Any = None) -> Any:
        """Create an object of a class that also derives from the optimizer's class."""
        # torch's schedulers only accept an instance of Optimizer
        return super().__new__(wrapper_class(cls, type(optimizer)))  # type: ignore[arg-type]  # classes are hashable

    def __init__(self, optimizer: Optimizer, optimization: Optimization) -> None:
        self.optimizer = optimizer
        self._optimization = optimization

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step the optimizer with the given options and return the result."""
        return self._optimization.manual_step(self.optimizer, closure, **options)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear the gradients, so that this step's closure recomputes them."""
        if self._optimization is not None:
            self._optimization.are_cleared = True
        self.optimizer.zero_grad(*arguments, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Return a context manager within which only this optimizer's parameters require gradients."""
        self._optimization.task.toggle_optimizer(self)
        yield
        self._optimization.task.untoggle_optimizer(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copying and pickling of this object, whose class cannot be imported by name."""
        return type(self).__mro__[1], (self.optimizer, self._optimization)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
