"""What torchmetrics objects held before a step or a validation that may have to be done again."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..run import Run


class Keeper:
    """Keeps the states of a task's metrics, where it has some: an update cannot be taken back from them."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.kept: Any = None
        self.step = -1
        """The step in which, or the validation after which, they were kept."""
        self.in_validation = False

    def start(self) -> None:
        """From now on keep the states whenever a step or a validation begins."""
        hooks = self.run.hooks
        if self.run.metrics.states.by_path:
            hooks["on_train_batch_start"] += (self._begin_turn,)
            hooks["on_validation_start"] += (self._begin_validation,)

    def _begin_turn(self, batch: Any, batch_idx: int) -> None:
        if self.run.metrics.turns_of_step == 1:
            self._keep(in_validation=False)
            if self.run.metrics.states.taking_turns:
                self.run.metrics.states.open_replica(self.run.metrics.replica)

    def _begin_validation(self) -> None:
        self._keep(in_validation=True)

    def _keep(self, in_validation: bool) -> None:
        self.kept, self.step = self.run.metrics.states.snapshot(), self.run.state.global_step
        self.in_validation = in_validation

    def rewind(self, step: int, validating: bool) -> None:
        """Put the states back, where the run goes on with the step or the validation before which they were kept."""
        if self.kept is not None and self.step == step and self.in_validation == validating:
            self.run.metrics.states.restore(self.kept)
        self.kept = None
