"""Classes of the rooms above, for the signatures that users read: type checkers see them, and nothing is imported."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..callbacks.callback import Callback as Callback
    from ..loggers.logger import Logger as Logger
    from ..tasks.data_module import DataModule as DataModule
    from ..tasks.task import Task as Task
    from ..trainer.resume.checkpoint_format import CheckpointFormat as CheckpointFormat
    from ..trainer.trainer import Trainer as Trainer
