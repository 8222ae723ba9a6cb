"""Gradients of which every rank holds parts, on one mesh or several: their norm, clipping, and scaling of losses."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .whole import local_of


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(gradients: Iterable[Tensor], ranks: int) -> Tensor:
    """Return the 2-norm of all gradients together, the same on each of `ranks` ranks, by one all-reduce.

    Every rank adds what it holds, divided by how many ranks hold the same: so parameters of several meshes, and plain
    ones that each rank has whole, count once each. The gradients must not be partial sums.
    """
    shares: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        local = local_of(gradient)
        norm = torch.linalg.vector_norm(local, dtype=torch.float32 if local.dtype.itemsize < 4 else None)
        shares.setdefault(local.device, []).append(norm.double().square() * (parts(gradient) / ranks))
    if not shares:
        return torch.zeros(())
    total = sum(torch.stack(own).sum().to(next(iter(shares))) for own in shares.values())
    assert isinstance(total, Tensor)
    dist.all_reduce(total)
    return total.sqrt().float()


def parts(tensor: Tensor) -> int:
    """Return into how many different parts a tensor is dealt out."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # torch has two kinds of shards
            count *= tensor.device_mesh.size(axis)
    return count


@torch.no_grad()
def clip_norm(optimizer: Optimizer, limit: float, ranks: int) -> Tensor:
    """Scale the gradients down where their norm is above `limit`; return the norm before."""
    gradients = gradients_of(optimizer)
    norm = total_norm(gradients, ranks)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    for gradient in gradients:
        local = local_of(gradient)
        local.mul_(factor.to(local.device))
    return norm


@torch.no_grad()
def clip_value(optimizer: Optimizer, limit: float) -> None:
    """Limit every number of the gradients to [-limit, limit]."""
    for gradient in gradients_of(optimizer):
        local_of(gradient).clamp_(-limit, limit)


class MeshScaler(torch.amp.GradScaler):
    """Scales losses where every rank holds parts of the gradients: an overflow in one part is one on all ranks."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = [local_of(gradient) for gradient in gradients_of(optimizer)]
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found: dict[torch.device, Any] = {}
        for (device, _), own in groups.items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(own, flag, inv_scale.to(device))
        for flag in found.values():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found
