"""Broadcast of rank 0's weights to a task that is already sharded. Each rank keeps its shard of every tensor."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import dtensors


def release_values(task: nn.Module) -> list[Tensor]:
    """Replace all of a task's tensors with meta tensors, which need no memory. Return the original tensors."""
    values = dict.fromkeys(tensor for *_, tensor in dtensors.tensor_slots(task))
    dtensors.replace(task, lambda tensor: torch.empty_like(tensor, device="meta"))
    return list(values)


@torch.no_grad()
def broadcast_values(
    task: nn.Module, values: list[Tensor] | None, device: torch.device, device_of_parts: torch.device
) -> None:
    """Allocate a task's tensors, and fill them with this rank's shards of `values`, which only rank 0 has.

    Tensors are broadcast one by one, so that each rank needs memory only for its shards and one full tensor on the
    host.
    """
    rank_0 = iter(values or ())

    def fetch(tensor: Tensor) -> Tensor:
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        if values is not None:
            value = next(rank_0).detach().cpu().contiguous()
        # as bytes, because gloo cannot broadcast some dtypes (int16, float8) and NaN payloads must not change
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        target = torch.empty_like(tensor, device=device_of_parts if isinstance(tensor, DTensor) else device)
        dtensors.fill(target, value)
        return target

    dtensors.replace(task, fetch)
