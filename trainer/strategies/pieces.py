"""Pieces of a batch: cut along its samples, and the outputs of their steps put together again."""

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
    """Return how many samples each device gets, as torch.chunk deals them out: 5 on 3 are 2, 2, 1; 4 on 3 are 2, 2."""
    size = max(1, -(-samples // devices))
    return [min(size, samples - first) for first in range(0, samples, size)]


def entries_of(item: Any) -> list[Any] | None:
    """Return the entries of a container; None for a leaf. A list of plain values, one for each sample, is a leaf."""
    if isinstance(item, dict):
        return list(item.values())
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item) if field.init]
    # one look decides: a list of texts has one for each sample, a list with tensors one entry for each kind of thing
    nested = (Tensor, np.ndarray, dict, list, tuple)
    if isinstance(item, (list, tuple)) and (hasattr(item, "_fields") or any(isinstance(one, nested) for one in item)):
        return list(item)
    return None


def like(item: Any, entries: list[Any]) -> Any:
    """Return a container of the kind of `item`, with other entries."""
    if isinstance(item, dict):
        changed = dict(zip(item, entries, strict=True))
        return changed if type(item) is dict else type(item)(changed)
    if is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in fields(item) if field.init]
        return replace(item, **dict(zip(names, entries, strict=True)))
    return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)


def split(batch: Any, sizes: Sequence[int], devices: Sequence[torch.device] | None = None) -> list[Any]:
    """Return a piece of `batch` for each of `sizes`, on the device at the same place; containers keep their type.

    Cut along the first dimension are tensors and arrays that have one entry a sample there, and lists of plain values
    with one entry a sample. Everything else is in every piece whole. Raises DataError where nothing can be cut.
    """
    samples, is_cut = sum(sizes), False

    def piece(item: Any, rows: slice, device: torch.device | None) -> Any:
        nonlocal is_cut
        entries = entries_of(item)
        if entries is not None:
            return like(item, [piece(entry, rows, device) for entry in entries])
        shape = (len(item),) if isinstance(item, (list, tuple)) else getattr(item, "shape", ())
        # what is as long as the batch belongs to its samples: a table of that length by chance would be cut, too
        if shape and shape[0] == samples:
            item, is_cut = item[rows], True
        return item if device is None else to_device(item, device)

    places: Sequence[torch.device | None] = devices or [None] * len(sizes)
    pieces = [
        piece(batch, slice(end - size, end), device)
        for end, size, device in zip(accumulate(sizes), sizes, places, strict=True)
    ]
    if not is_cut:
        raise DataError(
            f"A batch is split along the first dimension of its tensors here; this, of type {type(batch).__name__}, "
            f"has no tensor with {samples} entries there. Use a strategy that keeps batches whole: ddp, without "
            f"micro_batches."
        )
    return pieces


def combine(outputs: Sequence[Any], sizes: Sequence[Any], device: torch.device) -> Any:
    """Return what the undivided batch's step would have returned, on `device`, with its graph.

    Means over samples (floating point scalars) are averaged with the numbers of samples as weights, counts (integer
    scalars) are added, tensors and arrays are joined along their first dimension, lists of plain values end to end;
    containers of these are combined item by item. A piece whose step returned None counts as zero; None if all did.
    Anything else stays as it is where all pieces agree, and becomes a list of the pieces' values where not.

    Raises TaskError where the pieces' outputs are of different kinds.
    """
    present = [(output, size / sum(sizes)) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    return _combine(present, device)


def _combine(parts: list[tuple[Any, Any]], device: torch.device) -> Any:
    """Combine outputs, each with its share of the batch."""
    parts = [(output, share) for output, share in parts if output is not None]
    # not weighted anew: the loss of a piece that was left out counts as zero in the mean of the batch
    values = [output for output, _ in parts]
    if not values:
        return None
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _differ("kinds", [type(value).__name__ for value in values])
    if isinstance(first, dict) and any(value.keys() != first.keys() for value in values):
        raise _differ("keys", [list(value) for value in values])
    nested = [entries_of(value) for value in values]
    if any(entries is not None for entries in nested):
        columns = [entries or [] for entries in nested]
        if any(len(entries) != len(columns[0]) for entries in columns):
            raise _differ("lengths", [len(entries) for entries in columns])
        shares = [share for _, share in parts]
        rows = [list(zip(row, shares, strict=True)) for row in zip(*columns, strict=True)]
        return like(first, [_combine(row, device) for row in rows])
    if isinstance(first, Tensor):
        return _combine_tensors(parts, device)
    if isinstance(first, float):
        return sum(value * share for value, share in parts)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, (list, tuple)):
        return type(first)(entry for value in values for entry in value)
    return first if all(value is first or value == first for value in values) else values


def _combine_tensors(parts: list[tuple[Tensor, Any]], device: torch.device) -> Tensor:
    if parts[0][0].ndim:
        return torch.cat([part.to(device) for part, _ in parts])
    scalars = [part.to(device) * share if part.is_floating_point() else part.to(device) for part, share in parts]
    return sum(scalars[1:], scalars[0])


TINY = 1e-30
"""Number that changes no weight that it is added to."""


def combine_losses(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Return what the undivided batch's training_step would have returned; a loss is averaged by what pieces weigh."""
    combined, weights = combine(outputs, sizes, device), [weight_of(output) for output in outputs]
    if all(weight is None for weight in weights):
        return combined
    if any(weight is None and output is not None for weight, output in zip(weights, outputs, strict=True)):
        raise _differ("weight", weights)
    shares = [0.0 if weight is None else to_device(weight, device) for weight in weights]
    combined["weight"] = sum(shares)
    # more than zero, where no piece weighs anything
    losses = [None if output is None else output["loss"] for output in outputs]
    combined["loss"] = combine(losses, [share + TINY for share in shares], device)
    return combined


def _differ(what: str, came: list[Any]) -> TaskError:
    return TaskError(
        f"The step ran on {len(came)} pieces of one batch, and what it returned differs in its {what}: {came}. Return "
        f"the same for every batch, or use a strategy that keeps batches whole: ddp, without micro_batches."
    )
