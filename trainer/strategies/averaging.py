"""Averages of gradients over ranks under manual optimization, where DDP's hooks do not run.

Gradients are sent in one flat buffer for each dtype. A rank without a gradient for a parameter counts as zero, and gets
one if any rank has one; the buffer ends with flags that say which parameters have a gradient.
"""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import TaskError
from ...base.torch_private import copy_to_each, divide_each
from ..data.sampling import Layout
from .bitwise.tree import BUCKET_ELEMENTS, Bucket, make_buckets

Kind = tuple[torch.dtype, torch.device]


class FlatAverage:
    """Averages gradients by one all_reduce for each dtype and device."""

    def __init__(self, task: nn.Module, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.world_size, self.group = world_size, group
        self.sparse = sparse_weights(task)
        """The parameters whose gradients are sparse, and travel by themselves: known to all ranks beforehand."""
        self.buffers: dict[Kind, Tensor] = {}

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of `parameters` by their means over ranks; every rank calls it."""
        kinds: dict[Kind, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for kind, some in kinds.items():
            sparse = [one for one in some if one in self.sparse]
            self._average(kind, [one for one in some if one not in self.sparse], sparse)

    def _average(self, kind: Kind, dense: list[nn.Parameter], sparse: list[nn.Parameter]) -> None:
        sizes, flags = [parameter.numel() for parameter in dense], len(dense) + len(sparse)
        flat = self._room(kind, sum(sizes) + flags)
        parts = flat[: sum(sizes)].split(sizes)
        self._fill(dense, parts)
        # The flags travel behind the gradients, so that it is one collective and not two. In their dtype: only "not
        # zero" is read, which a sum of ones keeps in every floating point type.
        present = [parameter.grad is not None for parameter in chain(dense, sparse)]
        flat[sum(sizes) :].copy_(torch.tensor(present))
        dist.all_reduce(flat, group=self.group)
        used = (flat[sum(sizes) :] != 0).tolist()
        flat /= self.world_size
        # the flags of the sparse ones come behind those of the dense ones
        for parameter, is_used in zip(dense, used, strict=False):
            if is_used and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        pairs = [(one.grad, part.view_as(one)) for one, part in zip(dense, parts, strict=True) if one.grad is not None]
        if pairs:
            copy_to_each([gradient for gradient, _ in pairs], [part for _, part in pairs])
        for parameter, is_used in zip(sparse, used[len(dense) :], strict=True):
            if is_used:
                self._average_sparse(parameter)

    def _fill(self, parameters: list[nn.Parameter], parts: Sequence[Tensor]) -> None:
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.is_sparse:
                raise TaskError(
                    f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, but no "
                    f"Embedding(sparse=True) holds it: manual optimization averages sparse gradients of those "
                    f"only. Make it dense."
                )
            else:
                part.view_as(parameter).copy_(parameter.grad)

    def _average_sparse(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            # gloo takes the indices of each rank, so an empty one adds nothing, but a rank must not stay away
            rows, values = torch.empty(1, 0, dtype=torch.int64), parameter.detach()[:0]
            shape, device = parameter.shape, parameter.device
            with torch.sparse.check_sparse_tensor_invariants(True):  # torch 2.12 warns of the argument
                parameter.grad = torch.sparse_coo_tensor(rows, values, shape, device=device)
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= self.world_size

    def _room(self, kind: Kind, length: int) -> Tensor:
        """Return a buffer of `length` numbers, reused in every step: fresh memory costs a page fault every 4 KiB."""
        if kind not in self.buffers or self.buffers[kind].numel() < length:
            self.buffers[kind] = torch.empty(length, dtype=kind[0], device=kind[1])
        return self.buffers[kind][:length]


class TreeAverage:
    """Averages gradients in the order of the fixed binary tree; each rank has one replica."""

    def __init__(self, layout: Layout, rank: int, group: dist.ProcessGroup | None) -> None:
        self.layout, self.rank, self.group = layout, rank, group
        self.buckets: dict[tuple[int, ...], list[Bucket]] = {}

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of `parameters` by their means over ranks; every rank calls it."""
        key = tuple(map(id, parameters))
        if key not in self.buckets:
            self.buckets[key] = make_buckets(parameters, self.layout, self.rank, BUCKET_ELEMENTS, self.group)
        for bucket in self.buckets[key]:
            # not `begin`: it would set aside the very gradients that are averaged here
            bucket.kept = [None] * len(bucket.parameters)
            bucket.take(self.rank)
            bucket.send()
            bucket.hand_out()
            bucket.write()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            divide_each(gradients, float(self.layout.processes))


def sparse_weights(task: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the embeddings in `task` whose gradients are sparse."""
    weights = (one.weight for one in task.modules() if getattr(one, "sparse", False) is True and hasattr(one, "weight"))
    return {weight for weight in weights if isinstance(weight, nn.Parameter)}
