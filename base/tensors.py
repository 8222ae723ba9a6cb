"""Tensors within collections: the one place that knows how to walk through a batch, and how many samples it has."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from .errors import DataError

BATCH_NORM: Any = torch.nn.SyncBatchNorm.__base__
"""The class from which all batch norms derive."""


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


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a subclass of Tensor is made of (a shard, quantized weights), or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for each in inner if isinstance(each, torch.Tensor) for part in plain_tensors(each)]


def require_samples(batch: Any, items: int | None = None) -> int:
    """Return the number of samples in a batch: the length that its parts have along their first dimension.

    items: how many items the loader has collated; it decides where parts differ.

    Raises DataError where they differ. A tensor without dimensions has no length; in a batch without any length,
    the first list of numbers or texts counts.
    """
    lengths = set(_lengths(batch, items))
    if items is not None and (items in lengths or (items > 1 and len(lengths) > 1)):
        return items
    if len(lengths) > 1:
        raise DataError(
            f"The tensors of a batch differ in their first dimension ({', '.join(map(str, sorted(lengths)))}), which "
            f"is to say how many samples it has, by which it is weighted. Give the task a method count_samples(batch) "
            f"that returns that number."
        )
    return lengths.pop() if lengths else _length_of_list(batch) or items or 1


def _lengths(batch: Any, collated: int | None = None) -> list[int]:
    """Return the lengths of all parts that have one, in order."""
    lengths, items = list[int](), [batch]
    while items:  # a loop and no generator, since it runs in every step of a stream
        item = items.pop()
        if isinstance(item, torch.Tensor):  # asked first: the other questions take three times as long
            if item.ndim:
                lengths.append(item.size(0))  # not its shape, which a nested tensor has not
        elif isinstance(item, PackedSequence):
            lengths.append(int(item.batch_sizes[0]))
        elif isinstance(item, (list, tuple)):
            if item and isinstance(item[0], torch.Tensor) and item[0].ndim == 3 and _are_images(item, collated):
                lengths.append(len(item))
            items.extend(reversed(item))
        # graphs (PyG, DGL) say it; the shape of a TensorDict is its batch size
        elif isinstance(size := getattr(item, "num_graphs", getattr(item, "batch_size", None)), int):
            lengths.append(size)
        elif shape := getattr(item, "shape", None):
            lengths.append(int(shape[0]))
        else:
            items.extend(reversed(_values_of(item)))
            positions = item.get("position_ids") if isinstance(item, Mapping) else None
            # several texts in one row, of which each begins at position 0
            if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.size(0) == 1:
                lengths.append(max(1, int((positions == 0).sum())))
    return lengths


def _are_images(items: Any, collated: int | None) -> bool:
    """Return whether a list may be of images [channels, height, width], one a sample, rather than of fields."""
    if not all(isinstance(item, torch.Tensor) and item.ndim == 3 and item.size(0) <= 4 for item in items):
        return False
    return len(items) == collated or len({item.shape[1:] for item in items}) > 1


def _values_of(item: Any) -> list[Any]:
    """Return what a mapping or dataclass holds."""
    if isinstance(item, Mapping):
        return list(item.values())
    is_instance = is_dataclass(item) and not isinstance(item, type)
    return [getattr(item, field.name) for field in fields(item)] if is_instance else []


def _length_of_list(batch: Any) -> int | None:
    """Return the length of the first list of numbers or texts."""
    items = batch if isinstance(batch, (list, tuple)) else _values_of(batch)
    if items and items is batch and isinstance(batch[0], (str, bytes, int, float)):
        return len(batch)
    return next((length for item in items if (length := _length_of_list(item)) is not None), None)


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, detached and sharing its memory; a plain tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():  # where torch returns the shard itself, and not a view with a gradient of its own
        part: torch.Tensor = tensor.to_local()
    return part
