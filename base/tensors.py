"""Traversal of the tensors in nested collections, and the number of samples in a batch."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from .errors import DataError

BATCH_NORM: Any = torch.nn.SyncBatchNorm.__base__
"""Base class of all batch norms."""


def map_tensors(
    batch: Any,
    change: Callable[[torch.Tensor], Any],
    move: Callable[[Any], Any] | None = None,
    number: Callable[[Any], Any] | None = None,
) -> Any:
    """Apply `change` to each tensor in nested tuples, lists, dicts and dataclasses, and return the same structure.

    Args:
        move: Function to apply to other objects that have a `to` method.
        number: Function to apply to numbers and NumPy arrays.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if number is not None and isinstance(batch, (int, float, np.ndarray, np.number)):
        return number(batch)
    if isinstance(batch, (str, bytes, int, float, bool)) or batch is None:
        return batch
    if move is not None and callable(getattr(batch, "to", None)):
        return move(batch)
    # before tuples: a named tuple takes its items as separate arguments
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, change, move, number) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(item, change, move, number) for item in batch)
    if isinstance(batch, dict):
        # rebuild subclasses, such as BatchEncoding in Hugging Face Transformers, with their own type
        changed = {key: map_tensors(item, change, move, number) for key, item in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)
    if is_dataclass(batch) and not isinstance(batch, type):  # is_dataclass also accepts the class
        # replace() rejects fields that are not arguments of __init__
        initialized = (field for field in fields(batch) if field.init)
        values = {field.name: map_tensors(getattr(batch, field.name), change, move, number) for field in initialized}
        return replace(batch, **values)
    return batch


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the inner tensors of a Tensor subclass (shards, quantized weights), or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for value in inner if isinstance(value, torch.Tensor) for plain in plain_tensors(value)]


def require_samples(batch: Any, items: int | None = None) -> int:
    """Return the number of samples in a batch, which is the size of its tensors along their first dimension.

    Scalar tensors are ignored. If there are no tensors, return the length of the first list of numbers or strings.

    Args:
        items: Number of items that the loader collated, used if the tensors' sizes differ.

    Raises DataError if the sizes differ and `items` does not resolve the difference.
    """
    lengths = set(_lengths(batch, items))
    if items is not None and (items in lengths or (items > 1 and len(lengths) > 1)):
        return items
    if len(lengths) > 1:
        raise DataError(
            f"Cannot determine the number of samples in a batch: the sizes of its tensors along the first dimension "
            f"differ ({', '.join(map(str, sorted(lengths)))}). Define count_samples(self, batch) in the task to return "
            f"the number of samples."
        )
    return lengths.pop() if lengths else _length_of_list(batch) or items or 1


def _lengths(batch: Any, collated: int | None = None) -> list[int]:
    """Return the lengths of the items in a batch, in order. Items that have no length are left out."""
    lengths, items = list[int](), [batch]
    while items:  # a loop, not a generator, because it runs in every step of a stream
        item = items.pop()
        if isinstance(item, torch.Tensor):  # first, because the other checks take three times as long
            if item.ndim:
                lengths.append(item.size(0))  # not from `shape`, which nested tensors do not have
        elif isinstance(item, PackedSequence):
            lengths.append(int(item.batch_sizes[0]))
        elif isinstance(item, (list, tuple)):
            if item and isinstance(item[0], torch.Tensor) and item[0].ndim == 3 and _are_images(item, collated):
                lengths.append(len(item))
            items.extend(reversed(item))
        # graphs (PyG, DGL) have `num_graphs`; the shape of a TensorDict is its batch size
        elif isinstance(size := getattr(item, "num_graphs", getattr(item, "batch_size", None)), int):
            lengths.append(size)
        elif shape := getattr(item, "shape", None):
            lengths.append(int(shape[0]))
        else:
            items.extend(reversed(_values_of(item)))
            positions = item.get("position_ids") if isinstance(item, Mapping) else None
            # several packed sequences share a row, and each starts at position 0
            if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.size(0) == 1:
                lengths.append(max(1, int((positions == 0).sum())))
    return lengths


def _are_images(items: Any, collated: int | None) -> bool:
    """Return whether the tensors in a list may be images (channels, height, width) rather than fields of a batch."""
    if not all(isinstance(item, torch.Tensor) and item.ndim == 3 and item.size(0) <= 4 for item in items):
        return False
    return len(items) == collated or len({item.shape[1:] for item in items}) > 1


def _values_of(item: Any) -> list[Any]:
    """Return the values of a mapping or dataclass."""
    if isinstance(item, Mapping):
        return list(item.values())
    is_instance = is_dataclass(item) and not isinstance(item, type)
    return [getattr(item, field.name) for field in fields(item)] if is_instance else []


def _length_of_list(batch: Any) -> int | None:
    """Return the length of the first list of numbers or strings."""
    items = batch if isinstance(batch, (list, tuple)) else _values_of(batch)
    if items and items is batch and isinstance(batch[0], (str, bytes, int, float)):
        return len(batch)
    return next((length for item in items if (length := _length_of_list(item)) is not None), None)


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, detached but sharing memory. Return a plain tensor unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():  # torch then returns the shard itself instead of a view in the autograd graph
        shard: torch.Tensor = tensor.to_local()
    return shard
