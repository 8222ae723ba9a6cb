"""MeshReducer: gradients on a mesh, which FSDP sends in backward, and those of layers that are cut over processes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...processes.collectives import Collectives
from ..reducers import Reducer


class MeshReducer(Reducer):
    """Lets FSDP send gradients in the last backward of a step, and adds up what tensor parallelism leaves partial."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], root: FSDPModule | None, is_cut: bool, ranks: Collectives
    ) -> None:
        """`root`: the outermost sharded module. `is_cut`: whether layers are cut over processes."""
        super().__init__(parameters)
        self.root, self.is_cut, self.ranks = root, is_cut, ranks
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
        for parameter in self.parameters if self.is_cut else ():
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            # with "sequence" in a plan a norm's weight sees a part of the sequence: torch leaves its gradient a partial
            # sum
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradient is finite in every rank's part of it."""
        # the ranks must decide alike whether to take the step, but an inf may lie in one rank's shard only
        finite = super().are_finite(parameters)
        return not self.ranks.all_reduce(torch.tensor([float(not finite)]), "max").item()
