"""Copies of a task for the devices in a data-parallel step."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import parallel

from ....base.torch_private import copy_modules, own_buffers, put_child
from ...data.transfer import to_device

if TYPE_CHECKING:
    from ....tasks.task import Task

ModuleType = TypeVar("ModuleType", bound=nn.Module)


def copy_to_devices(module: ModuleType, devices: Sequence[torch.device]) -> list[ModuleType]:
    """Return a shallow copy of `module` for each device. The module must be on the first device.

    The gradients of all copies accumulate in the module's parameters, in device order. The first copy shares the
    module's buffers. On accelerators, this function calls torch.nn.parallel.replicate, which does not support CPU
    devices.
    """
    if devices[0].type != "cpu":
        return list(parallel.replicate(module, list(devices), detach=not torch.is_grad_enabled()))
    # not functional_call, which can only call forward, not a step
    parameters, buffers = list(module.parameters()), list(module.buffers())
    trainable = [parameter for parameter in parameters if parameter.requires_grad and torch.is_grad_enabled()]
    flat: tuple[Tensor, ...] = _Broadcast.apply(len(devices), *trainable) if trainable else ()  # type: ignore[no-untyped-call]
    copies = []
    for index in range(len(devices)):
        # frozen parameters are shared, because they receive no gradient
        tensors = {id(parameter): parameter.detach() for parameter in parameters}
        broadcast = flat[index * len(trainable) : (index + 1) * len(trainable)]
        tensors.update((id(parameter), value) for parameter, value in zip(trainable, broadcast, strict=True))
        tensors.update((id(buffer), buffer if index == 0 else buffer.clone()) for buffer in buffers)
        copies.append(copy_modules(module, tensors))
    return copies


class _Broadcast(Function):
    """Broadcasts tensors to multiple copies. The backward pass sums the gradients in the order of the copies.

    Without this class, autograd would sum the gradients in whatever order it computes them.
    """

    @staticmethod
    def forward(ctx: Any, copies: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.copies = copies
        ctx.set_materialize_grads(False)  # the gradient of an unused copy is None, not zeros
        return tuple(tensor.detach() for _ in range(copies) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(gradients) // ctx.copies
        return (None, *(_add(gradients[index::count]) for index in range(count)))


def _add(gradients: Sequence[Tensor | None]) -> Tensor | None:
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def keep_buffers(module: nn.Module, copy: nn.Module) -> None:
    """Copy to the task any buffers that a step reassigned on the first copy.

    This is not necessary for in-place changes, because the first copy shares the task's buffers.
    """
    for original, twin in zip(module.modules(), copy.modules(), strict=True):
        buffers, new = own_buffers(original), own_buffers(twin)
        for name, buffer in list(buffers.items()):
            value = new[name]
            if value is not buffer and value is not None and (buffer is None or value.data_ptr() != buffer.data_ptr()):
                buffers[name] = value.detach()


def log_as(task: "Task", samples: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Log a copy's value on `task`. If the step does not set batch_size, use `samples` as the batch size."""
    # `Task.log` finds the name of a metric by identity, so it needs the task's object
    value = value.metric if isinstance(value, SharedMetric) else value
    task.log(name, value, *args, **({"batch_size": samples} | kwargs))


class SharedMetric:
    """Forwards the updates of all copies to the task's torchmetrics object.

    A separate metric on each copy would see only one chunk and would be discarded with the copy.
    """

    def __init__(self, metric: Any, device: torch.device) -> None:
        self.metric, self.device = metric, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update the metric with a chunk and return the chunk's value."""
        return self.metric(*to_device(args, self.device), **to_device(kwargs, self.device))

    forward = __call__

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the metric with a chunk."""
        self.metric.update(*to_device(args, self.device), **to_device(kwargs, self.device))

    def __getitem__(self, key: str) -> "SharedMetric":
        return SharedMetric(self.metric[key], self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.metric, name)


def find_metrics(task: nn.Module) -> list[tuple[str, str, Any]]:
    """Return (name of the parent, name in the parent, metric) for each outermost torchmetrics object in `task`."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return []
    kinds = (library.Metric, library.MetricCollection)
    inner = {id(child) for module in task.modules() if isinstance(module, kinds) for child in module.modules()}
    return [
        (path, name, child)
        for path, module in task.named_modules()
        if id(module) not in inner
        for name, child in module.named_children()
        if isinstance(child, kinds)
    ]


def share_metrics(copy: nn.Module, metrics: Sequence[tuple[str, str, Any]], device: torch.device) -> None:
    """Replace the metrics in `copy` with the task's `metrics`, which are on `device`."""
    for path, name, metric in metrics:
        put_child(copy.get_submodule(path), name, SharedMetric(metric, device))
