"""DDP with model parallelism. Each process has multiple devices, each holding part of the model."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....base.errors import ConfigError, first_names
from ....base.place import Place
from ...data.transfer import to_device
from ..ddp import DDPStrategy
from ..pieces import chunk_sizes, combine_losses, split
from ..strategy import refuse_duplicates
from .parts import Split, check_counts, cut, describe_missing_blocks, find_part_blocks, refuse_shared

if TYPE_CHECKING:
    from ....tasks.task import Task


def move_inputs(block: nn.Module, device: torch.device) -> RemovableHandle:
    """Add a hook that moves the inputs of `block` to `device`, where its parameters are."""
    # before the user's hooks, so that they see the inputs on the block's device
    return block.register_forward_pre_hook(partial(_move_inputs, device), prepend=True, with_kwargs=True)


def _move_inputs(
    device: torch.device, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].device == device:
        return None  # the usual case within a part: 2 us, instead of 6 us to traverse the arguments
    return to_device(args, device), to_device(kwargs, device)


def move_parts(task: nn.Module, parts: Iterable[tuple[Iterable[nn.Module], torch.device]], rest: torch.device) -> None:
    """Move each part to its device, and all of the task's other tensors to the `rest` device."""
    placed: set[nn.Module] = set()
    for modules, device in parts:
        for module in modules:
            placed.update(module.to(device).modules())
    for module in task.modules():
        if placed.isdisjoint(module.modules()):
            module.to(rest)  # the module's own method, which an LSTM's flat weights need
        elif module not in placed:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(rest)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(rest))


log = logging.getLogger("legato")


class DDPModelParallelStrategy(DDPStrategy):
    """Multiple devices per process, each holding part of the model. DDP averages gradients across processes."""

    name = "ddp_model_parallel"

    def __init__(
        self,
        *,
        devices_per_replica: int = 2,
        split: Split = "auto",
        micro_batches: int = 1,
        **options: Any,
    ) -> None:
        """Set the strategy's options.

        Args:
            devices_per_replica: number of devices per process.
            split: number of blocks in each part; "auto" balances the parts by their size in bytes.
            micro_batches: number of micro-batches per batch.

        The other arguments are the same as for the ddp strategy. `elastic` is not supported.
        """
        super().__init__(**options)
        self.parts_wanted = devices_per_replica
        least = {"devices_per_replica": (devices_per_replica, 2), "micro_batches": (micro_batches, 1)}
        for name, (number, smallest) in least.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < smallest:
                raise ConfigError(f"strategy=ddp_model_parallel: expected {name} >= {smallest}, got {number!r}.")
        check_counts(split, self.parts_wanted)
        self.split, self.micro_batches = split, micro_batches
        self.cuts_batches = micro_batches > 1
        self.device_hooks: list[RemovableHandle] = []
        """Forward pre-hooks that move the inputs of blocks to their devices."""
        self.cut_task: nn.Module | None = None
        """The task, if this strategy placed it on the devices."""

    def _require_elastic(self) -> None:
        raise ConfigError("elastic=true needs strategy=ddp; ddp_model_parallel cannot replace processes.")

    # --- processes --------------------------------------------------------------------------------------------------
    def local_processes(self, devices: Sequence[torch.device]) -> int:
        """Return the number of processes, each of which has `devices_per_replica` devices.

        Raises ConfigError if there are devices left over.
        """
        return len(self._group_devices(devices))

    def _group_devices(self, devices: Sequence[torch.device]) -> list[list[torch.device]]:
        """Return the devices for each process on this machine. Each process gets consecutive devices."""
        size = self.parts_wanted
        processes, rest = divmod(len(devices), size)
        if rest or not processes:
            near = " or ".join(str(count * size) for count in (processes, processes + 1) if count)
            raise ConfigError(
                f"strategy=ddp_model_parallel gives each process devices_per_replica={size} devices, but "
                f"trainer.devices lists {len(devices)} ({processes} x {size} + {rest}). Use {near} devices. On the "
                f"CPU, you can use any number of devices."
            )
        return [list(devices[first : first + size]) for first in range(0, len(devices), size)]

    def join(self, place: Place, devices: Sequence[torch.device], precision: str | int) -> None:
        """Join the process group and select the devices of the local rank. The last device computes the loss."""
        size = self.parts_wanted
        if devices[0].type == "cpu":  # all CPU devices are the same device, so there are always enough
            devices = [torch.device("cpu")] * (size * place.local_world_size)
        groups = self._group_devices(devices)
        if place.local_world_size > len(groups):
            raise ConfigError(
                f"{place.local_world_size} processes with devices_per_replica={size} need {place.local_world_size} x "
                f"{size} = {place.local_world_size * size} devices on this machine, but there are {len(devices)}. "
                f"Start {len(groups)} processes, or add devices to trainer.devices."
            )
        self.parts = groups[place.local_rank]
        refuse_duplicates(self.parts)
        # self.device is the last part's device. Logits are the largest activations of a language model, so the batch
        # moves to their device. self(x), generators on self.device and metrics then work unchanged.
        super().join(place, [group[-1] for group in groups], precision)
        self.devices = list(self.parts)

    def _only_device(self) -> torch.device | None:
        """Return None, because this process has multiple devices and DDP must not move inputs."""
        return None

    # --- the task ---------------------------------------------------------------------------------------------------
    def place_task(self, task: "Task") -> None:
        """Move the task's parts to their devices, unless the task has already done so.

        Raises ConfigError if the task neither places its modules nor has blocks to split, or if it does not support
        micro-batches.
        """
        self.task = task
        if self.micro_batches > 1:
            self._refuse_pieces(task)
        self._sync_batch_norm(task)
        self.precision.place(task)
        self._remove_hooks()
        # already placed, by the task in configure_model or by an earlier call to the trainer
        used = {parameter.device for parameter in task.parameters()}
        if len(used) > 1:
            self._keep_placement(task)
            return
        blocks = find_part_blocks(task)
        if blocks:
            parts = cut(blocks, len(self.parts), self.split)
            refuse_shared(task, parts)
            self._place_parts(task, [[block.module for block in part] for part in parts])
            if self.place.rank == 0:
                for index, part in enumerate(parts):
                    names = " .. ".join(dict.fromkeys((part[0].name, part[-1].name)))
                    log.info("Part %d: %s (%s bytes)", index, names, f"{sum(block.size for block in part):,}")
            return
        from ....tasks.task import Task

        if type(task).configure_model is Task.configure_model or len(set(self.parts)) > 1:
            raise ConfigError(f"{describe_missing_blocks(task)} Or move modules to self.devices in configure_model.")
        self._keep_placement(task)  # if all devices are the same, a placement by the task cannot be detected

    def _place_parts(self, task: "Task", parts: Sequence[Sequence[nn.Module]]) -> None:
        move_parts(task, zip(parts, self.parts, strict=True), self.parts[-1])
        for modules, device in zip(parts, self.parts, strict=True):
            for module in modules:
                self.device_hooks.append(move_inputs(module, device))
        self.cut_task = task

    def _remove_hooks(self) -> None:
        for handle in self.device_hooks:
            handle.remove()
        self.device_hooks = []

    def _keep_placement(self, task: "Task") -> None:
        """Keep the task's own placement. Raises ConfigError if a tensor is not on one of this process's devices."""
        if self.split != "auto":
            raise ConfigError(
                f"split={self.split} needs blocks, but {type(task).__name__} places its own modules. Leave split out."
            )
        tensors = [*task.named_parameters(), *task.named_buffers()]
        astray = [f"{name} ({tensor.device})" for name, tensor in tensors if tensor.device not in self.parts]
        if astray:
            raise ConfigError(
                f"{type(task).__name__} has tensors outside of self.devices ({', '.join(map(str, self.parts))}): "
                f"{first_names(astray)}. Move these tensors to self.devices in configure_model."
            )

    def _refuse_pieces(self, task: "Task") -> None:
        if task.trainer.stage == "fit" and not task.automatic_optimization:
            raise ConfigError(
                f"micro_batches={self.micro_batches} calls training_step for each micro-batch, but under manual "
                f"optimization, each call would update the weights. Leave micro_batches out."
            )
        if task.trainer.sync_batchnorm:
            raise ConfigError(
                "sync_batchnorm=true needs full batches, but micro_batches splits them. Leave one of these options out."
            )

    def teardown(self) -> None:
        """Remove the hooks. If this strategy placed the task, move it back to the host."""
        self._remove_hooks()
        if self.cut_task is not None and len(set(self.parts)) > 1:
            self.cut_task.cpu()
        self.cut_task = None
        super().teardown()

    # --- the step ---------------------------------------------------------------------------------------------------
    def training_step(self, arguments: Sequence[Any], replica: int | None, last: bool) -> Any:
        """Call training_step, once per micro-batch if the batch is split."""
        if self.micro_batches == 1 or self.ddp is not None:
            return super().training_step(arguments, replica, last)
        if self.by_replica:
            self._open_replica(replica)
        with self.precision.forward_context():
            return self._call_step("training_step", arguments)

    def _call_step(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call the task's method `name` for each micro-batch. Return the combined output."""
        if self.micro_batches == 1:
            return super()._call_step(name, arguments)
        assert self.task is not None
        batch, *rest = arguments
        step, metrics, samples = getattr(self.task, name), self.task.trainer.metrics, self.task.count_samples(batch)
        sizes, batch_samples, outputs = chunk_sizes(samples, self.micro_batches), metrics.samples, []
        for piece, size in zip(split(batch, sizes), sizes, strict=True):
            metrics.samples = size  # the weight of logged values
            outputs.append(step(piece, *rest))
        metrics.samples = batch_samples
        return combine_losses(outputs, sizes, self.device)
