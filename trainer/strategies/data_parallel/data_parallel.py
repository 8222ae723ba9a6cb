"""Data parallelism in one process: each batch is scattered across multiple devices, as in nn.DataParallel."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ....base.errors import ConfigError, add_note
from ....base.torch_private import is_compiled
from ..pieces import chunk_sizes, combine, combine_losses, split
from ..strategy import Strategy
from .copies import copy_to_devices, find_metrics, keep_buffers, log_as, share_metrics

if TYPE_CHECKING:
    from ....tasks.task import Task


class DataParallelStrategy(Strategy):
    """One process with multiple devices. Every batch is split across all devices, regardless of the number of replicas.

    A single thread launches the chunks of a batch one after another. Kernels run asynchronously, so one device computes
    while the next chunk is being launched. In the backward pass, autograd uses one thread per device.

    Each accelerator draws random numbers from its own generator, keyed by step, replica and chunk. CPU devices share
    the host's generator. As a result, the random numbers for a batch depend on the number of devices.
    """

    name = "data_parallel"

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[str, str, Any]] = []
        self.checked_steps: set[str] = set()

    # --- the task ---------------------------------------------------------------------------------------------------
    def prepare(self, task: "Task", optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the task for training. Raises ConfigError for settings that do not work on multiple devices."""
        prepared = super().prepare(task, optimizers)
        if len(self.devices) > 1:
            self._refuse_unsupported(task)
        self.cuts_batches = len(self.devices) > 1
        self.metrics = find_metrics(task)
        self.checked_steps = set()
        return prepared

    def teardown(self) -> None:
        """Release the task's metrics."""
        self.metrics = []
        super().teardown()

    def _refuse_unsupported(self, task: "Task") -> None:
        where = f"strategy=data_parallel on {len(self.devices)} devices"
        if not task.automatic_optimization:
            raise ConfigError(
                f"{where} cannot run a task with automatic_optimization=False, because training_step would update "
                f"copies of the weights, which are discarded after each batch. Use strategy=ddp or devices=1."
            )
        if task.trainer.compile or any(map(is_compiled, task.modules())):
            raise ConfigError(
                f"{where} cannot run compiled steps, because they use the weights on one device instead of each "
                f"device's copy. Use strategy=ddp or compile=false."
            )
        if task.trainer.reproducible == "bitwise":
            raise ConfigError(
                f"{where} splits each batch, so the bits of the results depend on the number of devices. "
                f"reproducible=bitwise does not allow this. Use strategy=ddp or reproducible=order."
            )

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Run training_step on each chunk of the batch. Return the combined output."""
        if self.by_replica:
            self._open_replica(replica)
        with self.precision.forward_context():
            return self._run_split("training_step", arguments)

    def evaluation_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run the task's method `name` on each chunk of the batch. Return the combined output."""
        with self.precision.forward_context():
            return self._run_split(name, arguments)

    def _run_split(self, name: str, arguments: Sequence[Any]) -> Any:
        task, root = self.task, self.device
        assert task is not None
        if len(self.devices) == 1:
            return getattr(task, name)(*arguments)
        batch, *rest = arguments
        sizes = chunk_sizes(task.count_samples(batch), len(self.devices))
        devices = self.devices[: len(sizes)]
        chunks = split(batch, sizes, devices)
        if len(chunks) == 1:  # for example, a batch with one sample
            return getattr(task, name)(*arguments)
        # copied in each step, because weights have changed and gradients flow back through the copies (_Broadcast)
        copies = copy_to_devices(task, devices)
        # one key per device, drawn from the host's generator, which is keyed by step and replica
        keys = [None] * len(copies) if root.type == "cpu" else torch.randint(2**62, (len(copies),)).tolist()
        attributes, outputs = dict(copies[0].__dict__), []
        for copy, chunk, size, device, key in zip(copies, chunks, sizes, devices, keys, strict=True):
            copy.__dict__["log"] = partial(log_as, task, size)
            share_metrics(copy, self.metrics, root)
            self.device = device  # the step creates tensors on this device
            try:
                with on_device(device):
                    if key is not None:
                        torch.get_device_module(device).manual_seed(key)
                    outputs.append(_step_of(copy, task, name)(chunk, *rest))
            except BaseException as error:
                add_note(error, f"This was raised on device {len(outputs)} of {len(self.devices)} ({device}).")
                raise
            finally:
                self.device = root
        keep_buffers(task, copies[0])
        if name not in self.checked_steps:
            self.checked_steps.add(name)
            _warn_of_lost_attributes(name, attributes, copies[0].__dict__)
        return (combine_losses if name == "training_step" else combine)(outputs, sizes, root)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that makes `device` the current device. On the CPU, it does nothing."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _step_of(copy: "Task", task: "Task", name: str) -> Any:
    """Return the step method of `copy`. If an instance attribute binds that method to `task`, rebind it to `copy`."""
    step = getattr(copy, name)
    return MethodType(step.__func__, copy) if getattr(step, "__self__", None) is task else step


def _warn_of_lost_attributes(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    lost = [key for key, value in after.items() if key != "log" and (key not in before or before[key] is not value)]
    if lost:
        warnings.warn(
            f"{name} assigned self.{', self.'.join(lost)}, but strategy=data_parallel runs {name} on copies of the "
            f"task and drops them after each batch. To keep values, use self.log, a registered buffer or strategy=ddp.",
            stacklevel=2,
        )
