"""Classes from higher layers, for use in public signatures. Only type checkers import them."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..callbacks.callback import Callback as Callback
    from ..loggers.logger import Logger as Logger
    from ..tasks.data_module import DataModule as DataModule
    from ..tasks.task import Task as Task
    from ..trainer.resume.checkpoint_format import CheckpointFormat as CheckpointFormat
    from ..trainer.strategies.strategy import Strategy as Strategy
    from ..trainer.trainer import Trainer as Trainer


class Stateful(Protocol):
    """An object whose state is stored in checkpoints, as in torch.distributed.checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers, numbers, strings and tensors. Called on every rank."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Restore a state returned by `state_dict`."""
        ...
