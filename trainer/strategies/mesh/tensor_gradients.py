"""Gradients of parameters that are replicated along the `tensor` axis.

Between a "column" layer and its "row" layer, each process computes with its shard of the activations. A parameter
between these layers therefore has a partial gradient on each process. Partial gradients are summed if the plan marks
the module as "replicated". If the plan lacks that entry, Legato raises an error during the first few steps.
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
"""Maximum number of steps whose gradients are compared. In the first step, for example, adapter gradients are zero."""
ROUNDING = 0.01
"""Relative difference allowed between gradients, because kernels may sum in different orders."""


class TensorGradients:
    """Sums gradients along the `tensor` axis according to the plan, and compares gradients during the first few steps.

    All processes along the axis must call `complete` after the last backward pass of a step.
    """

    def __init__(self, task: nn.Module, plan: Mapping[str, str], group: dist.ProcessGroup) -> None:
        self.group = group
        words = read_plan(task, plan, dist.get_world_size(group))
        modules = [task.get_submodule(name) for name, word in words.items() if word == REPLICATED]
        summed = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        self.summed = dict.fromkeys(summed)  # in plan order, which is the same on all processes
        self.uncompared = {
            name: parameter
            for name, parameter in task.named_parameters()
            if parameter.requires_grad and not is_cut(parameter)
        }
        # not in every step, because a comparison communicates every replicated gradient again
        self.steps = COMPARED_STEPS

    def complete(self) -> None:
        """Sum partial gradients. Raises TaskError if the plan does not match the gradients."""
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
            sums = flat.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view_as(gradient))

    def _compare(self) -> None:
        names, norms = [], []
        for name, parameter in self.uncompared.items():
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                # compared with one rank's gradient, which takes just two numbers per gradient
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
                continue  # a zero gradient, or an overflow under a loss scale
            is_summed, differs = self.uncompared.pop(name) in self.summed, difference > ROUNDING * norm
            if differs and not is_summed:
                partial.append(name)
            elif is_summed and not differs:
                doubled.append(name)
        refuse_partial(partial)
        refuse_doubled(doubled)


def is_cut(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is sharded along the `tensor` axis."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return any(axis == AXIS and place.is_shard() for axis, place in zip(axes, parameter.placements, strict=True))


def refuse_partial(names: list[str]) -> None:
    """Raise TaskError for parameters whose gradients are partial but not summed."""
    if names:
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name.rpartition(".")[0]) for name in names)
        entries = ", ".join(f'"{pattern}": "{REPLICATED}"' for pattern in patterns)
        raise TaskError(
            f"The gradients of {first_names(names)} differ between the processes along the tensor axis, because each "
            f"process has a shard of a layer. To sum these gradients, add to tensor_plan: {{{entries}}}."
        )


def refuse_doubled(names: list[str]) -> None:
    """Raise TaskError for parameters whose gradients would be summed even though each process has the full gradient."""
    if names:
        raise TaskError(
            f'tensor_plan marks {first_names(names)} as "{REPLICATED}", but the gradients are already equal on all '
            f"processes along the tensor axis, so their sum would be too large. Leave these modules out of the plan."
        )
