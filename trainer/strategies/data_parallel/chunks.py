"""Splitting a batch over devices, and joining the outputs of the devices' steps."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import parallel

from ....base.errors import DataError, TaskError
from ...data.transfer import to_device
from ...optimization.batch_weights import weight_of


def chunk_sizes(samples: int, devices: int) -> list[int]:
    """Return how many samples each device gets, as torch.chunk deals them out: 5 on 3 are 2, 2, 1; 4 on 3 are 2, 2."""
    size = max(1, -(-samples // devices))
    return [min(size, samples - first) for first in range(0, samples, size)]


Devices = Sequence[torch.device] | None
"""Target device of each part of a batch; None: they stay where they are."""


def split(batch: Any, sizes: Sequence[int], devices: Devices = None) -> list[Any]:
    """Return a part of `batch` for each of `sizes`, on the device at the same place; containers keep their type.

    Split along the first dimension are tensors and arrays that have one entry a sample there, and lists of plain values
    with one entry a sample. Everything else goes to every device whole.

    Raises DataError where nothing in the batch can be split.
    """
    parts, found = _split(batch, list(sizes), devices)
    if not found:
        raise DataError(
            f"A batch is split along the first dimension of its tensors here; this, of type {type(batch).__name__}, "
            f"has no tensor with {sum(sizes)} entries there. Use a strategy that keeps batches whole: ddp, or several "
            f"replicas under data_parallel, or no micro_batches."
        )
    return parts


def _split(item: Any, sizes: list[int], devices: Devices) -> tuple[list[Any], bool]:
    """Return the parts of `item`, and whether anything in it was split."""
    samples = sum(sizes)
    if isinstance(item, Tensor):
        if item.ndim == 0 or item.shape[0] != samples:
            return _whole(item, sizes, devices), False
        # torch's scatter is for accelerators ("Expected a non cpu device")
        if devices is None or devices[0].type == "cpu":
            return list(torch.split(item, sizes)), True
        return list(parallel.scatter(item, list(devices))), True
    if isinstance(item, (list, tuple)) and item and not hasattr(item, "_fields"):
        if isinstance(item[0], (str, bytes, int, float)):
            return (_slice(item, sizes), True) if len(item) == samples else ([item] * len(sizes), False)
        columns, found = _split_each(item, sizes, devices)
        return [type(item)(row) for row in zip(*columns, strict=True)], found
    if isinstance(item, tuple) and item:
        columns, found = _split_each(item, sizes, devices)
        return [type(item)(*row) for row in zip(*columns, strict=True)], found
    if isinstance(item, dict) and item:
        columns, found = _split_each(item.values(), sizes, devices)
        rows = [dict(zip(item, row, strict=True)) for row in zip(*columns, strict=True)]
        return [row if type(item) is dict else type(item)(row) for row in rows], found
    if is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in fields(item) if field.init]
        columns, found = _split_each([getattr(item, name) for name in names], sizes, devices)
        return [replace(item, **dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)], found
    if getattr(item, "shape", None) and item.shape[0] == samples:
        return _slice(item, sizes), True
    return _whole(item, sizes, devices), False


def _whole(item: Any, sizes: list[int], devices: Devices) -> list[Any]:
    return [item] * len(sizes) if devices is None else [to_device(item, device) for device in devices]


def _split_each(items: Any, sizes: list[int], devices: Devices) -> tuple[list[list[Any]], bool]:
    found = [_split(item, sizes, devices) for item in items]
    return [parts for parts, _ in found], any(was_split for _, was_split in found)


def _slice(item: Any, sizes: list[int]) -> list[Any]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [item[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def combine(outputs: Sequence[Any], sizes: Sequence[Any], device: torch.device) -> Any:
    """Return what the undivided batch's step would have returned, on `device`, with its graph.

    Means over samples (floating point scalars) are averaged with the numbers of samples as weights, counts (integer
    scalars) are added, tensors and arrays are joined along their first dimension, lists of plain values end to end;
    containers of these are combined item by item. A chunk whose step returned None counts as zero; None if all did.
    Anything else stays as it is where all chunks agree, and becomes a list of the chunks' values where not.

    Raises TaskError where the chunks' outputs are of different kinds.
    """
    present = [(output, size / sum(sizes)) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    if not present:
        return None
    parts, weights = [output for output, _ in present], [weight for _, weight in present]
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _differ("kinds", [type(part).__name__ for part in parts])
    if isinstance(first, Tensor):
        return _combine_tensors(parts, weights, device)
    if isinstance(first, float):
        return sum(part * weight for part, weight in present)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise _differ("keys", [list(part) for part in parts])
        whole = {key: combine(_pick(outputs, key), sizes, device) for key in first}
        return whole if type(first) is dict else type(first)(whole)
    if isinstance(first, (list, tuple)):
        return _combine_sequences(outputs, parts, sizes, device)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        rows = [None if o is None else {name: getattr(o, name) for name in names} for o in outputs]
        return replace(first, **combine(rows, sizes, device))
    return first if all(part is first or part == first for part in parts) else parts


TINY = 1e-30
"""Number that changes no weight that it is added to."""


def combine_losses(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Return what the undivided batch's training_step would have returned; a loss is averaged by what chunks weigh."""
    whole, weights = combine(outputs, sizes, device), [weight_of(output) for output in outputs]
    if all(weight is None for weight in weights):
        return whole
    if any(weight is None and output is not None for weight, output in zip(weights, outputs, strict=True)):
        raise _differ("weight", weights)
    shares = [0.0 if weight is None else to_device(weight, device) for weight in weights]
    whole["weight"] = sum(shares)
    # more than zero, where no chunk weighs anything
    whole["loss"] = combine(_pick(outputs, "loss"), [share + TINY for share in shares], device)
    return whole


def _combine_sequences(outputs: Sequence[Any], parts: list[Any], sizes: Sequence[Any], device: torch.device) -> Any:
    first = parts[0]
    if not any(isinstance(entry, (Tensor, np.ndarray, dict, list, tuple)) for part in parts for entry in part):
        return type(first)(entry for part in parts for entry in part)
    if any(len(part) != len(first) for part in parts):
        raise _differ("lengths", [len(part) for part in parts])
    whole = [combine(_pick(outputs, index), sizes, device) for index in range(len(first))]
    return type(first)(*whole) if hasattr(first, "_fields") else type(first)(whole)


def _pick(outputs: Sequence[Any], key: Any) -> list[Any]:
    return [None if output is None else output[key] for output in outputs]


def _differ(what: str, came: list[Any]) -> TaskError:
    return TaskError(
        f"The step ran on {len(came)} chunks of one batch, and what it returned differs in its {what}: {came}. Return "
        f"the same for every batch, or use a strategy that keeps batches whole: ddp, without micro_batches."
    )


def _combine_tensors(parts: list[Tensor], weights: list[float], device: torch.device) -> Tensor:
    if parts[0].ndim == 0:
        whole: Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            scalar = part.to(device)
            if scalar.is_floating_point():
                scalar = scalar * weight
            whole = scalar if whole is None else whole + scalar
        assert whole is not None
        return whole
    if all(part.device.type != "cpu" for part in parts) and len({part.device for part in parts}) > 1:
        gathered: Tensor = parallel.gather(parts, device)
        return gathered
    return torch.cat([part.to(device) for part in parts])
