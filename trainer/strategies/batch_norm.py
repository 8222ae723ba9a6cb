"""Batch normalization with statistics computed over the batches of all replicas in a step.

Accelerators use torch.nn.SyncBatchNorm. On the CPU, differentiable sums over ranks produce the same result. Modules
keep their parameters and buffers. Only their classes change until the run ends.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.tensors import BATCH_NORM


class _Sum(torch.autograd.Function):
    """Differentiable sum over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        # the output on every rank depends on this rank's input, so the gradient is also a sum over ranks
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return None, total


def _sum(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(group, tensor)  # type: ignore[no-untyped-call]
    return total


# not SyncBatchNorm itself, which DDP rejects on the CPU
class Synced(BATCH_NORM):  # type: ignore[misc]
    """Batch norm that computes its statistics over all ranks in training mode."""

    process_group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape (N, C, ...) using statistics over all ranks and all dimensions except C."""
        module: Any = self
        if not module.training:
            return super().forward(input)  # type: ignore[no-any-return]
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(values.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(values.dim())]
        # one collective for the sums and the number of values, because ranks may have batches of different sizes
        size = values.new_tensor([values.numel() / values.shape[1]])
        sums = _sum(self.process_group, torch.cat([values.sum(dims), size]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        # two passes, not mean(x^2) - mean(x)^2, which loses precision in float32 if the mean is large
        variance = _sum(self.process_group, centred.square().sum(dims)) / count
        normal: Tensor = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            normal = normal * module.weight.to(values.dtype).view(shape) + module.bias.to(values.dtype).view(shape)
        # torch tracks the unbiased variance (n / (n - 1)) but normalizes by the biased one
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
    """Return a subclass of `kind` and `base` that computes statistics over all ranks and has the same name as `kind`.

    `kind` precedes `base` in the method resolution order. As a result, an overridden forward still runs, and its call
    to `super().forward` is synchronized.
    """
    return type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def synchronize(task: nn.Module, device: torch.device, group: dist.ProcessGroup) -> Callable[[], None]:
    """Synchronize every batch norm layer in the task across the ranks of `group`. Return a function to undo this."""
    norms: list[tuple[Any, Any]] = [(norm, type(norm)) for norm in task.modules() if isinstance(norm, BATCH_NORM)]
    norms = [(module, kind) for module, kind in norms if not issubclass(kind, nn.SyncBatchNorm)]
    base = Synced if device.type == "cpu" else nn.SyncBatchNorm
    for module, kind in norms:
        # convert_sync_batchnorm would make a new module, but `task.norm` must stay the same object
        module.__class__ = synced(kind, base)
        module.process_group = group

    def undo() -> None:
        for module, kind in norms:
            # leave a module alone if its class has been changed again since
            if type(module) is synced(kind, base):
                module.__class__ = kind
                del module.process_group

    return undo
