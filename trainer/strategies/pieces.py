"""Splits a batch by samples, and combines the outputs of a step that ran on the pieces."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import DataError, TaskError
from ..data.transfer import to_device
from ..optimization.batch_weights import weight_of


def chunk_sizes(samples: int, devices: int) -> list[int]:
    """Return the number of samples for each device, as in torch.chunk: 2, 2 and 1 for five samples on three devices."""
    size = max(1, -(-samples // devices))
    return [min(size, samples - first) for first in range(0, samples, size)]


def entries_of(item: Any) -> list[Any] | None:
    """Return the entries of a container, or None for a leaf. A list of plain values, such as strings, is a leaf."""
    if isinstance(item, dict):
        return list(item.values())
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item) if field.init]
    # a list of strings has one entry per sample; a list with tensors has one entry per field
    nested = (Tensor, np.ndarray, dict, list, tuple)
    if isinstance(item, (list, tuple)) and (hasattr(item, "_fields") or any(isinstance(x, nested) for x in item)):
        return list(item)
    return None


def like(item: Any, entries: list[Any]) -> Any:
    """Return a container of the same type as `item` that contains `entries`."""
    if isinstance(item, dict):
        changed = dict(zip(item, entries, strict=True))
        return changed if type(item) is dict else type(item)(changed)
    if is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in fields(item) if field.init]
        return replace(item, **dict(zip(names, entries, strict=True)))
    return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)


def split(batch: Any, sizes: Sequence[int], devices: Sequence[torch.device] | None = None) -> list[Any]:
    """Split `batch` into pieces with the given `sizes`, each on the corresponding device. Containers keep their types.

    A tensor or array is split along its first dimension if that dimension equals the number of samples. A list of plain
    values is split the same way. All other values are copied to every piece. Raises DataError if no value can be
    split.
    """
    samples, is_split = sum(sizes), False

    def piece(item: Any, rows: slice, device: torch.device | None) -> Any:
        nonlocal is_split
        entries = entries_of(item)
        if entries is not None:
            return like(item, [piece(entry, rows, device) for entry in entries])
        shape = (len(item),) if isinstance(item, (list, tuple)) else getattr(item, "shape", ())
        # only the length decides, so a table that happens to be as long as the batch is split, too
        if shape and shape[0] == samples:
            item, is_split = item[rows], True
        return item if device is None else to_device(item, device)

    places: Sequence[torch.device | None] = devices or [None] * len(sizes)
    pieces = [
        piece(batch, slice(end - size, end), device)
        for end, size, device in zip(accumulate(sizes), sizes, places, strict=True)
    ]
    if not is_split:
        raise DataError(
            f"This strategy splits a batch along the first dimension of its tensors, but a batch of type "
            f"{type(batch).__name__} has no tensor with {samples} entries along this dimension. Use strategy=ddp, "
            f"which does not split batches, and leave micro_batches out."
        )
    return pieces


def combine(outputs: Sequence[Any], sizes: Sequence[Any], device: torch.device) -> Any:
    """Return the output that the step would return for the whole batch, on `device`, with its autograd graph.

    Floating-point scalars are treated as means over samples and averaged, weighted by the number of samples. Integer
    scalars are treated as counts and added. Tensors and arrays are concatenated along their first dimension, lists of
    plain values are joined, and containers are combined item by item. An output of None is treated as zero, but if all
    outputs are None, the result is None. Any other value is returned if it is equal in all outputs; otherwise, the
    values are collected in a list.

    Raises TaskError if the outputs have different types.
    """
    present = [(output, size / sum(sizes)) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    return _combine(present, device)


def _combine(weighted: list[tuple[Any, Any]], device: torch.device) -> Any:
    """Combine outputs, each weighted by its share of the batch."""
    weighted = [(output, share) for output, share in weighted if output is not None]
    # the shares don't change: the loss of a skipped piece counts as zero in the batch's mean
    values = [output for output, _ in weighted]
    if not values:
        return None
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _differ("types", [type(value).__name__ for value in values])
    if isinstance(first, dict) and any(value.keys() != first.keys() for value in values):
        raise _differ("keys", [list(value) for value in values])
    nested = [entries_of(value) for value in values]
    if any(entries is not None for entries in nested):
        columns = [entries or [] for entries in nested]
        if any(len(entries) != len(columns[0]) for entries in columns):
            raise _differ("lengths", [len(entries) for entries in columns])
        shares = [share for _, share in weighted]
        rows = [list(zip(row, shares, strict=True)) for row in zip(*columns, strict=True)]
        return like(first, [_combine(row, device) for row in rows])
    if isinstance(first, Tensor):
        return _combine_tensors(weighted, device)
    if isinstance(first, float):
        return sum(value * share for value, share in weighted)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, (list, tuple)):
        return type(first)(entry for value in values for entry in value)
    return first if all(value is first or value == first for value in values) else values


def _combine_tensors(weighted: list[tuple[Tensor, Any]], device: torch.device) -> Tensor:
    if weighted[0][0].ndim:
        return torch.cat([tensor.to(device) for tensor, _ in weighted])
    scalars = [value.to(device) * share if value.is_floating_point() else value.to(device) for value, share in weighted]
    return sum(scalars[1:], scalars[0])


TINY = 1e-30
"""A number too small to change a weight when added to it."""


def combine_losses(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Return the output that training_step would return for the whole batch, with the weighted mean of the losses."""
    combined, weights = combine(outputs, sizes, device), [weight_of(output) for output in outputs]
    if all(weight is None for weight in weights):
        return combined
    if any(weight is None and output is not None for weight, output in zip(weights, outputs, strict=True)):
        raise _differ("weight", weights)
    shares = [0.0 if weight is None else to_device(weight, device) for weight in weights]
    combined["weight"] = sum(shares)
    # shares must not all be zero, even if all weights are zero
    losses = [None if output is None else output["loss"] for output in outputs]
    combined["loss"] = combine(losses, [share + TINY for share in shares], device)
    return combined


def _differ(aspect: str, values: list[Any]) -> TaskError:
    return TaskError(
        f"The step ran on {len(values)} pieces of a batch and returned outputs with different {aspect}: {values}. "
        f"Return the same structure for every piece, or use strategy=ddp without micro_batches."
    )
