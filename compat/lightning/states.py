"""TrainerState: a trainer's state under Lightning's names, based on Legato's loop state."""

from typing import Any

from ...trainer.state import State
from .utilities import LightningEnum


class TrainerStatus(LightningEnum):
    """Progress of a trainer."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the last call has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(LightningEnum):
    """The methods of a trainer."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """Current activity of a trainer."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the stage is an evaluation."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The prefix of this stage's loader methods."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


STAGE_OF_DOING = {"validation": RunningStage.VALIDATING}
"""Stages that have a different name in Legato."""


class TrainerState(State):
    """The loop state, including `status`, `fn` and `stage`."""

    status: TrainerStatus
    fn: TrainerFn | None
    trainer: Any

    def __init__(self, *arguments: Any, **values: Any) -> None:
        status, fn = values.pop("status", TrainerStatus.INITIALIZING), values.pop("fn", None)
        values.pop("stage", None)  # set by the trainer
        super().__init__(*arguments, **values)
        self.status, self.fn, self.trainer = status, fn, None

    @classmethod
    def of(cls, state: State, trainer: Any) -> "TrainerState":
        """Return a TrainerState with the values from another state."""
        loop_state = state if isinstance(state, cls) else cls(**state.to_dict())
        loop_state.trainer = trainer
        return loop_state

    @property
    def stage(self) -> RunningStage | None:
        """Current stage; None between calls."""
        run = None if self.trainer is None else self.trainer.run
        if run is None or not run.loop.open:
            return None
        return STAGE_OF_DOING.get(run.loop.doing) or RunningStage(run.loop.doing)

    @property
    def finished(self) -> bool:
        """Whether the last call ended without an error."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last call has ended."""
        return self.status.stopped

    def __repr__(self) -> str:
        return f"TrainerState(status={self.status!r}, fn={self.fn!r}, stage={self.stage!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the trainer, which other processes do not need."""
        return {**self.__dict__, "trainer": None}
