"""Gradients of parameters that every process of the axis tensor has whole: equal everywhere, or summed until they are.

Between a column and its row each process computes with its part of the activations, so that a parameter there gets a
part of its gradient: "replicated" in a plan has these parts summed. Where the plan forgets it, the first steps tell.
"""

import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....base.errors import TaskError, first_names
from ....base.tensors import local_part
from .tensor_plan import AXIS, REPLICATED, read_plan

COMPARED_STEPS = 3
"""Steps in which gradients are compared, at most: those of adapters are zero in the first one."""
ROUNDING = 0.01
"""Share of its norm by which a gradient may differ: kernels may add up in another order, a part is another number."""


class TensorGradients:
    """The gradients of uncut parameters, summed as the plan says, and compared over the axis tensor in the first steps.

    Every process of the axis calls its methods, after a step's last backward.
    """

    def __init__(self, task: nn.Module, plan: Mapping[str, str], group: dist.ProcessGroup) -> None:
        self.group = group
        words = read_plan(task, plan, dist.get_world_size(group))
        modules = [task.get_submodule(name) for name, word in words.items() if word == REPLICATED]
        summed = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        self.summed = dict.fromkeys(summed)  # in the order of the plan, which is that of all processes
        self.uncompared = {
            name: parameter
            for name, parameter in task.named_parameters()
            if parameter.requires_grad and not is_cut(parameter)
        }
        # not in every step: a comparison sends every uncut gradient once more
        self.steps = COMPARED_STEPS

    def complete(self) -> None:
        """Sum the gradients that are partial. Raises TaskError where others differ between the processes."""
        if self.uncompared and self.steps:
            self._compare()
            self.steps -= 1
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.summed:
            if parameter.grad is not None:
                gradient = local_part(parameter.grad)
                kinds.setdefault(gradient.dtype, []).append(gradient)
        for gradients in kinds.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _compare(self) -> None:
        names, norms = [], []
        for name, parameter in self.uncompared.items():
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                # against one rank's and not as a spread over all: two numbers a gradient tell how far apart they are
                reference = local.clone()
                dist.broadcast(reference, group=self.group, group_src=0)
                names.append(name)
                norms.append(torch.stack([(local - reference).float().norm(), reference.float().norm()]))
        if not norms:
            return
        largest = torch.stack(norms)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        partial, doubled = [], []
        for name, (difference, norm) in zip(names, largest.tolist(), strict=True):
            if not 0.0 < norm < float("inf"):
                continue  # nothing to compare, or a scaled gradient that has overflowed
            is_summed, differs = self.uncompared.pop(name) in self.summed, difference > ROUNDING * norm
            if differs and not is_summed:
                partial.append(name)
            elif is_summed and not differs:
                doubled.append(name)
        refuse_partial(partial)
        refuse_doubled(doubled)


def is_cut(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is cut over the axis tensor."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return any(axis == AXIS and place.is_shard() for axis, place in zip(axes, parameter.placements, strict=True))


def refuse_partial(names: list[str]) -> None:
    """Raise TaskError for parameters of which each process has a part of the gradient."""
    if names:
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name.rpartition(".")[0]) for name in names)
        entries = ", ".join(f'"{pattern}": "{REPLICATED}"' for pattern in patterns)
        raise TaskError(
            f"The gradients of {first_names(names)} differ between the processes of the axis tensor: each has computed "
            f"them from its part of a cut layer. Have tensor_plan sum them: {{{entries}}}."
        )


def refuse_doubled(names: list[str]) -> None:
    """Raise TaskError for parameters that would be summed though each process has their whole gradient."""
    if names:
        raise TaskError(
            f'tensor_plan says "{REPLICATED}" for {first_names(names)}, whose gradients are equal on all processes of '
            f"the axis tensor: they see whole activations, and a sum would multiply them. Leave them out of the plan."
        )
