"""The base classes Task and DataModule, and ready tasks, one per file."""

from importlib import import_module
from typing import Any

_HOMES = {
    "CharacterGPT": ".characters",
    "DataModule": ".data_module",
    "Digits": ".digits",
    "DigitsData": ".digits",
    "PydocText": ".characters",
    "Task": ".task",
}
__all__ = ["CharacterGPT", "DataModule", "Digits", "DigitsData", "PydocText", "Task"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
