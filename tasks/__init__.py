"""The base classes Task and DataModule, and ready tasks, one per file."""

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

if not TYPE_CHECKING:  # else any name would do for a type checker
    __getattr__ = importer(__name__, _HOMES)
