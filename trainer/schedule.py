"""Schedule: when to validate, step the learning rate schedulers, and end an epoch or the run.

Each event happens exactly once, even if the run resumes from a checkpoint that a hook saved, because `State` records
which events have happened.
"""

from typing import TYPE_CHECKING, Any

from .data.steps import StepInput
from .optimization.optimization import Optimization
from .state import State

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class Schedule:
    """Counts the steps of a fit call and decides what to do after each step."""

    def __init__(self, call: Any, optimization: Optimization) -> None:
        # `call` is a Call; not annotated, as run.py imports this module
        self.call, self.optimization = call, optimization
        self.trainer: Trainer = call.trainer
        self.state: State = call.state
        self.loop, self.data = call.loop, call.data

    # --- the end ----------------------------------------------------------------------------------------------------
    @property
    def epoch_is_full(self) -> bool:
        """Whether the epoch's last step has finished; False if the loader has no length."""
        return self.state.epoch_rounds >= self.trainer.num_training_batches

    def is_done(self) -> bool:
        """Return whether the run has reached its end."""
        limit = self.trainer.max_epochs
        return (limit is not None and 0 <= limit <= self.state.epoch) or self.stops_here()

    def stops_here(self, agrees: bool = True) -> bool:
        """Return whether the run stops after this step: at max_steps, or because the ranks agreed to stop.

        Args:
            agrees: whether to agree with the other ranks if an agreement is due, and to save if any rank has received a
                termination signal.
        """
        trainer, state, agreement = self.trainer, self.state, self.call.agreement
        # a single process needs no agreement, so it stops after the step in which should_stop was set
        asked = trainer.should_stop and trainer.world_size == 1
        if agrees and (state.global_step >= agreement.next_step or asked):
            self.call.agree()
        if (
            agreement.stop
            and state.global_step >= (trainer.min_steps or 0)
            and state.epoch >= (trainer.min_epochs or 0)
        ):
            return True
        # last: max_steps takes precedence over min_epochs and min_steps
        return 0 <= trainer.max_steps <= trainer.global_step

    def is_last_step(self, epoch_is_over: bool) -> bool:
        """Return whether the latest step is a logging point because the run ends after it.

        The result is False if a signal ends the run early, because the run continues when it resumes.
        """
        if not self.state.epoch_steps:
            return False
        if epoch_is_over and self.state.epoch + 1 == self.trainer.max_epochs:
            return True
        return self.stops_here(agrees=False) and not self.call.agreement.signal

    def is_point(self) -> bool:
        """Return whether the latest step is certain to be a logging point, even if the end of the data is unknown."""
        every = self.trainer.log_every_n_steps
        return self.state.global_step % every == 0 or self.is_last_step(self.epoch_is_full)

    # --- steps and epochs -------------------------------------------------------------------------------------------
    def count(self, step: StepInput) -> None:
        """Count a finished step and advance the step-interval schedulers.

        After an epoch's last step, also advance the epoch-interval schedulers that need no metric.
        """
        state, optimization = self.state, self.optimization
        optimization.updating = True  # even if a guard dropped the update
        state.global_step += 1
        state.epoch_steps += 1
        state.epoch_rounds += step.rounds
        state.rounds += step.rounds
        state.samples_seen += step.samples
        if optimization.stepped:
            optimization.update_scale()
        if optimization.schedulers:
            # after counting: the number of finished steps decides which scheduler is due
            optimization.step_schedulers("step", state.global_step, plateau=False)
            if self.epoch_is_full:
                self.step_by_epoch()

    def step_by_epoch(self) -> None:
        """Once per epoch, at the last step if it is known, advance the epoch-interval schedulers that need no metric.

        This happens before the validation run at the end of the epoch, so that a checkpoint saved during it contains
        the next epoch's learning rates.
        """
        if self.state.scheduled_epochs <= self.state.epoch:
            self.state.scheduled_epochs = self.state.epoch + 1
            self.optimization.step_schedulers("epoch", self.state.epoch + 1, plateau=False)

    def after_validation(self, ends_epoch: bool = False) -> None:
        """Step a step-interval ReduceLROnPlateau once per step, after the validation run that follows the step."""
        state = self.state
        if not self.optimization.has_plateau_by_steps or state.plateau_step >= state.global_step:
            return
        if ends_epoch or not self.epoch_is_full:  # otherwise the validation run that ends the epoch is still to come
            state.plateau_step = state.global_step
            self.optimization.step_schedulers("step", state.global_step, plateau=True)

    def end_epoch(self) -> None:
        """Step an epoch-interval ReduceLROnPlateau and mark the epoch as ended, so that it can be counted."""
        self.optimization.step_schedulers("epoch", self.state.epoch + 1, plateau=True)
        self.state.epoch_ended = True

    def count_epoch(self) -> None:
        """Count the epoch if it has ended."""
        state = self.state
        if state.epoch_ended:
            self.loop.samples_of_epoch = None
            state.epoch += 1
            state.epoch_steps = state.epoch_rounds = 0
            state.epoch_ended = self.loop.epoch_skipped = False

    # --- validation -------------------------------------------------------------------------------------------------
    def validation_is_due(self) -> bool:
        """Return whether this step is followed by a mid-epoch validation run."""
        every, seconds, state = self.data.validation_rounds, self.data.validation_seconds, self.state
        if (every is None and seconds is None) or not state.epoch_steps or state.validated_at == state.global_step:
            return False
        epochs, rounds = self.trainer.check_val_every_n_epoch, state.epoch_rounds
        if epochs is None:
            rounds = state.rounds
        elif (state.epoch + 1) % epochs:
            return False
        if every is None:
            return bool(self.seconds() - self.loop.validated_after >= (seconds or 0.0))
        # of the latest step only: an epoch's last step may have fewer batches than accumulate_grad_batches
        rounds_of_step = state.epoch_rounds - (state.epoch_steps - 1) * self.trainer.accumulate_grad_batches
        # validation may become due after any of a step's batches
        return bool(rounds % every < rounds_of_step)

    def validation_ends_epoch(self, complete: bool) -> bool:
        """Return whether to validate now because the epoch is `complete`, or because the run stops mid-epoch."""
        state, agreement, epochs = self.state, self.call.agreement, self.trainer.check_val_every_n_epoch
        if "validation" not in self.data.evaluations or state.validated_at == state.global_step:
            return False
        is_due_by_epoch = epochs is None or (state.epoch + 1) % epochs == 0
        # a signal leaves no time to validate, and the run isn't over: resuming it continues the epoch
        if agreement.stop and not agreement.signal and state.epoch_steps > 0 and self.stops_here():
            return is_due_by_epoch
        within_epochs = (self.data.validation_rounds, self.data.validation_seconds) != (None, None)
        return complete and not within_epochs and epochs is not None and is_due_by_epoch

    def note_validation(self) -> None:
        """Record the step and time at which the latest validation run ended."""
        self.state.validated_at, self.loop.validated_after = self.state.global_step, self.seconds()

    def seconds(self) -> float:
        """Return the run's elapsed time in seconds, which is the same on every rank."""
        # the agreed clock: a millisecond between the ranks' own clocks could make them decide differently
        agreed: float = self.call.agreement.elapsed
        return float(self.call.agreement.now()) if self.call.metrics.processes == 1 else agreed
