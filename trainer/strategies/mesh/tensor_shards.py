"""Layers with a fixed number of shards, whose results are bitwise identical for any number of processes.

The low-order bits of a matrix product depend on its shape, and those of a sum on its order. So each shard of a
layer is computed as a separate product, and a fixed binary tree sums over the shards. The tree sums the outputs of a
row layer and the input gradients of a column layer. This applies the idea behind "tree-based invariant kernels" (Zhang
et al. 2025, https://arxiv.org/abs/2511.17826) to layers instead of kernels.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.functional import linear, pad

from ....base.errors import TaskError
from ...accelerators import generator_states
from ...data.sampling import Layout
from ...data.transfer import with_allocated_memory
from ...optimization.kernels import give_forwards
from ...processes.ranks import Ranks
from ..tree import CarryStack, TreeNode, add_up_shares, all_gather_single, partial_nodes

Sums = Callable[[Iterable[Tensor]], Tensor]


class Copies(torch.autograd.Function):
    """Returns a view of the input for each shard. The backward pass sums the gradients of the views."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, count: int, add_up: Sums) -> tuple[Tensor, ...]:
        """Return views of `inputs`."""
        context.add_up = add_up
        return tuple(inputs.view_as(inputs) for _ in range(count))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the inputs, on every process."""
        return context.add_up(gradients), None, None


class Sum(torch.autograd.Function):
    """Sum over the shards of all processes."""

    @staticmethod
    def forward(context: Any, add_up: Sums, *values: Tensor) -> Tensor:
        """Return the sum, on every process."""
        context.count = len(values)
        return add_up(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each value, which equals the gradient of the sum."""
        return None, *[gradient] * context.count


class TensorShards:
    """Computes this process's shards of each layer, one after another."""

    def __init__(self, count: int, ranks: Ranks) -> None:
        """Divide the shards among the processes.

        Args:
            count: number of shards over all processes, a multiple of the number of `ranks`.
        """
        self.ranks = ranks
        owned = [Layout(count, ranks.size).owned(rank) for rank in range(ranks.size)]
        self.owned, self.nodes_of = owned[ranks.rank], [partial_nodes(shards) for shards in owned]
        self.generators: Tensor | None = None
        """States of the random generators after a column layer, until its row layer is called."""

    def attach(self, task: nn.Module, words: Mapping[str, str]) -> None:
        """Replace the forward methods of the layers in a plan, so that the layers compute one shard at a time."""
        columns = [task.get_submodule(name) for name, word in words.items() if word == "column"]
        rows = [task.get_submodule(name) for name, word in words.items() if word == "row"]
        give_forwards(columns, lambda kind: lambda layer, inputs: self._column(layer, inputs))
        give_forwards(rows, lambda kind: lambda layer, inputs: self._row(layer, inputs))

    def _column(self, layer: Any, inputs: Tensor) -> Tensor:
        """Return the concatenated outputs of this process's shards of a column layer."""
        apply: Any = Copies.apply  # without types in torch
        copies, biases = apply(local(inputs), len(self.owned), self.add_up), [None] * len(self.owned)
        if layer.bias is not None:
            biases = self._cut(layer.bias, 0)
        outputs = [linear(*arguments) for arguments in zip(copies, self._cut(layer.weight, 0), biases, strict=True)]
        for output in outputs:
            if output.requires_grad:  # with multiple shards, the gradient is a slice of columns
                output.register_hook(Tensor.contiguous)
        self.generators = generators()
        return like(inputs, torch.cat(outputs, -1), Shard(-1))

    def _row(self, layer: Any, inputs: Tensor) -> Tensor:
        """Return a row layer's output: the sum over all shards on all processes."""
        before, self.generators = self.generators, None
        if before is not None and not torch.equal(before, generators()):
            raise TaskError(
                "tensor_shards: random numbers drawn between a column layer and its row layer, as in attention "
                "dropout, depend on the number of processes. Set dropout to 0, or apply it after the row layer."
            )
        pairs = zip(self._cut(inputs, -1), self._cut(layer.weight, 1), strict=True)
        apply: Any = Sum.apply
        output = apply(self.add_up, *[linear(piece, weight) for piece, weight in pairs])
        return like(inputs, output if layer.bias is None else output + local(layer.bias), Replicate())

    def _cut(self, tensor: Tensor, dim: int) -> list[Any]:
        """Split a tensor into this process's shards. Each shard is laid out as if it were the only one."""
        return with_allocated_memory([*local(tensor).chunk(len(self.owned), dim)])  # type: ignore[no-any-return]

    def add_up(self, values: Iterable[Tensor]) -> Tensor:
        """Return the sum over all shards. Every process must pass one tensor for each of its shards."""
        stack = CarryStack(torch.add)
        for shard, value in zip(self.owned, values, strict=True):
            stack.push(TreeNode(shard, 0), value)
        if self.ranks.size == 1:
            return stack.total()
        nodes = [value for _, value in stack.waiting]
        shape, numbers = nodes[0].shape, nodes[0].numel()
        rest = -numbers % self.ranks.size
        share = add_up_shares([pad(node.flatten(), (0, rest)) for node in nodes], self.nodes_of, self.ranks.group)
        total = share.new_empty(numbers + rest)
        all_gather_single(total, share, group=self.ranks.group)
        return total[:numbers].view(shape)


def generators() -> Tensor:
    """Return the states of the random generators."""
    return torch.cat([torch.get_rng_state(), *generator_states()])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a tensor, connected to the autograd graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(inputs: Tensor, output: Tensor, place: Placement) -> Tensor:
    """Return `output` as a DTensor if `inputs` is a DTensor, as torch's hooks on a parallel layer expect."""
    if not isinstance(inputs, DTensor):
        return output
    return DTensor.from_local(output, inputs.device_mesh, [place], run_check=False)
