"""Loggers: `logger.py` defines the base class, which modules such as `tensorboard.py` implement."""

from typing import TYPE_CHECKING

from ..base.late_imports import importer

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

if not TYPE_CHECKING:  # a module-level __getattr__ makes type checkers accept any name
    __getattr__ = importer(__name__, _HOMES)
