"""Sums of sharded gradients in a fixed binary tree over replicas, used instead of torch's reduce-scatter."""

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
    "reproducible=bitwise: a sharded parameter needs a gradient in all batches of a step or in none, but some batches "
    "of this step left parameters unused. Add 0.0 times the unused output to the loss, or use strategy=ddp or zero1."
)


class ShardTree:
    """Gradients of a step's replicas, per FSDP block.

    FSDP requests a reduction in every backward pass. Only the last backward pass of a step communicates. Earlier
    backward passes add to local sums.
    """

    def __init__(self, root: FSDPModule, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.replica, self.batches = -1, 0
        """The current replica, and the number of batches so far in this step."""
        self.is_last = self.is_masked = False
        """Whether the current backward pass is this process's last; whether its batch has weight 0."""
        self.blocks: list[TreeReduceScatter] = []
        for module in sharded(root):
            self.blocks.append(TreeReduceScatter(self))
            module.set_custom_reduce_scatter(self.blocks[-1])

    def open_batch(self, is_masked: bool) -> None:
        """Start a batch. A masked batch has weight 0 and is not counted."""
        self.is_masked = is_masked
        self.batches += not is_masked

    def begin_replica(self, replica: int) -> None:
        """Start the batches of a replica."""
        self.replica = replica

    def expect_last(self) -> None:
        """In the next backward pass, reduce the gradients of all batches in the step."""
        self.is_last = True

    def finish(self) -> None:
        """End a step. Raises TaskError if only some batches of the step used the parameters of a block."""
        if any(block.batches not in (0, self.batches) for block in self.blocks):
            raise TaskError(UNEVEN)
        self.abandon()

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step."""
        self.replica, self.batches, self.is_last = -1, 0, False
        for block in self.blocks:
            block.reset()

    def close(self) -> None:
        """Do nothing, because FSDP's wrappers own the reductions."""


class TreeReduceScatter:
    """Reduce-scatter of one block's gradients, for FSDP's `set_custom_reduce_scatter`."""

    def __init__(self, tree: ShardTree) -> None:
        self.tree = tree
        layout = tree.layout
        self.replicas = ReplicaStack(layout.owned(tree.rank), 1)
        self.nodes_of = [partial_nodes(layout.owned(each)) for each in range(layout.processes)]
        self.numbers = 0
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.replicas.reset()
        self.replica, self.batches = -1, 0
        self.gradient: Tensor | None = None
        """Sum over the batches of `replica` so far."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor for FSDP to use as input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Set `output_tensor` to this rank's shard of the sum over all replicas, or to -0.0 before the last batch."""
        tree = self.tree
        if not tree.is_masked:
            if self.numbers not in (0, input_tensor.numel()):
                raise TaskError(UNEVEN)
            self.numbers = input_tensor.numel()
            self._take(input_tensor, tree.replica, tree.is_last)
        if tree.is_last:
            self._exchange(output_tensor, input_tensor.numel(), group)
        else:
            output_tensor.fill_(-0.0)  # -0.0 leaves any sum unchanged, including -0.0

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
        """Send each rank its shard of the local partial sums. Sum the values received for this rank's shard."""
        self._push_replica()
        rows = [output.new_full((numbers,), -0.0) if row is None else row for (row,) in self.replicas.close()]
        output.copy_(add_up_shares(rows, self.nodes_of, group))
