"""Transfers batches to a device and back."""

from collections.abc import Iterable
from typing import Any

import torch

from ...base.tensors import map_tensors
from ..accelerators import has_streams

# Alignment of torch's CPU allocator in bytes
ALIGNMENT = 64


class CopyStream:
    """Separate stream that copies the next batch to a device while the current batch is being processed.

    No batch is read ahead of its step. The host queues a batch's kernels long before the device runs them, and a copy
    on another stream does not wait for these kernels. At most one extra batch occupies device memory: before each copy,
    the host waits until the device has finished all batches except the latest one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)
        # Event recorded after the work that was already queued when the latest batch was copied
        self.queued: Any = None

    def begin_batch(self) -> None:
        """Wait until device memory has room for another batch."""
        before, self.queued = self.queued, torch.accelerator.current_stream(self.device).record_event()
        if before is not None:
            before.synchronize()

    def copy(self, batch: Any) -> Any:
        """Return `batch` with its plain host tensors copied to the device. Everything else is left unchanged.

        Work queued after this call waits for the copy. The copy's memory is reused only after that work is done.
        """
        computing = torch.accelerator.current_stream(self.device)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
            if tensor.device.type != "cpu" or not plain:
                return tensor
            on_device = tensor.to(self.device, non_blocking=True)
            on_device.record_stream(computing)
            return on_device

        with self.stream:
            batch = map_tensors(batch, copied)
        computing.wait_stream(self.stream)
        return batch


def to_device(batch: Any, device: torch.device, copies: CopyStream | None = None) -> Any:
    """Return `batch` with every tensor on `device`. Tuples, lists, mappings and dataclasses keep their types.

    Copies from pinned memory do not block the host. Other objects are moved with their `.to(device)` method if they
    have one.

    Args:
        copies: copier for plain tensors, which uses a separate stream.
    """
    non_blocking = has_streams(device)
    if copies is not None and device == copies.device:
        batch = copies.copy(batch)
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), lambda value: value.to(device)
    )


def to_host(value: Any) -> Any:
    """Return `value` with all tensors in host memory, so that it can be sent to other processes."""
    return map_tensors(value, lambda tensor: tensor.cpu(), lambda item: item.to(torch.device("cpu")))


def with_allocated_memory(batch: Any) -> Any:
    """Return `batch` with every tensor aligned as if torch had allocated it.

    Some CPU kernels sum unaligned data in a different order.
    """
    return map_tensors(batch, lambda t: t if t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 else t.clone())


def align_in_place(tensors: Iterable[torch.Tensor]) -> None:
    """Reallocate tensors whose alignment differs from torch's, such as weights in a memory-mapped file."""
    for tensor in tensors:
        # via .data, so that the parameter stays the same object for optimizers and hooks
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
