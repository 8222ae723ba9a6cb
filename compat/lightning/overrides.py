"""Checks whether a program overrides methods of Lightning's classes."""

import inspect

from ...tasks.data_module import DataModule
from ...tasks.task import Task
from .callbacks.callback import Callback
from .module import LightningDataModule, LightningModule


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Return whether an object overrides a method of `parent`. By default, `parent` is its Lightning base class.

    Raises ValueError if `parent` is None and the object is not an instance of a Lightning class.
    """
    if instance is None:
        return False
    parents = (LightningModule, Task, LightningDataModule, DataModule, Callback)
    parent = parent or next((kind for kind in parents if isinstance(instance, kind)), None)
    if parent is None:
        raise ValueError("Expected a parent")
    method, inherited = getattr(instance, method_name, None), getattr(parent, method_name, None)
    if method is None:
        return False
    if inherited is None:
        raise ValueError(f"The parent {parent.__name__} should define the method {method_name}")
    return getattr(inspect.unwrap(method), "__func__", method) is not inherited and getattr(
        method, "__code__", 0
    ) != getattr(inherited, "__code__", None)
