"""GradientAccumulationScheduler: changes accumulate_grad_batches at the start of chosen epochs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer


class GradientAccumulationScheduler(Callback):
    """Sets the number of batches accumulated per step, which may change between epochs.

    `trainer.estimated_stepping_batches` uses the current epoch's value for all later epochs.

    Args:
        scheduling: Number of batches per step, keyed by epoch (counted from 0): `{0: 8, 4: 4}` accumulates 8 batches in
            epochs 0 to 3 and 4 from epoch 4 onward. Before the first key, each step uses one batch.

    Raises ConfigError if `scheduling` has invalid values, if `trainer.accumulate_grad_batches` is also set, or if
    optimization is manual.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        counts = [value for pair in scheduling.items() for value in pair]
        if not scheduling or not all(isinstance(value, int) and not isinstance(value, bool) for value in counts):
            raise ConfigError(
                f"GradientAccumulationScheduler: expected {{epoch: batches}}, as in {{0: 8, 4: 4}}, got {scheduling!r}."
            )
        if min(scheduling) < 0 or min(scheduling.values()) < 1:
            raise ConfigError(
                f"GradientAccumulationScheduler: epochs must be at least 0 and batches at least 1, got {scheduling!r}."
            )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch accumulates more than one batch."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches per step in `epoch`."""
        return self.scheduling[max(first for first in self.epochs if first <= epoch)]

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Set the batches per step for epoch 0. Raises ConfigError if `trainer.accumulate_grad_batches` is also set."""
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) cannot be combined with "
                f"GradientAccumulationScheduler. Remove one of them."
            )
        if not task.automatic_optimization and self.going_to_accumulate_grad_batches():
            raise ConfigError(
                "GradientAccumulationScheduler needs automatic optimization, but this task has "
                "automatic_optimization = False. Remove the callback and accumulate gradients in training_step."
            )
        # before the data is set up, since the number of steps per epoch depends on this value
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Set the value for this epoch."""
        # only between epochs: positions within an epoch assume that all its steps have the same size
        trainer.current_run.set_accumulation(self.get_accumulate_grad_batches(trainer.current_epoch))

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the trainer's value to 1."""
        if stage == "fit":
            # otherwise the next fit would mistake the epoch's value for the user's and raise an error
            trainer.accumulate_grad_batches = 1

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the epoch determines the number of batches."""
        return {}
