"""The base classes Task and DataModule, and example tasks, one per file."""

from typing import TYPE_CHECKING

from ..base.late_imports import importer

if TYPE_CHECKING:
    from .data_module import DataModule as DataModule
    from .digits import Digits as Digits
    from .digits import DigitsData as DigitsData
    from .task import Task as Task

_HOMES = {
    "DataModule": ".data_module",
    "Digits": ".digits",
    "DigitsData": ".digits",
    "Task": ".task",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # a module-level __getattr__ makes type checkers accept any name
    __getattr__ = importer(__name__, _HOMES)
