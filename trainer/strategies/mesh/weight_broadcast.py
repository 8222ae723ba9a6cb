"""Broadcast of rank 0's weights: whole before a task is sharded, or in parts afterwards."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import dtensors

BROADCAST_BYTES = 1 << 26
"""Bytes of weights that rank 0 broadcasts in one message."""
META = torch.device("meta")


def share(task: nn.Module, broadcast: Callable[[list[Tensor]], None]) -> None:
    """Give every rank the weights and buffers of rank 0."""
    # several in one message, since each costs a round trip; not all, since they are copied into one buffer
    waiting: list[Tensor] = []
    for tensor in (*task.parameters(), *task.buffers()):
        waiting.append(tensor)
        if dtensors.local_bytes(waiting) > BROADCAST_BYTES:
            broadcast(waiting)
            waiting = []
    broadcast(waiting)


def send_off(task: nn.Module) -> list[Tensor]:
    """Replace all tensors of a task by ones without memory; return those that were there."""
    values = {id(tensor): tensor for *_, tensor in dtensors.tensor_slots(task)}
    dtensors.replace(task, lambda tensor: dtensors.empty_on_device(tensor, META))
    return list(values.values())


def bring_back(
    task: nn.Module, values: list[Tensor] | None, device: torch.device, device_of_parts: torch.device
) -> None:
    """Give a task's tensors memory, and each rank its part of `values`, which rank 0 has.

    One tensor at a time, so that no other rank holds more than its parts and one whole tensor, on the host.
    """

    def with_memory(tensor: Tensor) -> Tensor:
        return dtensors.empty_on_device(tensor, device_of_parts if isinstance(tensor, DTensor) else device)

    dtensors.replace(task, with_memory)
    targets = {id(tensor): tensor for *_, tensor in dtensors.tensor_slots(task)}
    for index, target in enumerate(targets.values()):
        if values is None:
            value = torch.empty(target.shape, dtype=target.dtype)
        else:
            value = values[index].detach().cpu().contiguous()
        # as bytes: gloo has no broadcast for some dtypes (int16, float8), and NaN payloads must arrive as they are
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        dtensors.fill(target, value)
