"""Run: the parts of one call of fit, validate, test or predict, and what the loop asks of them between steps.

A `Call` has what is there from the first moment; one with more takes its place when its processes have met
(`setup.join`), and a `Run` with everything before the first step (`setup.make_run`). None of them changes.
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
from ..base.errors import DataError, Errors, NonFiniteError, TaskError
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
    """Mutable state of a run that is not saved."""

    doing: str
    """The current stage: "train", "sanity_check", "validation", "test" or "predict"."""
    open: bool = True
    """Whether the run is under way."""
    remaining: Literal["steps", "hooks", "nothing"] = "steps"
    """Remaining part of a fit: steps, then only the hooks that end it."""
    epoch_skipped: bool = False
    """Whether the rest of the epoch is left out."""
    step: StepInput | None = None
    """The newest step of this process."""
    item: ReplicaBatch | None = None
    """The newest batch of an evaluation in this process."""
    outputs: list[tuple[int, int, int, Any]] = field(default_factory=list)
    """Loader, batch, replica and output of each batch that this process has predicted so far."""
    validated_after: float = 0.0
    """Seconds of the run at the end of the newest validation, or at its start."""
    point: tuple[int, dict[str, float]] | None = None
    """The newest point of the log: its step and values."""
    samples_of_epoch: dict[str, Any] | None = None
    """The `samples` of the current epoch, if it was dealt out by other settings."""
    training_modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    """The mode of each module before an evaluation."""


@dataclass
class RunData:
    """The data of a run, which `reload_dataloaders_every_n_epochs` replaces."""

    keys_forward: bool
    """Whether the random numbers of each batch's forward are keyed; else loading its batch has keyed them."""
    training: TrainingData | None = None
    evaluations: dict[str, EvaluationData] = field(default_factory=dict)
    """Data of "validation", "test" and "predict"."""
    loaders: dict[str, Any] = field(default_factory=dict)
    """The loaders as they were given, by "train", "validation" and so on."""
    samples: dict[str, Any] = field(default_factory=dict)
    """The part of the fingerprint that decides which samples make up a step."""
    validation_rounds: int | None = None
    """After how many batches of a replica validation is due; None: at the end of epochs, or after some time."""
    validation_seconds: float | None = None
    """After how many seconds validation is due; None: not by time."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Call:
    """Parts of one call of fit, validate, test or predict that exist from its first moment."""

    is_complete: ClassVar[bool] = False
    trainer: "Trainer"
    stage: str
    task: Task
    datamodule: DataModule | None
    given: dict[str, Any]
    """The loaders that were handed over."""
    state: State
    strategy: "Strategy"
    loop: LoopState
    data: RunData
    errors: Errors
    undo: ExitStack
    """Undoes what the call changes in the process, when it is closed."""
    hooks: Hooks
    """Those of the task; those of callbacks too once processes have met, which they may ask about."""
    agreement: Agreement
    metrics: Metrics
    preemption: Preemption
    watchdog: Watchdog
    run_file: RunFile
    drift: DriftGuard
    membership: Membership = field(default_factory=Membership)
    source: Path | str | None = None
    """The checkpoint to resume from, or to take weights from, a `Location`; None too until the processes have met."""
    goes_on: bool = False
    """Whether that is a checkpoint of this run directory, and not one from which a new run begins."""
    evaluated_point: tuple[int, int] | None = None
    """Step and epoch at which an evaluation is logged; None: the trainer's own."""

    @property
    def layout(self) -> Layout:
        """The layout of replicas over processes."""
        return self.strategy.layout

    @property
    def local_replicas(self) -> int:
        """The number of replicas of this process."""
        return len(self.layout.owned(self.strategy.data_ranks.rank))

    @property
    def bitwise(self) -> bool:
        """Whether results must have the same bits on any number of processes."""
        return self.trainer.reproducible == "bitwise"

    @property
    def keyed(self) -> bool:
        """Whether the random numbers of loading a batch, and of its forward, are keyed."""
        return self.trainer.reproducible != "off"

    @property
    def members_change(self) -> bool:
        """Whether processes may leave and join during this call."""
        return self.strategy.elastic and self.stage == "fit"

    @property
    def training_data(self) -> TrainingData:
        """The training data of fit."""
        assert self.data.training is not None
        return self.data.training

    def describe_place(self) -> str:
        """Describe the current stage, for messages about logged values."""
        if self.loop.doing == "sanity_check":
            return "the sanity check"
        return f"{self.loop.doing} at step {self.state.global_step}" if self.stage == "fit" else self.loop.doing

    def check_losses(self) -> None:
        """Raise NonFiniteError, on every rank, if a loss since the last look was not finite."""
        self.strategy.timeouts.end_startup()
        if self.trainer.nan == "raise":
            try:
                self.metrics.check_losses()
            except NonFiniteError as error:
                raise explained(self.trainer, error) from None

    def require_same_weights(self) -> None:
        """Raise DisagreementError if the weights differ on ranks that must hold the same; every rank calls it."""
        self.drift.compare(self.state.global_step, self.agreement.elapsed)

    def agree_on_stop(self) -> None:
        """Agree with the other ranks on the elapsed time and on whether to stop."""
        self.agreement.agree(self.state.global_step, self.trainer.should_stop, self.preemption.signal)

    def agree(self) -> None:
        """Agree with the other ranks between two steps; end the run if one of them was told to."""
        self.strategy.timeouts.end_startup()
        self.agree_on_stop()
        self.preemption.stop_if_agreed()
        self.membership.check_members()

    def remember_training_mode(self) -> None:
        """Remember the mode of each module of the task, for `restore_training_mode`."""
        self.loop.training_modes = [(module, module.training) for module in self.task.modules()]

    def restore_training_mode(self) -> None:
        """Give each module of the task the mode that it had at `remember_training_mode`."""
        for module, mode in self.loop.training_modes:
            module.training = mode  # not module.train(mode), which sets all modules below it as well
        self.loop.training_modes = []


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Run(Call):
    """All parts of a call; what changes is in `loop`, `state` and `data`."""

    is_complete: ClassVar[bool] = True
    optimization: Optimization
    schedule: Schedule
    transfer: Callable[[Any, int], Any] | None
    """Moves a batch to its device; None: it is there."""
    keys_hooks: bool
    """Whether hooks after a step are keyed. A single process needs no key: a step of one replica leaves its generators
    at a state that is a function of the step."""
    arity: int
    """Number of arguments that training_step takes of (batch, batch_idx)."""
    gradient_scale: float
    """Factor by which the strategy multiplies gradients, beyond their mean over the samples of a step."""
    fingerprint: dict[str, Any]
    """Settings that define the run; see checkpoints.fingerprint."""
    numerics: dict[str, Any]
    """The settings that results depend on bit by bit, also for a checkpoint that is saved when they are undone."""

    # --- the step ---------------------------------------------------------------------------------------------------
    def begin_step(self, step: StepInput) -> None:
        """Begin a step: clear the gradients."""
        self.loop.step = step
        self.metrics.step, self.metrics.batches_of_step = self.state.global_step, 0
        if self.optimization.automatic:
            self.optimization.begin_step(step)

    def open_batch(self, item: ReplicaBatch, again: bool = False) -> Any:
        """Return a batch on its device, with the logged values and random numbers that follow those of its replica.

        again: it is trained on again in the same step, with the random numbers of the first time.
        """
        (self.metrics.return_to_batch if again else self.metrics.open_batch)(item.replica, item.samples)
        # Loading the batch may have keyed its first forward: the generators are where that has left them. It is not
        # loaded a second time.
        if self.keyed if again else self.data.keys_forward:
            seed_generators(mix(self.state.seed, self.state.global_step, item.replica, item.batch_idx))
        return item.batch if self.transfer is None else self.transfer(item.batch, 0)

    def leaves_epoch(self, batch: Any, batch_idx: int) -> bool:
        """Call on_train_batch_start; return whether a hook answered -1, which leaves out the rest of the epoch."""
        self.loop.epoch_skipped = False
        for hook in self.hooks["on_train_batch_start"]:
            if hook(batch, batch_idx) == -1:
                self.loop.epoch_skipped = True
        # A rank that went on alone would wait for this one in its backward. Asked of the store and only by the rank
        # that leaves: a collective would cost every step of every run that has this hook.
        if self.loop.epoch_skipped:
            self.watchdog.require_all_leave(batch_idx)
            self.metrics.step = -2  # the step that had begun is none
            self.strategy.abandon_step()
        return self.loop.epoch_skipped

    def end_step(self, step: StepInput, output: Any, batch: Any) -> None:
        """Call on_step_end, and then on_train_batch_end for the step's last batch, in which callbacks may save.

        A process without a batch calls the latter for callbacks that all ranks must call together; what these log is
        dropped. `output`: what training_step returned.
        """
        hooks = self.hooks
        if hooks["on_step_end"]:
            self.metrics.leave_batches(step.samples)
            if self.keys_hooks:
                self.seed_hooks("on_step_end")
            hooks.call("on_step_end")
        # on_step_end may change weights, as an update does; a rank that dies later leaves them whole (elastic runs)
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
            # a step's last batch is that of other processes: what hooks log here has no sample behind it
            self.metrics.muted = True
            for hook in hooks.late["on_train_batch_end"]:
                hook(None, None, self.state.epoch_rounds - 1)
            self.metrics.muted = False

    # --- between steps ----------------------------------------------------------------------------------------------
    def write_point(self, values: dict[str, float]) -> None:
        """Write a point of the log, on rank 0: at the newest step, or at that of a checkpoint that is evaluated."""
        step, epoch = self.evaluated_point or (self.state.global_step, self.state.epoch)
        # the run's own epoch, whatever a task logs by that name: all points of a step agree on it
        self.loop.point = step, values = step, {**values, "epoch": epoch}
        self.write(step, values, "log_point")

    def write(self, step: int, values: dict[str, float], method: str = "log_metrics") -> None:
        """Give values to the loggers, on rank 0."""
        if self.trainer.is_global_zero:
            with self.trainer.saver.writing():
                for logger in self.trainer.loggers:
                    getattr(logger, method)(values, step)

    def log_point(self) -> Reduced:
        """Return the newest step's values over all replicas, and agree as `Trainer.agree` does.

        Where the same ranks do both it is one collective: losses, names, values, and whether to stop. Raises
        NonFiniteError, on every rank, if a loss since the last look was not finite.
        """
        self.strategy.timeouts.end_startup()
        checks, agreement, step = self.trainer.nan == "raise", self.agreement, self.state.global_step
        # on a mesh values are shared out over fewer ranks than those that must agree on stopping
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
        # after the agreement: the clock by which it is due is the agreed one, so that all ranks compare or none
        self.drift.compare_if_due(step, agreement.elapsed)
        if self.optimization.guard is not None:
            self.optimization.guard.report(reduced)
        return reduced

    def bad_weights(self) -> list[str]:
        """Return the names of trained parameters that are not finite; every rank calls it."""
        return bad_weights(self.trainer)

    def seed_hooks(self, hook: str) -> None:
        """Seed the generators for a hook that all ranks call: else they would draw on as their last replicas did."""
        state = self.state
        seed_generators(hook_key(state.seed, hook, state.global_step, state.epoch))

    def start_training(self) -> None:
        """Begin or resume training; without a batch the fit ends, and the hooks of training are not called."""
        self.loop.doing = "train"
        if self.training_data.rounds == 0:
            self.end_fit()
            return
        self.preemption.start()
        self.optimization.begin_training()
        self.loop.validated_after = self.schedule.seconds()
        self.metrics.open("train", fresh=False)
        # resumed from a checkpoint of an epoch's last hooks, which are not called a second time
        if self.state.epoch_ended:
            self.schedule.count_epoch()
        self.tell_few_points()
        self.seed_hooks("on_train_start")
        self.hooks.call("on_train_start")
        # a hook may have set should_stop: the ranks would else learn of it only after a step
        self.agree_on_stop()

    def end_training(self) -> None:
        """Compare the ranks' weights for the last time, and call the hooks that end training."""
        self.require_same_weights()
        self.optimization.begin_evaluation()  # for good
        # an exit from here on is none before the end of training, and is not reported as one
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
        """Check the losses of the epoch's steps, and publish the values of the newest one if it was not logged.

        Raises DataError if there was no step, TaskError if no step had a loss.
        """
        # streams are compared where they end: to agree on every step would cost a collective a step
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
        """Raise TaskError where no batch of a run's first epoch had a loss, warn in a later one; collective."""
        metrics, trainer = self.metrics, self.trainer
        if not self.optimization.optimizers or self.loop.epoch_skipped:
            return
        # a run resumed at the end of an epoch has no batches, of which none was left out
        counts = torch.tensor([metrics.batches["train"], metrics.batches_left_out])
        trained, left_out = self.strategy.data_ranks.all_reduce(counts, "sum").tolist()
        if trained or not left_out:
            return
        epoch = self.state.epoch
        told = f"training_step returned None for every batch of epoch {epoch}, so nothing was trained: return the loss."
        # a run that was stopped has not seen the whole epoch, of which a later batch might have had a loss
        if epoch == 0 and not self.agreement.stop:
            raise TaskError(told)
        if trainer.is_global_zero:
            log.warning("%s", told)

    def tell_few_points(self) -> None:
        """Say that a run shorter than the interval of logging points has one at its last step only."""
        trainer = self.trainer
        steps, every = trainer.estimated_stepping_batches, trainer.log_every_n_steps
        if steps < every and trainer.loggers and trainer.is_global_zero:
            log.info(
                "The run has %d steps, fewer than log_every_n_steps=%d: values of steps are written at its last step "
                "only. Lower log_every_n_steps for more points.", steps, every,
            )  # fmt: skip

    def show_step(self) -> None:
        """Publish the newest step's values where that was not done; every rank calls it."""
        # a logged step is published already; a second time its values would be reduced in vain
        if self.state.logged_at != self.state.global_step:
            self.trainer.publish(self.metrics.newest_values(), write=False)

    def call_epoch_end(self, word: str) -> None:
        """Call the hooks that end an epoch, with its values published; training's late hooks come after them."""
        self.metrics.suffix, self.metrics.in_step = "", False
        self.metrics.leave_batches(1)  # a value of such a hook weighs as one batch, on any number of processes
        name = f"on_{word}_epoch_end"
        # reduced for hooks alone: without one the values are reduced once, in end_epoch
        if self.hooks[name]:
            self.trainer.publish(self.metrics.reduce_epoch(keep=True), write=False)
        self.seed_hooks(name)
        (self.hooks.call_early if word == "train" else self.hooks.call)(name)

    def refuse_empty_epoch(self) -> None:
        """Raise DataError where the training loader had nothing for a whole epoch."""
        if self.state.epoch_steps or self.loop.epoch_skipped or self.schedule.stops_here():
            return
        raise DataError(
            f"The training loader yielded no batch in epoch {self.state.epoch}. A generator is used up after one "
            f"epoch: give a DataLoader, a list or another object that starts again with each iter()."
        )

    def save_cut_epoch(self, complete: bool) -> None:
        """Save before the validation of a run that was asked to stop within an epoch, which is not `complete`."""
        for callback in () if complete else self.trainer.checkpoint_callbacks:
            callback.save_cut_epoch(self.trainer)

    def begin_validation(self) -> None:
        """Begin a validation in the middle of training."""
        self.check_losses()  # a NaN ends the run now, not after a validation of NaN
        self.loop.doing = "validation"
        self.optimization.begin_evaluation()

    def end_validation(self) -> None:
        """Go on with training after a validation, which schedulers may have waited for; agree with the other ranks."""
        self.optimization.end_evaluation()
        self.loop.doing = "train"
        self.metrics.open("train", fresh=False)
        self.agree_on_stop()

    def end_epoch_here(self, samples: dict[str, Any] | None) -> None:
        """Skip the rest of a resumed epoch: it was dealt out by other settings, `samples`."""
        self.loop.epoch_skipped, self.loop.samples_of_epoch = True, samples

    def steps_left(self) -> Iterator[StepInput]:
        """Return the remaining steps of the epoch: none where a hook that began it has skipped it or ended the run."""
        if self.loop.epoch_skipped or self.schedule.stops_here():
            return iter(())
        return self.training_data.epoch(self.state.epoch, self.state.epoch_steps)

    def parts(self) -> dict[str, Stateful]:
        """Return what a checkpoint holds beside weights, optimizers and loop state, in the order of its restoring."""
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
        """Accumulate this many batches of a replica for a step, from the epoch on that begins."""
        self.trainer.accumulate_grad_batches = self.data.samples["accumulate_grad_batches"] = batches
        self.training_data.dealing = replace(self.training_data.dealing, accumulate=batches)
