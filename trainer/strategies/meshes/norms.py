"""Gradients of which every rank holds parts, on one mesh or several: their norm, clipping, and scaling of losses."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...torch_private import unscale_each
from .whole import local_of

CPU = torch.device("cpu")


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def device_of(optimizer: Optimizer) -> torch.device:
    """Return the device of an optimizer's parameters, as far as this rank has them."""
    devices = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
    return next((device for device in devices if device.type != "meta"), CPU)


def total_norm(gradients: Iterable[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients together, the same on each of `ranks` ranks, by one all-reduce.

    Every rank adds what it holds, divided by how many ranks hold the same: so parameters of several meshes, and plain
    ones that each rank has whole, count once each. The gradients must not be partial sums. `device`: where the ranks
    meet if this one has no gradient.
    """
    shares: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        local = local_of(gradient)
        norm = torch.linalg.vector_norm(local, dtype=torch.float32 if local.dtype.itemsize < 4 else None)
        shares.setdefault(local.device, []).append(norm.double().square() * (parts(gradient) / ranks))
    device = next(iter(shares), device)
    total = torch.zeros((), dtype=torch.float64, device=device)  # with no gradient here, too: others may have some
    for own in shares.values():
        total += torch.stack(own).sum().to(device)
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
    norm = total_norm(gradients, ranks, device_of(optimizer))
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
    """Scales losses where every rank holds parts of the gradients: an overflow in one part is one on all ranks.

    The public methods of torch's, whose own look at one rank's gradients on one mesh.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.factor = super().get_scale()
        self.good_steps = 0
        """How many steps in a row had only finite gradients."""
        self.found: dict[int, Tensor] = {}
        """By the id of each optimizer whose gradients are unscaled: whether one was not finite."""

    def scale(self, outputs: Any) -> Any:
        """Return the loss, multiplied."""
        return outputs * self.factor

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients. Raises RuntimeError where they have been since the last update."""
        if id(optimizer) in self.found:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in map(local_of, gradients_of(optimizer)):
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        flags: dict[torch.device, Tensor] = {}
        for (device, _), own in groups.items():
            flag = flags.setdefault(device, torch.zeros((), device=device))
            unscale_each(own, flag, torch.tensor(1.0 / self.factor, device=device))
        total = sum(flags.values(), torch.zeros((), device=next(iter(flags), None)))
        dist.all_reduce(total, dist.ReduceOp.MAX)
        self.found[id(optimizer)] = total

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, unless a gradient was not finite."""
        if id(optimizer) not in self.found:
            self.unscale_(optimizer)
        return None if self.found[id(optimizer)].item() else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next factor: a smaller one after an overflow, a larger one after many steps without."""
        overflowed, self.found = any(found.item() for found in self.found.values()), {}
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if new_scale is not None:
            self.factor = float(new_scale)
        elif overflowed:
            self.factor *= self.get_backoff_factor()
        elif self.good_steps == self.get_growth_interval():
            self.good_steps, larger = 0, self.factor * self.get_growth_factor()
            self.factor = larger if larger <= torch.finfo(torch.float32).max else self.factor

    def get_scale(self) -> float:
        """Return the factor."""
        return self.factor

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's has."""
        return {
            "scale": self.factor,
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": self.good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what torch's or this one had."""
        self.factor, self.good_steps = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
