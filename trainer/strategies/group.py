"""Base strategy with one process per device, in one process group."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.errors import ConfigError, TaskError
from ...base.place import Place, find_group
from ...base.torch_private import copy_to_each
from ..accelerators import assigned_device, backend_for
from ..optimization.model_checks import sparse_weights
from ..optimization.precision import Precision
from ..processes.ranks import DEFAULT, Ranks, Timeout, Timeouts, legatos_group, require_backend
from ..processes.rendezvous import join_process_group
from .strategy import Strategy, trainable
from .tree import average_in_tree

if TYPE_CHECKING:
    from ...tasks.task import Task


class GroupStrategy(Strategy):
    """One process per device. At the end of a step, a flat buffer of all gradients is summed over the process group.

    This is the simplest base class for a custom strategy. Override `end_step` to reduce gradients differently.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: Timeout = DEFAULT,
    ) -> None:
        """Set the strategy's options.

        Args:
            process_group_backend: backend for the process group; by default, torch's backend for the device.
            timeout: see `processes.ranks.Timeouts`.
        """
        super().__init__()
        self.process_group_backend, self.init_method = process_group_backend, init_method
        self.timeouts = Timeouts(timeout)
        self.flat_sum: FlatSum | None = None

    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return the number of processes: one per device."""
        return len(devices)

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the process group and select the device of the local rank."""
        self.place, self.devices = place, list(devices)
        is_assigned = len(devices) == 1 and place.origin not in ("alone", "legato") and assigned_device(devices[0])
        if place.local_world_size > len(devices) and devices[0].type != "cpu" and not is_assigned:
            raise ConfigError(
                f"This machine runs {place.local_world_size} processes, but trainer.devices lists {len(devices)} "
                f"{devices[0].type} devices. Start one process per device, or let processes share devices: "
                f"trainer.devices={[index % len(devices) for index in range(place.local_world_size)]}."
            )
        # there may be more processes than entries on the CPU, or if a launcher assigns a device to each process
        self._take_device(devices[place.local_rank % len(devices)])
        self.precision = Precision(precision, self.device.type)
        rank, group = place.rank, None
        if place.world_size > 1:
            limit, only = self.timeouts.limits["startup"], self._only_device()
            self.meeting = join_process_group(place, self._backend(), limit, self.init_method, only)
            if find_group() is not None:
                require_backend(self.device, self.process_group_backend)
            # Elastic groups change with their members. Other runs leave the default group to the script, so that the
            # script's collectives cannot be matched with Legato's.
            if not self.elastic:
                group = legatos_group(self.timeouts.limits["startup"])
            self.timeouts.enter("startup")
        else:
            rank = 0  # a process that is about to join an elastic run is alone, regardless of its rank
        self.collectives = self.data_ranks = self.weight_ranks = Ranks(rank, place.world_size, group)

    def _only_device(self) -> torch.device | None:
        """Return this process's only device, or None if it has multiple devices or the run is elastic."""
        return None if self.elastic else self.device

    def _backend(self) -> str:
        """Return the backend of the process group."""
        return backend_for(self.device, self.process_group_backend, shared=self.devices.count(self.device) > 1)

    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the task for training after it has been placed. Every rank starts with rank 0's weights."""
        self.flat_sum = FlatSum(task, self.data_ranks) if self.data_ranks.size > 1 else None
        prepared = super().prepare(task, optimizers)
        self._share_weights(task)
        return prepared

    def _share_weights(self, task: "Task") -> None:
        self.collectives.broadcast_tensors([*task.parameters(), *task.buffers()])

    def end_step(self) -> None:
        """Sum the gradients over all ranks and synchronize the buffers."""
        super().end_step()
        # manual optimization has averaged gradients before each update
        if self.tree is None and self.task is not None and self.task.automatic_optimization:
            self._add_up_ranks()

    def _add_up_ranks(self) -> None:
        if self.flat_sum is not None and self.task is not None:
            self.flat_sum.add_up(list(trainable(self.task)), int(self.loss_scale))

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over ranks. A missing gradient is treated as zero."""
        if self.flat_sum is None or self.task is None:
            return
        if self.task.trainer.reproducible == "bitwise":
            average_in_tree(parameters, self.layout, self.data_ranks.rank, self.data_ranks.group)
        else:
            self.flat_sum.add_up(parameters, divisor=self.data_ranks.size)


Kind = tuple[torch.dtype, torch.device]


class FlatSum:
    """Sums gradients over ranks, with one all_reduce of a flat buffer per dtype and device.

    A missing gradient is treated as zero. If any rank has a gradient for a parameter, every rank receives the sum.
    Flags at the end of the buffer mark the parameters that have a gradient.
    """

    def __init__(self, task: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sparse = sparse_weights(task)
        """Weights of sparse embeddings, whose gradients are reduced separately. All ranks have the same set."""
        self.buffers: dict[Kind, Tensor] = {}

    def add_up(self, parameters: Sequence[nn.Parameter], divisor: int = 1) -> None:
        """Replace the gradients of `parameters` with their sums over ranks, divided by `divisor`.

        All ranks must call this.
        """
        kinds: dict[Kind, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for kind, alike in kinds.items():
            sparse = [parameter for parameter in alike if parameter in self.sparse]
            self._add_up(kind, [parameter for parameter in alike if parameter not in self.sparse], sparse, divisor)

    def _add_up(self, kind: Kind, dense: list[nn.Parameter], sparse: list[nn.Parameter], divisor: int) -> None:
        sizes, flags = [parameter.numel() for parameter in dense], len(dense) + len(sparse)
        flat = self._buffer(kind, sum(sizes) + flags)
        slices = flat[: sum(sizes)].split(sizes)
        for parameter, slice_ in zip(dense, slices, strict=True):
            if parameter.grad is None:
                slice_.zero_()
            elif parameter.grad.is_sparse:
                raise TaskError(
                    f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient. With multiple processes, "
                    f"only the weight of an Embedding(sparse=True) may have one. Make this gradient dense."
                )
            else:
                slice_.view_as(parameter).copy_(parameter.grad)
        # The flags follow the gradients in the same buffer, which saves a collective. Their dtype does not matter: a
        # sum of ones is nonzero in every floating-point type.
        present = [parameter.grad is not None for parameter in chain(dense, sparse)]
        flat[sum(sizes) :].copy_(torch.tensor(present))
        # a sum, not a mean, because losses are already weighted by samples: ranks may have batches of different sizes
        dist.all_reduce(flat, group=self.ranks.group)
        used = (flat[sum(sizes) :] != 0).tolist()
        flat /= divisor
        for parameter, is_used in zip([*dense, *sparse], used, strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = _no_rows(parameter) if parameter in self.sparse else torch.empty_like(parameter)
        pairs = [(parameter.grad, slice_.view_as(parameter)) for parameter, slice_ in zip(dense, slices, strict=True)]
        targets = [(gradient, slice_) for gradient, slice_ in pairs if gradient is not None]
        if targets:
            copy_to_each([gradient for gradient, _ in targets], [slice_ for _, slice_ in targets])
        # one collective per parameter: the number of rows differs between ranks
        for parameter in sparse:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.ranks.group)
                parameter.grad /= divisor

    def _buffer(self, kind: Kind, length: int) -> Tensor:
        """Return a buffer of `length` numbers, reused each step, because new memory costs a page fault per 4 KiB."""
        if kind not in self.buffers or self.buffers[kind].numel() < length:
            self.buffers[kind] = torch.empty(length, dtype=kind[0], device=kind[1])
        return self.buffers[kind][:length]


def _no_rows(parameter: nn.Parameter) -> Tensor:
    """Return an empty sparse gradient, so that a rank without a gradient can take part in the collective."""
    rows, values = torch.empty(1, 0, dtype=torch.int64), parameter.detach()[:0]
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch 2.12 warns about the argument
        return torch.sparse_coo_tensor(rows, values, parameter.shape, device=parameter.device)
