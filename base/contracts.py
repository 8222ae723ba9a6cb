"""Classes of the rooms above, for the signatures that users read: type checkers see them, and nothing is imported."""

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
    """Part of a run with a state that a checkpoint holds; torch.distributed.checkpoint has the same protocol."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain containers, numbers, text and tensors. Every rank calls it."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Restore what `state_dict` returned."""
        ...
