"""Sums of sharded gradients in one fixed binary tree over replicas, instead of by torch's reduce-scatter."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ....base.errors import TaskError
from ...data.sampling import Layout
from ..tree import ReplicaStack, add_up_shares, partial_nodes
from .sharding import sharded

UNEVEN = (
    "reproducible: bitwise: sharded parameters need a gradient once in every batch or in none, but some batches of "
    "this step left parameters out. Add 0.0 times what a batch does not use to its loss, or use strategy ddp or zero1."
)


class ShardTree:
    """The gradients of a step's replicas, by the blocks of FSDP.

    FSDP asks for a reduction in every backward. Only the last one of a step sends anything: those before it add up
    within the process.
    """

    def __init__(self, root: FSDPModule, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.replica, self.batches = -1, 0
        """The replica under way, and how many batches it and those before it had in this step."""
        self.is_last = self.is_masked = False
        """Whether the backward under way is this process's last one, and whether its batch counts for nothing."""
        self.blocks: list[TreeReduceScatter] = []
        for module in sharded(root):
            self.blocks.append(TreeReduceScatter(self))
            module.set_custom_reduce_scatter(self.blocks[-1])

    def open_batch(self, is_masked: bool) -> None:
        """Begin with a batch; masked is one that another process has."""
        self.is_masked = is_masked
        self.batches += not is_masked

    def begin_replica(self, replica: int) -> None:
        """Begin with the backwards of a replica."""
        self.replica = replica

    def expect_last(self) -> None:
        """Let the next backward send the gradients of all batches of the step."""
        self.is_last = True

    def finish(self) -> None:
        """End a step. Raises TaskError where only some batches of the step used the parameters of a block."""
        if any(block.batches not in (0, self.batches) for block in self.blocks):
            raise TaskError(UNEVEN)
        self.abandon()

    def abandon(self) -> None:
        """Drop the gradients of a step that ends before its last backward."""
        self.replica, self.batches, self.is_last = -1, 0, False
        for block in self.blocks:
            block.reset()

    def close(self) -> None:
        """Do nothing: the reductions go with FSDP's wrappers."""


class TreeReduceScatter:
    """FSDP's reduce-scatter of one block's gradients, as `set_custom_reduce_scatter` takes it."""

    def __init__(self, tree: ShardTree) -> None:
        self.tree = tree
        layout = tree.layout
        self.replicas = ReplicaStack(layout.owned(tree.rank), 1)
        self.nodes_of = [partial_nodes(layout.owned(each)) for each in range(layout.processes)]
        self.numbers = 0
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.replicas.reset()
        self.replica, self.batches = -1, 0
        self.gradient: Tensor | None = None
        """Sum over the batches so far of `replica`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Set `output_tensor` to this rank's share of the sum over all replicas; before the last batch to nothing."""
        tree = self.tree
        if not tree.is_masked:
            if self.numbers not in (0, input_tensor.numel()):
                raise TaskError(UNEVEN)
            self.numbers = input_tensor.numel()
            self._take(input_tensor, tree.replica, tree.is_last)
        if tree.is_last:
            self._exchange(output_tensor, input_tensor.numel(), group)
        else:
            output_tensor.fill_(-0.0)  # the number that changes nothing it is added to

    def _take(self, gradient: Tensor, replica: int, last: bool) -> None:
        self.batches += 1
        if self.gradient is not None and self.replica == replica:
            self.gradient.add_(gradient)
            return
        self._push_replica()
        self.replica, self.gradient = replica, gradient if last else gradient.clone()

    def _push_replica(self) -> None:
        if self.gradient is not None:
            self.replicas.push(self.replica, [self.gradient])
            self.gradient = None

    def _exchange(self, output: Tensor, numbers: int, group: dist.ProcessGroup) -> None:
        """Send each rank its share of this one's partial sums, and add up the own share of all ranks' in order."""
        self._push_replica()
        rows = [output.new_full((numbers,), -0.0) if row is None else row for (row,) in self.replicas.close()]
        output.copy_(add_up_shares(rows, self.nodes_of, group))
