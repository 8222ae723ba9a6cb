"""Reducers of gradients on a mesh: what FSDP sends in backward, and sums of layers that are cut over processes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ....base.errors import TaskError
from ...data.sampling import Layout
from ...processes.ranks import Ranks
from ..bitwise.tree import GradientStack, ShareStack, TreeNode, partial_nodes
from ..reducers import Reducer
from .sharding import sharded
from .tensor_gradients import TensorGradients

if TYPE_CHECKING:
    from ....tasks.task import Task


class MeshReducer(Reducer):
    """Lets FSDP send gradients in the last backward of a step, and adds up what tensor parallelism leaves partial."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        root: FSDPModule | None,
        cut: TensorGradients | None,
        ranks: Ranks,
    ) -> None:
        """`root`: the outermost sharded module. `cut`: the gradients beside cut layers, where there are any."""
        super().__init__(parameters)
        self.root, self.cut, self.ranks = root, cut, ranks
        self.sends: bool | None = None
        """Whether gradients are sent in the next backward; None: as the step before left it."""

    def set_sync(self, last: bool) -> None:
        """Choose whether the next backward sends gradients."""
        # visits every module of the task, so only where something changes
        if self.sends is not last and self.root is not None:
            self.root.set_requires_gradient_sync(last)
        self.sends = last

    def complete(self) -> None:
        """Add up sums over the sequence that are partial yet."""
        if self.cut is None:
            return
        for parameter in self.parameters:
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            # with "sequence" in a plan a norm's weight sees a part of the sequence: torch leaves its gradient a partial
            # sum
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        self.cut.complete()

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradient is finite in every rank's part of it."""
        # the ranks must decide alike whether to take the step, but an inf may lie in one rank's shard only
        finite = super().are_finite(parameters)
        return not self.ranks.all_reduce(torch.tensor([float(not finite)]), "max").item()


class TreeMeshReducer(MeshReducer):
    """Adds sharded gradients up in the fixed binary tree over replicas, instead of by torch's reduce-scatter.

    FSDP asks for a reduction in every backward. Only the last one of a step sends anything: those before it add up
    within the process.
    """

    def __init__(self, task: "Task", root: FSDPModule, layout: Layout, ranks: Ranks) -> None:
        super().__init__(task.parameters(), root, None, ranks)
        self.task, self.layout = task, layout
        self.replica, self.last = -1, False
        self.batches = 0
        """Batches so far in this step."""
        self.blocks: list[TreeReduceScatter] = []
        for module in sharded(root):  # type: ignore[arg-type]
            self.blocks.append(TreeReduceScatter(self))
            module.set_custom_reduce_scatter(self.blocks[-1])  # type: ignore[arg-type]  # whose base is private

    def is_masked(self) -> bool:
        """Return whether the batch under way counts for nothing: another process has it."""
        return self.task.trainer.metrics.muted

    def begin_replica(self, replica: int) -> None:
        """Begin with the backwards of a replica."""
        self.replica = replica

    def set_sync(self, last: bool) -> None:
        """Begin with a batch; `last`: its backward sends the gradients of all batches of the step."""
        self.last = last
        self.batches += not self.is_masked()

    def finish(self) -> bool:
        """Return True. Raises TaskError where only some batches of the step used the parameters of a block."""
        if any(block.batches not in (0, self.batches) for block in self.blocks):
            raise TaskError(UNEVEN)
        self.abandon()
        return True

    def abandon(self) -> None:
        """Drop the gradients of a step that ends before its last backward."""
        self.replica, self.batches = -1, 0
        for block in self.blocks:
            block.reset()


UNEVEN = (
    "reproducible: bitwise: sharded parameters need a gradient once in every batch or in none, but some batches of "
    "this step left parameters out. Add 0.0 times what a batch does not use to its loss, or use strategy ddp or zero1."
)


class TreeReduceScatter:
    """FSDP's reduce-scatter of one block's gradients, as `set_custom_reduce_scatter` takes it."""

    def __init__(self, reducer: TreeMeshReducer) -> None:
        self.reducer = reducer
        layout, rank = reducer.layout, reducer.ranks.rank
        self.owned = layout.owned(rank)
        self.nodes_of = [partial_nodes(layout.owned(each)) for each in range(layout.processes)]
        self.numbers = 0
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.stack, self.next_replica, self.batches = GradientStack(), self.owned.start, 0
        self.replica = -1
        self.gradient: Tensor | None = None
        """Sum over the batches so far of `replica`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Set `output_tensor` to this rank's share of the sum over all replicas; before the last batch to nothing."""
        reducer = self.reducer
        if not reducer.is_masked():
            if self.numbers not in (0, input_tensor.numel()):
                raise TaskError(UNEVEN)
            self.numbers = input_tensor.numel()
            self._take(input_tensor, reducer.replica, reducer.last)
        if reducer.last:
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
        if self.gradient is None:
            return
        for absent in range(self.next_replica, self.replica):
            self.stack.push(TreeNode(absent, 0), [None])
        self.stack.push(TreeNode(self.replica, 0), [self.gradient])
        self.next_replica, self.gradient = self.replica + 1, None

    def _exchange(self, output: Tensor, numbers: int, group: dist.ProcessGroup) -> None:
        """Send each rank its share of this one's partial sums, and add up the own share of all ranks' in order."""
        self._push_replica()
        for absent in range(self.next_replica, self.owned.stop):
            self.stack.push(TreeNode(absent, 0), [None])
        self.next_replica = self.owned.stop
        world, share = len(self.nodes_of), output.numel()
        rows = [output.new_full((numbers,), -0.0) if row is None else row for _, (row,) in self.stack.waiting]
        outgoing = rows[0] if len(rows) == 1 else torch.stack([row.view(world, share) for row in rows], 1).flatten()
        every = [node for nodes in self.nodes_of for node in nodes]
        incoming = output.new_empty(len(every) * share)
        counts = [len(nodes) * share for nodes in self.nodes_of]
        dist.all_to_all_single(incoming, outgoing, counts, [len(rows) * share] * world, group=group)
        stack = ShareStack()
        for node, value in zip(every, incoming.view(len(every), share), strict=True):
            stack.push(node, value)
        output.copy_(stack.total())
