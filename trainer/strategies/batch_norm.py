"""Batch normalisation with one mean and one variance over the batches of all replicas of a step.

On CUDA it is torch.nn.SyncBatchNorm; elsewhere the same is computed by differentiable sums over the ranks. Modules keep
their parameters and buffers: only their class is changed, and changed back.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.tensors import BATCH_NORM


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        # every rank's output depends on this rank's input through the sum, so the gradient is the sum over ranks, too
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return None, total


def _sum(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(group, tensor)  # type: ignore[no-untyped-call]
    return total


# not SyncBatchNorm itself, which DDP refuses on the CPU
class Synced(BATCH_NORM):  # type: ignore[misc]
    """Batch norm with statistics over all ranks in training mode."""

    process_group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...) by mean and variance over N and what follows C, of all ranks."""
        module: Any = self
        if not module.training:
            return super().forward(input)  # type: ignore[no-any-return]
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        over = [axis for axis in range(values.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(values.dim())]
        # the number of values goes along with their sums: ranks may have batches of different sizes
        own = values.new_tensor([values.numel() / values.shape[1]])
        sums = _sum(self.process_group, torch.cat([values.sum(over), own]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        # two passes, not mean(x^2) - mean(x)^2, which cancels in float32 where the mean is large
        variance = _sum(self.process_group, centred.square().sum(over)) / count
        normal: Tensor = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            normal = normal * module.weight.to(values.dtype).view(shape) + module.bias.to(values.dtype).view(shape)
        # torch keeps the unbiased variance (n / (n - 1)) but normalises by the biased one
        if module.track_running_stats:
            self._follow(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        return normal.to(input.dtype)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        module: Any = self
        module.num_batches_tracked.add_(1)
        share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
        module.running_var.lerp_(variance.to(module.running_var.dtype), share)


@cache
def synced(kind: Any, base: Any = Synced) -> Any:
    """Return the class `kind` with statistics over all ranks, which `base` computes; it has the same name.

    The base comes after `kind` in the order of inheritance, so that a forward of its own still runs, and what that
    calls by `super()` is synchronised.
    """
    return type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def synchronize(task: nn.Module, device: torch.device, group: dist.ProcessGroup) -> Callable[[], None]:
    """Compute the statistics of every batch norm in the task over the ranks of `group`; return what undoes it."""
    found: list[tuple[Any, Any]] = [(one, type(one)) for one in task.modules() if isinstance(one, BATCH_NORM)]
    found = [(module, kind) for module, kind in found if not issubclass(kind, nn.SyncBatchNorm)]
    base = Synced if device.type == "cpu" else nn.SyncBatchNorm
    for module, kind in found:
        # not another module in its place, as convert_sync_batchnorm does: `task.norm` must stay this object
        module.__class__ = synced(kind, base)
        module.process_group = group

    def undo() -> None:
        for module, kind in found:
            if type(module) is synced(kind, base):
                module.__class__ = kind
                del module.process_group

    return undo
