"""Collectives: operations that every rank of a group calls, in the same order."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Collectives:
    """A group of ranks and the collectives among them; without arguments one process, in which nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        """`group`: None is the default process group; with one rank it need not exist."""
        self.rank, self.size, self.group = rank, size, group

    def move(self, rank: int, size: int) -> None:
        """Go on with another default group, in which this process has another rank."""
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1), "sum")

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank; anything that pickles."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group_src=0, device=torch.device("cpu"), group=self.group)
        return values[0]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with those of rank 0, in one collective for each device."""
        if self.size == 1:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in sorted(tensors, key=torch.Tensor.element_size, reverse=True):  # widest first keeps all aligned
            by_device.setdefault(tensor.device, []).append(tensor.detach())
        for some in by_device.values():
            parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in some]  # every backend knows bytes
            flat = torch.cat(parts)
            dist.broadcast(flat, group_src=0, group=self.group)
            for tensor, part in zip(some, flat.split([part.numel() for part in parts]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view_as(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, stacked: (size, *shape). Shapes must be equal."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank; anything that pickles."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduce `tensor` over ranks in place by "sum", "max", "min" or "product", and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, OPERATIONS[operation], group=self.group)
        return tensor


SINGLE = Collectives()
"""One process by itself."""
