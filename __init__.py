"""Legato: a trainer for PyTorch. A run gives the same result on any hardware and after any interruption.

This module contains only the public names. Each one is imported on first use, so `legato --help` and errors about a
config don't have to wait for torch to load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import callbacks as callbacks
    from . import lab as lab
    from . import loggers as loggers
    from . import tasks as tasks
    from .base.place import rank_zero_only as rank_zero_only
    from .base.version import __version__ as __version__
    from .callbacks.callback import Callback as Callback
    from .lab import testing as testing
    from .tasks.data_module import DataModule as DataModule
    from .tasks.task import Task as Task
    from .trainer import runs as runs
    from .trainer import strategies as strategies
    from .trainer.data.combined import CombinedLoader as CombinedLoader
    from .trainer.data.randomness import seed_everything as seed_everything
    from .trainer.resume.checkpoint_format import CheckpointFormat as CheckpointFormat
    from .trainer.trainer import Trainer as Trainer


__all__ = [
    "Callback",
    "CheckpointFormat",
    "CombinedLoader",
    "DataModule",
    "Task",
    "Trainer",
    "callbacks",
    "lab",
    "loggers",
    "rank_zero_only",
    "runs",
    "seed_everything",
    "strategies",
    "tasks",
    "testing",
]

_HOMES = {
    "__version__": ".base.version",
    "Callback": ".callbacks.callback",
    "CheckpointFormat": ".trainer.resume.checkpoint_format",
    "CombinedLoader": ".trainer.data.combined",
    "DataModule": ".tasks.data_module",
    "Task": ".tasks.task",
    "Trainer": ".trainer.trainer",
    "rank_zero_only": ".base.place",
    "seed_everything": ".trainer.data.randomness",
}
_ROOMS = {
    "callbacks": ".callbacks",
    "lab": ".lab",
    "loggers": ".loggers",
    "runs": ".trainer.runs",
    "strategies": ".trainer.strategies",
    "tasks": ".tasks",
    "testing": ".lab.testing",
}

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        if name in _ROOMS:
            return import_module(_ROOMS[name], __name__)
        meant = {
            "LightningModule": "Task",
            "LightningDataModule": "DataModule",
            "read_metrics": "runs.open(run).metrics",
            "replay": "lab.replay",
        }
        instead = f"; its name here is {__name__}.{meant[name]}" if name in meant else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return sorted(__all__)
