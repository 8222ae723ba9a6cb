"""GradientAccumulationScheduler: another accumulate_grad_batches from given epochs on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer


class GradientAccumulationScheduler(Callback):
    """Accumulates as many batches for a step as `scheduling` says: `{0: 8, 4: 4}` from epoch 0 on, and from epoch 4 on.

    `trainer.estimated_stepping_batches` counts on as in the current epoch.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        counts = [value for pair in scheduling.items() for value in pair]
        if not scheduling or not all(isinstance(value, int) and not isinstance(value, bool) for value in counts):
            raise ConfigError(
                f"GradientAccumulationScheduler takes batches by epoch, {{0: 8, 4: 4}}; got {scheduling!r}."
            )
        if min(scheduling) < 0 or min(scheduling.values()) < 1:
            raise ConfigError(
                f"GradientAccumulationScheduler: epochs count from 0, and a step takes at least 1 batch; got "
                f"{scheduling!r}."
            )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether some epoch accumulates."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the batches of a step in an epoch."""
        return self.scheduling[max(first for first in self.epochs if first <= epoch)]

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Set the count of the epoch to begin with. Raises ConfigError where the Trainer has one of its own."""
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} of the Trainer and a "
                f"GradientAccumulationScheduler exclude each other; leave one of the two out."
            )
        if not task.automatic_optimization and self.going_to_accumulate_grad_batches():
            raise ConfigError(
                "GradientAccumulationScheduler needs automatic optimization: the task steps its optimizers itself."
            )
        # before the data are made, which count the steps of an epoch by it
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Set the epoch's count."""
        # only between epochs: a position within one is counted in steps of one size
        trainer.current_run.set_accumulation(self.get_accumulate_grad_batches(trainer.current_epoch))

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Give the Trainer its own value back."""
        if stage == "fit":
            # else the setup of the next fit would take it for the Trainer's own count, and refuse it
            trainer.accumulate_grad_batches = 1

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the epoch decides."""
        return {}
