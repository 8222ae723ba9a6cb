"""Loggers: where metrics are written. `logger.py` is the interface, each other module one implementation."""

from importlib import import_module
from typing import Any

_HOMES = {
    "CSVLogger": ".csv_file",
    "JSONLinesLogger": ".json_lines",
    "Logger": ".logger",
    "MLFlowLogger": ".mlflow",
    "NoExperiment": ".logger",
    "TensorBoardLogger": ".tensorboard",
    "WandbLogger": ".wandb",
}
__all__ = [
    "CSVLogger",
    "JSONLinesLogger",
    "Logger",
    "MLFlowLogger",
    "NoExperiment",
    "TensorBoardLogger",
    "WandbLogger",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
