"""Tensors within collections: the one place that knows how to walk through a batch."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch


def map_tensors(
    batch: Any,
    change: Callable[[torch.Tensor], Any],
    move: Callable[[Any], Any] | None = None,
    number: Callable[[Any], Any] | None = None,
) -> Any:
    """Return `batch` with `change` applied to each tensor; tuples, named tuples, lists, dicts and dataclasses keep
    their type.

    move: applied to other objects that have a `.to` method.
    number: applied to numbers and NumPy arrays.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if number is not None and isinstance(batch, (int, float, np.ndarray, np.number)):
        return number(batch)
    if isinstance(batch, (str, bytes, int, float, bool)) or batch is None:
        return batch
    if move is not None and callable(getattr(batch, "to", None)):
        return move(batch)
    # before tuples: a named tuple takes its items one by one
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, change, move, number) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(item, change, move, number) for item in batch)
    if isinstance(batch, dict):
        # a subclass, such as transformers' BatchEncoding, is made anew by its own type
        changed = {key: map_tensors(item, change, move, number) for key, item in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)
    if is_dataclass(batch) and not isinstance(batch, type):  # is_dataclass is true of the class itself, too
        # replace() refuses fields that __init__ does not take
        initialized = (field for field in fields(batch) if field.init)
        values = {field.name: map_tensors(getattr(batch, field.name), change, move, number) for field in initialized}
        return replace(batch, **values)
    return batch
