"""Copies of a task for the devices of a data-parallel step."""

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
    """Return a shallow copy of `module` for each of `devices`; the first one must be the module's own.

    Gradients of all copies reach the module's parameters, added up in the order of the devices. The first copy shares
    the module's buffers. On accelerators this is torch.nn.parallel.replicate, which CPU devices do not have.
    """
    if devices[0].type != "cpu":
        return list(parallel.replicate(module, list(devices), detach=not torch.is_grad_enabled()))
    # Not functional_call, which calls forward alone: a step is another method
    parameters, buffers = list(module.parameters()), list(module.buffers())
    trainable = [parameter for parameter in parameters if parameter.requires_grad and torch.is_grad_enabled()]
    flat: tuple[Tensor, ...] = _Broadcast.apply(len(devices), *trainable) if trainable else ()  # type: ignore[no-untyped-call]
    copies = []
    for index in range(len(devices)):
        # frozen parameters are shared: nothing flows back to them
        tensors = {id(parameter): parameter.detach() for parameter in parameters}
        own = flat[index * len(trainable) : (index + 1) * len(trainable)]
        tensors.update((id(parameter), part) for parameter, part in zip(trainable, own, strict=True))
        tensors.update((id(buffer), buffer if index == 0 else buffer.clone()) for buffer in buffers)
        copies.append(copy_modules(module, tensors))
    return copies


class _Broadcast(Function):
    """Hand the same tensors to several copies; add up their gradients in the order of the copies.

    Without it autograd adds first what was computed last.
    """

    @staticmethod
    def forward(ctx: Any, copies: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.copies = copies
        ctx.set_materialize_grads(False)
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
    """Copy buffers that a step reassigned on the first copy back to the task; in-place changes are there already."""
    for original, twin in zip(module.modules(), copy.modules(), strict=True):
        own, new = own_buffers(original), own_buffers(twin)
        for name, buffer in list(own.items()):
            value = new[name]
            if value is not buffer and value is not None and (buffer is None or value.data_ptr() != buffer.data_ptr()):
                own[name] = value.detach()


def log_as(task: "Task", samples: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Log on `task` what a copy of it logs for so many samples, unless the step names a batch_size."""
    # `Task.log` finds a metric's name by the object itself, which is in the task
    value = value.metric if isinstance(value, SharedMetric) else value
    task.log(name, value, *args, **({"batch_size": samples} | kwargs))


class SharedMetric:
    """Lets several copies of a task feed the one torchmetrics object that the task logs.

    A copy's own metric would count one chunk and be thrown away with the copy.
    """

    def __init__(self, metric: Any, device: torch.device) -> None:
        self.metric, self.device = metric, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count one chunk and return its value."""
        return self.metric(*to_device(args, self.device), **to_device(kwargs, self.device))

    forward = __call__

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Count one chunk."""
        self.metric.update(*to_device(args, self.device), **to_device(kwargs, self.device))

    def __getitem__(self, key: str) -> "SharedMetric":
        return SharedMetric(self.metric[key], self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.metric, name)


def find_metrics(task: nn.Module) -> list[tuple[str, str, Any]]:
    """Return parent's name, own name and object for every torchmetrics object of `task`, the outermost ones."""
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
    """Let `copy` use the task's own `metrics`, which live on `device`."""
    for path, name, metric in metrics:
        put_child(copy.get_submodule(path), name, SharedMetric(metric, device))
