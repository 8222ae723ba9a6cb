"""Broadcast of rank 0's weights to a task that is sharded already: of each tensor, a rank keeps its part."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import dtensors


def send_off(task: nn.Module) -> list[Tensor]:
    """Replace all tensors of a task by ones without memory; return those that were there."""
    values = dict.fromkeys(tensor for *_, tensor in dtensors.tensor_slots(task))
    dtensors.replace(task, lambda tensor: torch.empty_like(tensor, device="meta"))
    return list(values)


@torch.no_grad()
def bring_back(
    task: nn.Module, values: list[Tensor] | None, device: torch.device, device_of_parts: torch.device
) -> None:
    """Give a task's tensors memory, and each rank its part of `values`, which rank 0 has.

    One tensor at a time, so that no other rank holds more than its parts and one whole tensor, on the host.
    """
    rank_0 = iter(values or ())

    def fetch(tensor: Tensor) -> Tensor:
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        if values is not None:
            value = next(rank_0).detach().cpu().contiguous()
        # as bytes: gloo has no broadcast for some dtypes (int16, float8), and NaN payloads must arrive as they are
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        target = torch.empty_like(tensor, device=device_of_parts if isinstance(tensor, DTensor) else device)
        dtensors.fill(target, value)
        return target

    dtensors.replace(task, fetch)
