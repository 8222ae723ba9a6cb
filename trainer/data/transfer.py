"""Moving batches to a device, mapping over their tensors and counting their samples."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ...base.errors import DataError
from ...base.tensors import map_tensors
from ..accelerators import has_streams

# Bytes to which torch's CPU allocator aligns a tensor
ALIGNMENT = 64


class CopyStream:
    """Copies batches to a device on a stream of its own, so that the next one arrives while this one is computed.

    No batch is read ahead of its step for that: the host has queued the work of a batch long before the device has done
    it, and on another stream the copy of the next one is not behind that work. At most one further batch fills the
    device: before a copy the host waits until the batch before the newest one is done, with the newest one queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)
        # Event at the end of the work that was queued when the newest batch was moved
        self.queued: Any = None

    def begin_batch(self) -> None:
        """Wait until there is room for another batch."""
        before, self.queued = self.queued, torch.accelerator.current_stream(self.device).record_event()
        if before is not None:
            before.synchronize()

    def copy(self, batch: Any) -> Any:
        """Return `batch` with plain tensors of the host's memory on the device; all else stays where it is.

        Work that is queued after this call waits for the copy; the memory is not used again before that work is done.
        """
        computing = torch.accelerator.current_stream(self.device)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
            if tensor.device.type != "cpu" or not plain:
                return tensor
            there = tensor.to(self.device, non_blocking=True)
            there.record_stream(computing)
            return there

        with self.stream:
            batch = map_tensors(batch, copied)
        computing.wait_stream(self.stream)
        return batch


def to_device(batch: Any, device: torch.device, copies: CopyStream | None = None) -> Any:
    """Return `batch` with every tensor on `device`; tuples, lists, mappings and dataclasses keep their type.

    Copies from pinned memory do not block the host. Objects with a `.to(device)` method are moved by it.
    copies: copies what it can on its own stream.
    """
    non_blocking = has_streams(device)
    if copies is not None and device == copies.device:
        batch = copies.copy(batch)
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), lambda other: other.to(device)
    )


def to_host(value: Any) -> Any:
    """Return `value` with every tensor in host memory: what was on a device no longer fills it, and can be sent."""
    return map_tensors(value, lambda tensor: tensor.cpu(), lambda other: other.to(torch.device("cpu")))


def with_allocated_memory(batch: Any) -> Any:
    """Return `batch` with every tensor aligned as torch allocates it; some CPU kernels add up unaligned data in another
    order."""
    return map_tensors(batch, lambda t: t if t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 else t.clone())


def align_in_place(tensors: Iterable[torch.Tensor]) -> None:
    """Reallocate tensors that are not aligned as torch allocates them, such as weights in a memory-mapped file."""
    for tensor in tensors:
        # through .data, so that the parameter stays the same object for optimizers and hooks
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor or array in `batch` along its first dimension.

    Without one that of the first list of numbers or texts, or 1.
    """
    lengths = _lengths(batch)
    return lengths[0] if lengths else _length_of_list(batch) or 1


def require_samples(batch: Any) -> int:
    """Return the length that the tensors and arrays in `batch` have along their first dimension.

    Raises DataError where they have several. A tensor without dimensions has none; without any, see `count_samples`.
    """
    lengths = set(_lengths(batch))
    if len(lengths) > 1:
        raise DataError(
            f"The tensors of a batch differ in their first dimension ({', '.join(map(str, sorted(lengths)))}), which "
            f"is to say how many samples it has, by which it is weighted. Give the task a method count_samples(batch) "
            f"that returns that number."
        )
    return lengths.pop() if lengths else count_samples(batch)


def _lengths(batch: Any) -> list[int]:
    """Return the lengths of all tensors and arrays, in order."""
    lengths, items = list[int](), [batch]
    while items:  # a loop and no generator, since it runs in every step of a stream
        item = items.pop()
        if isinstance(item, torch.Tensor):  # asked first: the other questions take three times as long
            if item.ndim:
                lengths.append(item.shape[0])
        elif isinstance(item, (list, tuple)):
            items.extend(reversed(item))
        elif shape := getattr(item, "shape", None):
            lengths.append(int(shape[0]))
        else:
            items.extend(reversed(_values_of(item)))
    return lengths


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
