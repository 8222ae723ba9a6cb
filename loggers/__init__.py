"""Loggers: where metrics are written. `logger.py` is the interface, each other module one implementation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .csv_file import CSVLogger as CSVLogger
    from .json_lines import JSONLinesLogger as JSONLinesLogger
    from .logger import Logger as Logger
    from .logger import NoExperiment as NoExperiment
    from .mlflow import MLFlowLogger as MLFlowLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger
    from .wandb import WandbLogger as WandbLogger

_HOMES = {
    "CSVLogger": ".csv_file",
    "JSONLinesLogger": ".json_lines",
    "Logger": ".logger",
    "MLFlowLogger": ".mlflow",
    "NoExperiment": ".logger",
    "TensorBoardLogger": ".tensorboard",
    "WandbLogger": ".wandb",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # else any name would do for a type checker

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
