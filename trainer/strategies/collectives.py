"""Strategies with one process a device: how the processes meet, and the collectives that every rank calls."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..optimization.precision import Precision
from ..processes import own_group
from ..processes.environment import Place, connect
from ..processes.sync import DEFAULT, Timeout, Timeouts
from .strategy import Strategy

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
Backend = Literal["nccl", "gloo", "mpi"]


class GroupStrategy(Strategy):
    """One process a device, in one process group."""

    def __init__(
        self,
        process_group_backend: Backend | None = None,
        init_method: str | None = None,
        timeout: Timeout = DEFAULT,
    ) -> None:
        """`timeout`: see `processes.timeouts`; without a backend, nccl on CUDA, else gloo."""
        super().__init__()
        self.process_group_backend, self.init_method = process_group_backend, init_method
        self.timeouts = Timeouts(timeout)
        self.host_group: dist.ProcessGroup | None = None
        """The group for values on the host, where the default group does not serve them."""

    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """One process a device."""
        return len(devices)

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Open the process group and take the device of the local rank."""
        self.place, self.devices = place, list(devices)
        if place.local_world_size > len(devices) and devices[0].type != "cpu":
            raise ConfigError(
                f"{place.local_world_size} processes on this machine, but {len(devices)} {devices[0].type} devices; "
                f"start as many processes as there are devices."
            )
        self.device = devices[place.local_rank % len(devices)]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.precision = Precision(precision, self.device.type)
        if place.world_size > 1:
            self.meeting = connect(place, self.backend(), self.timeouts["startup"], self.init_method)
            if own_group.find_group() is not None:
                own_group.require_backend(self.device, self.process_group_backend)
            self.host_group = own_group.host_group()
            self.timeouts.enter("startup")

    def backend(self) -> str:
        """Return the backend of the process group: small values on the host go by gloo in any case."""
        chosen = self.process_group_backend or ("nccl" if self.device.type == "cuda" else "gloo")
        return "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen

    # --- collectives ------------------------------------------------------------------------------------------------
    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.place.world_size > 1:
            self.all_reduce(torch.zeros(1), "sum")

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        if self.place.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"), group=self.host_group)
        return values[0]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, stacked: (world size, *shape)."""
        return all_gather(tensor, self.place.world_size, self.host_group if tensor.is_cpu else None)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank."""
        return gather_objects(value, self.place.world_size, self.host_group)

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduce `tensor` over ranks in place and return it."""
        if self.place.world_size > 1:
            dist.all_reduce(tensor, OPERATIONS[operation], group=self.host_group if tensor.is_cpu else None)
        return tensor

    def align_buffers(self) -> None:
        """Broadcast rank 0's buffers."""
        if self.place.world_size > 1 and self.task is not None:
            self._broadcast(list(self.task.buffers()))

    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Give every rank rank 0's values, in one collective for each device: as bytes, which every backend knows."""
        groups: dict[torch.device, list[Tensor]] = {}
        for tensor in sorted(tensors, key=torch.Tensor.element_size, reverse=True):  # so that none begins out of line
            groups.setdefault(tensor.device, []).append(tensor.detach())
        for group in groups.values():
            parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in group]
            flat = torch.cat(parts)
            dist.broadcast(flat, src=0, group=self.host_group if flat.is_cpu else None)
            for tensor, part in zip(group, flat.split([part.numel() for part in parts]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view_as(tensor))


class SomeRanks:
    """Some of the ranks, and the collectives among them; each process is in one such set of every kind."""

    def __init__(self, size: int, group: dist.ProcessGroup | None) -> None:
        """Without a group all ranks."""
        self.size, self.group = size, group

    @property
    def rank(self) -> int:
        """The index of this process among these ranks."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the `tensor` of each of these ranks, stacked: (their number, *shape)."""
        return all_gather(tensor, self.size, self.group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the `value` of each of these ranks, in their order."""
        return gather_objects(value, self.size, self.group)

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduce `tensor` over these ranks in place and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, OPERATIONS[operation], group=self.group)
        return tensor


def all_gather(tensor: Tensor, size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the `tensor` of each of a group's `size` ranks, stacked: (size, *shape)."""
    if size == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def gather_objects(value: Any, size: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the `value` of each of a group's `size` ranks, by rank."""
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
