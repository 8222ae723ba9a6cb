"""Batches on their way to a device and back."""

from collections.abc import Iterable
from typing import Any

import torch

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
