"""Run: the parts of one call to fit, validate, test or predict, and the methods that the loop calls between steps.

Setup builds three objects in turn: a `Call` with the parts that exist from the start, a more complete `Call` after the
processes connect (`setup.join`), and a complete `Run` before the first step (`setup.make_run`). All are immutable.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from ..base.contracts import Stateful
from ..base.errors import DataError, Errors, NonFiniteError, TaskError, correction
from ..tasks.data_module import DataModule
from ..tasks.task import Task
from .data.dealing import EvaluationData, TrainingData
from .data.randomness import hook_key, seed_generators
from .data.sampling import Layout, mix
from .data.steps import ReplicaBatch, StepInput
from .hooks import Hooks
from .metrics.log import Metrics
from .metrics.reduce import Reduced
from .optimization.diagnosis import bad_weights, explained
from .optimization.drift import DriftGuard
from .optimization.optimization import Optimization
from .optimization.outputs import as_outputs
from .preemption import Preemption
from .processes.agreement import Agreement
from .processes.hang import Watchdog
from .processes.membership import Membership
from .resume.contents import CallbackStates, PublishedMetrics
from .runs.run_file import RunFile
from .schedule import Schedule
from .state import State

if TYPE_CHECKING:
    from ..base.contracts import Trainer
    from .strategies.strategy import Strategy

log = logging.getLogger("legato")


@dataclass
class LoopState:
    """Mutable state of a run that is not stored in checkpoints."""

    doing: str
    """The current stage: "train", "sanity_check", "validation", "test" or "predict"."""
    open: bool = True
    """Whether the run is in progress."""
    remaining: Literal["steps", "hooks", "nothing"] = "steps"
    """What remains of a fit call: steps, then only its final hooks, then nothing."""
    epoch_skipped: bool = False
    """Whether to skip the rest of the epoch."""
    step: StepInput | None = None
    """The latest step on this process."""
    item: ReplicaBatch | None = None
    """The latest evaluation batch in this process."""
    outputs: list[tuple[int, int, int, Any]] = field(default_factory=list)
    """The index of the loader, the batch and the replica, and the output, for each batch predicted so far."""
    validated_after: float = 0.0
    """Elapsed time of the run in seconds when the latest validation run ended or, before the first, at the start."""
    point: tuple[int, dict[str, float]] | None = None
    """The latest logging point's step and values."""
    samples_of_epoch: dict[str, Any] | None = None
    """The fingerprint's `samples` for the current epoch, if different settings assigned its batches."""
    training_modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    """Each module and its training mode before an evaluation."""


@dataclass
class RunData:
    """A run's loaders and values derived from them. `reload_dataloaders_every_n_epochs` replaces both."""

    keys_forward: bool
    """Whether to key the generators before each batch's forward pass. If False, loading the batch has done so."""
    training: TrainingData | None = None
    evaluations: dict[str, EvaluationData] = field(default_factory=dict)
    """Data of "validation", "test" and "predict"."""
    loaders: dict[str, Any] = field(default_factory=dict)
    """The user's loaders, keyed by "train", "validation" and so on."""
    samples: dict[str, Any] = field(default_factory=dict)
    """The fingerprint's section that describes which samples make up a step."""
    validation_rounds: int | None = None
    """Number of batches per replica between validations; None if validation runs at the end of epochs or by time."""
    validation_seconds: float | None = None
    """Seconds between validations; None if validation does not run by time."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Call:
    """The parts of one call to fit, validate, test or predict that exist from the start."""

    is_complete: ClassVar[bool] = False
    trainer: "Trainer"
    stage: str
    task: Task
    datamodule: DataModule | None
    request_loaders: dict[str, Any]
    """The loaders passed to the call."""
    state: State
    strategy: "Strategy"
    loop: LoopState
    data: RunData
    errors: Errors
    undo: ExitStack
    """Reverts the call's changes to the process when the call is closed."""
    hooks: Hooks
    """The task's hooks and, after the processes connect, those of the callbacks, which may query ranks."""
    agreement: Agreement
    metrics: Metrics
    preemption: Preemption
    watchdog: Watchdog
    run_file: RunFile
    drift: DriftGuard
    membership: Membership = field(default_factory=Membership)
    source: Path | str | None = None
    """`Location` of the checkpoint to resume from or load weights from, or None until the processes have connected."""
    resumes_same_run: bool = False
    """True if this run resumes itself rather than starting from another run's checkpoint."""
    evaluated_point: tuple[int, int] | None = None
    """Step and epoch at which an evaluation is logged; None to use those of the trainer's state."""

    @property
    def layout(self) -> Layout:
        """The assignment of replicas to processes."""
        return self.strategy.layout

    @property
    def local_replicas(self) -> int:
        """The number of replicas that this process runs."""
        return len(self.layout.owned(self.strategy.data_ranks.rank))

    @property
    def bitwise(self) -> bool:
        """Whether results must be bitwise identical on any number of processes."""
        return self.trainer.reproducible == "bitwise"

    @property
    def keyed(self) -> bool:
        """Whether keyed random numbers are used to load a batch and to run its forward pass."""
        return self.trainer.reproducible != "off"

    @property
    def members_change(self) -> bool:
        """Whether processes may join and leave during this call."""
        return self.strategy.elastic and self.stage == "fit"

    @property
    def training_data(self) -> TrainingData:
        """The training data of fit."""
        assert self.data.training is not None
        return self.data.training

    def describe_place(self) -> str:
        """Return a description of the current stage for use in messages about logged values."""
        if self.loop.doing == "sanity_check":
            return "the sanity check"
        return f"{self.loop.doing} at step {self.state.global_step}" if self.stage == "fit" else self.loop.doing

    def check_losses(self) -> None:
        """Raise NonFiniteError on every rank if any loss since the last check was non-finite."""
        self.strategy.timeouts.end_startup()
        if self.trainer.nan == "raise":
            try:
                self.metrics.check_losses()
            except NonFiniteError as error:
                raise explained(self.trainer, error) from None

    def require_same_weights(self) -> None:
        """Raise DisagreementError if weights that should be identical on all ranks differ. All ranks must call this."""
        self.drift.compare(self.state.global_step, self.agreement.elapsed)

    def agree_on_stop(self) -> None:
        """Agree with the other ranks on the elapsed time and on whether to stop."""
        self.agreement.agree(self.state.global_step, self.trainer.should_stop, self.preemption.signal)

    def agree(self) -> None:
        """Agree with the other ranks between steps. End the run if any rank has received a termination signal."""
        self.strategy.timeouts.end_startup()
        self.agree_on_stop()
        self.preemption.stop_if_agreed()
        self.membership.check_members()

    def remember_training_mode(self) -> None:
        """Store the training modes of the task's modules for `restore_training_mode`."""
        self.loop.training_modes = [(module, module.training) for module in self.task.modules()]

    def restore_training_mode(self) -> None:
        """Restore the training modes stored by `remember_training_mode`."""
        for module, mode in self.loop.training_modes:
            module.training = mode  # module.train(mode) would also set its submodules
        self.loop.training_modes = []


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Run(Call):
    """All parts of one call. Only `loop`, `state` and `data` contain mutable state."""

    is_complete: ClassVar[bool] = True
    optimization: Optimization
    schedule: Schedule
    transfer: Callable[[Any, int], Any] | None
    """Function that moves a batch to its device, or None if no move is needed."""
    keys_hooks: bool
    """Whether to key the generators before hooks after a step. With one replica there is no need: each step leaves the
    generators in a state that is a function of the step."""
    arity: int
    """How many of (batch, batch_idx) training_step accepts."""
    gradient_scale: float
    """Factor by which the strategy multiplies gradients in addition to averaging them over a step's samples."""
    fingerprint: dict[str, Any]
    """Settings that define the run; see resume.fingerprint."""
    numerics: dict[str, Any]
    """Settings that affect the bits of results. Checkpoints store them even after the run has reverted them."""

    # --- the step ---------------------------------------------------------------------------------------------------
    def begin_step(self, step: StepInput) -> None:
        """Begin a step and clear the gradients."""
        self.loop.step = step
        self.metrics.step, self.metrics.batches_of_step = self.state.global_step, 0
        if self.optimization.automatic:
            self.optimization.begin_step(step)

    def open_batch(self, item: ReplicaBatch, again: bool = False) -> Any:
        """Return a batch on its device, and attribute the next logged values and random numbers to its replica.

        Args:
            again: whether the step is running this batch again, with the same random numbers as in the first pass.
        """
        (self.metrics.return_to_batch if again else self.metrics.open_batch)(item.replica, item.samples)
        # Loading the batch may have left the generators keyed for its first forward pass. A repeat does not load the
        # batch, so it seeds them.
        if self.keyed if again else self.data.keys_forward:
            seed_generators(mix(self.state.seed, self.state.global_step, item.replica, item.batch_idx))
        return item.batch if self.transfer is None else self.transfer(item.batch, 0)

    def leaves_epoch(self, batch: Any, batch_idx: int) -> bool:
        """Call on_train_batch_start. Return True if a hook returned -1 to skip the rest of the epoch."""
        self.loop.epoch_skipped = False
        for hook in self.hooks["on_train_batch_start"]:
            if hook(batch, batch_idx) == -1:
                self.loop.epoch_skipped = True
        # A rank that continued alone would wait for this one in the backward pass. Only this rank checks, through the
        # store: a collective would cost time in every step of every run with this hook.
        if self.loop.epoch_skipped:
            self.watchdog.require_all_leave(batch_idx)
            self.metrics.step = -2  # the abandoned step does not count
            self.strategy.abandon_step()
        return self.loop.epoch_skipped

    def end_step(self, step: StepInput, output: Any, batch: Any) -> None:
        """Call on_step_end and, for the step's last batch, on_train_batch_end. Callbacks may save in the latter.

        A process without a batch calls on_train_batch_end only for callbacks that all ranks must call together, and
        discards the values they log.

        Args:
            output: training_step's output.
        """
        hooks = self.hooks
        if hooks["on_step_end"]:
            self.metrics.leave_batches(step.samples)
            if self.keys_hooks:
                self.seed_hooks("on_step_end")
            hooks.call("on_step_end")
        # on_step_end may also change weights; if a rank of an elastic run dies after this point, the update is complete
        self.optimization.updating = False
        if not hooks["on_train_batch_end"]:
            return
        if self.keys_hooks and "on_train_batch_end" in hooks.may_draw:
            self.seed_hooks("on_train_batch_end")
        if step.batches:
            item = step.batches[-1]
            self.metrics.return_to_batch(item.replica, item.samples)
            hooks.call("on_train_batch_end", as_outputs(output), batch, item.batch_idx)
        else:
            # the step's last batch belongs to other processes, so values logged here have no samples to weight them by
            self.metrics.muted = True
            for hook in hooks.late["on_train_batch_end"]:
                hook(None, None, self.state.epoch_rounds - 1)
            self.metrics.muted = False

    # --- between steps ----------------------------------------------------------------------------------------------
    def write_point(self, values: dict[str, float]) -> None:
        """Write a logging point on rank 0, at the latest step or at the step of the checkpoint being evaluated."""
        step, epoch = self.evaluated_point or (self.state.global_step, self.state.epoch)
        # the run's epoch overrides a value that a task logs as "epoch", so that all points of a step agree
        self.loop.point = step, values = step, {**values, "epoch": epoch}
        self.write(step, values, "log_point")

    def write(self, step: int, values: dict[str, float], method: str = "log_metrics") -> None:
        """Pass values to the loggers, on rank 0."""
        if self.trainer.is_global_zero:
            with self.trainer.saver.writing():
                for logger in self.trainer.loggers:
                    getattr(logger, method)(values, step)

    def log_point(self) -> Reduced:
        """Return the latest step's values across all replicas, and reach the same agreement as `agree_on_stop`.

        If the same ranks take part in both, a single collective carries losses, names, values and requests to stop.
        Raises NonFiniteError on every rank if a loss since the last check was not finite.
        """
        self.strategy.timeouts.end_startup()
        checks, agreement, step = self.trainer.nan == "raise", self.agreement, self.state.global_step
        # on a mesh, values are reduced over fewer ranks than must agree on stopping
        together = self.strategy.data_ranks is self.strategy.collectives
        contribution = (
            agreement.contribution(step, self.trainer.should_stop, self.preemption.signal) if together else []
        )
        try:
            reduced, highest = self.metrics.log_point(checks, contribution)
        except NonFiniteError as error:
            raise explained(self.trainer, error) from None
        if together:
            agreement.apply(step, highest)
        else:
            self.agree_on_stop()
        # once ranks agree on the clock, so that either all of them compare or none
        self.drift.compare_if_due(step, agreement.elapsed)
        if self.optimization.guard is not None:
            self.optimization.guard.report(reduced)
        return reduced

    def bad_weights(self) -> list[str]:
        """Return the names of the trainable parameters that are not finite. All ranks must call this."""
        return bad_weights(self.trainer)

    def seed_hooks(self, hook: str) -> None:
        """Seed the generators for a hook, identically on all ranks.

        Otherwise, random numbers would depend on which replica each rank ran last.
        """
        state = self.state
        seed_generators(hook_key(state.seed, hook, state.global_step, state.epoch))

    def start_training(self) -> None:
        """Begin or resume training. If there are no batches, end the fit call without calling the training hooks."""
        self.loop.doing = "train"
        if self.training_data.rounds == 0:
            self.end_fit()
            return
        self.preemption.start()
        self.optimization.begin_training()
        self.loop.validated_after = self.schedule.seconds()
        self.metrics.open("train", fresh=False)
        # the checkpoint was saved in the epoch's last hooks, which must not run twice
        if self.state.epoch_ended:
            self.schedule.count_epoch()
        self.hint_at_few_points()
        self.seed_hooks("on_train_start")
        self.hooks.call("on_train_start")
        # a hook may have set should_stop, which the ranks would otherwise learn of only after a step
        self.agree_on_stop()

    def end_training(self) -> None:
        """Compare the ranks' weights one last time and call the hooks that end training."""
        self.require_same_weights()
        self.optimization.begin_evaluation()  # without a matching end_evaluation
        # training is complete: an exit from here on is not reported as premature
        self.loop.remaining = "hooks"
        self.seed_hooks("on_train_end")
        self.hooks.call("on_train_end")
        self.end_fit()

    def end_fit(self) -> None:
        """Call the hooks that end a fit."""
        self.loop.remaining = "nothing"
        self.hooks.call("on_fit_end")
        self.metrics.finish()

    def end_steps(self) -> None:
        """Check the losses of the epoch's steps, and publish the latest step's values if they were not logged.

        Raises DataError if there were no steps, or TaskError if no step had a loss.
        """
        # streams are compared at their end: agreeing at every step would cost one collective per step
        if self.training_data.amount_read:
            self.watchdog.require_same_end(self.training_data.amount_read)
        self.refuse_empty_epoch()
        self.require_loss()
        if self.state.epoch == 0:
            self.optimization.warn_if_nothing_compiled()
        self.check_losses()
        if self.schedule.is_last_step(epoch_is_over=not self.schedule.stops_here()):
            self.trainer.log_step()
        else:
            self.show_step()

    def require_loss(self) -> None:
        """Raise TaskError if no batch in the first epoch had a loss. In later epochs, warn.

        All ranks must call this.
        """
        metrics, trainer = self.metrics, self.trainer
        if not self.optimization.optimizers or self.loop.epoch_skipped:
            return
        # a run that is resumed at the end of an epoch has no batches, and so none without a loss
        counts = torch.tensor([metrics.batches["train"], metrics.batches_left_out])
        trained, left_out = self.strategy.data_ranks.all_reduce(counts, "sum").tolist()
        if trained or not left_out:
            return
        epoch = self.state.epoch
        problem = (
            f"training_step returned None for every batch of epoch {epoch}, so nothing was trained. Return the loss."
            + correction("loss = mse_loss(outputs, targets)", "return mse_loss(outputs, targets)")
        )
        # after an early stop: a later batch of the epoch might have had a loss
        if epoch == 0 and not self.agreement.stop:
            raise TaskError(problem)
        if trainer.is_global_zero:
            log.warning("%s", problem)

    def hint_at_few_points(self) -> None:
        """If the run has fewer steps than log_every_n_steps, log a hint that only the last step will be logged."""
        trainer = self.trainer
        steps, every = trainer.estimated_stepping_batches, trainer.log_every_n_steps
        if steps < every and trainer.loggers and trainer.is_global_zero:
            log.info(
                "The run has %d steps, fewer than log_every_n_steps=%d, so only its last step is logged. Lower "
                "log_every_n_steps for more points.", steps, every,
            )  # fmt: skip

    def show_step(self) -> None:
        """Publish the latest step's values unless they have already been published. All ranks must call this."""
        # a logged step is published already
        if self.state.logged_at != self.state.global_step:
            self.trainer.publish(self.metrics.newest_values(), write=False)

    def call_epoch_end(self, stage: str) -> None:
        """Publish the epoch's values and call the end-of-epoch hooks. During training, skip late callbacks."""
        self.metrics.suffix, self.metrics.in_step = "", False
        self.metrics.leave_batches(1)  # weight such a hook's values as one batch, for any number of processes
        name = f"on_{stage}_epoch_end"
        # only hooks need the values now; they are reduced again once the hooks have logged theirs
        if self.hooks[name]:
            self.trainer.publish(self.metrics.reduce_epoch(keep=True), write=False)
        self.seed_hooks(name)
        (self.hooks.call_early if stage == "train" else self.hooks.call)(name)

    def refuse_empty_epoch(self) -> None:
        """Raise DataError if the training loader yielded no batches during the epoch."""
        if self.state.epoch_steps or self.loop.epoch_skipped or self.schedule.stops_here():
            return
        raise DataError(
            f"The training loader yielded no batches in epoch {self.state.epoch}. A generator is exhausted after one "
            f"epoch. Pass a DataLoader, a list or another iterable that starts over every epoch."
        )

    def save_cut_epoch(self, complete: bool) -> None:
        """Save a checkpoint before the last validation run if the run stops before the epoch is `complete`."""
        for callback in () if complete else self.trainer.checkpoint_callbacks:
            callback.save_cut_epoch(self.trainer)

    def begin_validation(self) -> None:
        """Begin a validation run in the middle of training."""
        self.check_losses()  # a NaN ends the run now, not after a useless validation run
        self.loop.doing = "validation"
        self.optimization.begin_evaluation()

    def end_validation(self) -> None:
        """Return to training after a validation run and agree with the other ranks on whether to stop."""
        self.optimization.end_evaluation()
        self.loop.doing = "train"
        self.metrics.open("train", fresh=False)
        self.agree_on_stop()

    def end_epoch_here(self, samples: dict[str, Any] | None) -> None:
        """Skip the rest of a resumed epoch, because its batches were assigned with different settings (`samples`)."""
        self.loop.epoch_skipped, self.loop.samples_of_epoch = True, samples

    def steps_left(self) -> Iterator[StepInput]:
        """Return the epoch's remaining steps; none if a hook at its start skipped the epoch or ended the run."""
        if self.loop.epoch_skipped or self.schedule.stops_here():
            return iter(())
        return self.training_data.epoch(self.state.epoch, self.state.epoch_steps)

    def parts(self) -> dict[str, Stateful]:
        """Return the parts that a checkpoint stores besides weights, optimizers and loop state.

        The parts are restored in this order.
        """
        data = {} if self.data.training is None else {"data": self.data.training}
        module = {} if self.datamodule is None else {"datamodule": self.datamodule}
        return {
            "precision": self.strategy.precision,
            "metrics": self.metrics,
            "callback_metrics": PublishedMetrics(self.trainer),
            **data,
            **module,
            "callbacks": CallbackStates(self.trainer.callbacks),
        }

    def set_accumulation(self, batches: int) -> None:
        """Set the number of batches per replica per step, starting with the current epoch."""
        self.trainer.accumulate_grad_batches = self.data.samples["accumulate_grad_batches"] = batches
        self.training_data.dealing = replace(self.training_data.dealing, accumulate=batches)
