"""Functions and classes of Lightning's inner modules that public programs import; in Lightning most are private."""

import os
import random
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from ...trainer.optimization.optimizers import SchedulerConfig, read_optimizers
from ...trainer.resume.pickled import write_pickled
from ...trainer.resume.restore import rebuild_task
from .callbacks.early_stopping import EarlyStopping
from .callbacks.model_checkpoint import Checkpoint
from .module import named_hook
from .placeholders import UnsupportedError
from .utilities import apply_to_collection, distributed_is_initialized, has_len, move_data_to_device


# --- random numbers ---------------------------------------------------------------------------------------------------
def collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    """Return the states of the global generators of torch, numpy and Python."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if include_cuda:
        states["torch.cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return states


def set_rng_states(rng_state_dict: dict[str, Any]) -> None:
    """Set the global generators to states that `collect_rng_states` returned."""
    torch.set_rng_state(rng_state_dict["torch"])
    torch.cuda.set_rng_state_all(rng_state_dict.get("torch.cuda", []))
    if "numpy" in rng_state_dict:
        np.random.set_state(rng_state_dict["numpy"])
    version, state, gauss = rng_state_dict["python"]
    random.setstate((version, tuple(state), gauss))


# --- tensors and optimizers -------------------------------------------------------------------------------------------
def optimizer_to_device(optimizer: Optimizer, device: Any) -> None:
    """Move an optimizer's state to a device, but for the step counts, which torch reads on the CPU."""
    for parameter, state in optimizer.state.items():
        if isinstance(state, MutableMapping):
            state.update((name, move_data_to_device(one, device)) for name, one in state.items() if name != "step")
        else:
            optimizer.state[parameter] = apply_to_collection(state, Tensor, move_data_to_device, device)


def optimizers_to_device(optimizers: Iterable[Optimizer], device: Any) -> None:
    """Move the states of optimizers to a device."""
    for optimizer in optimizers:
        optimizer_to_device(optimizer, device)


def init_optimizers(model: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return new optimizers and schedulers of a module, from its `configure_optimizers`."""
    return read_optimizers(model.configure_optimizers())


def convert_fp_tensor(tensor: Tensor, dst_type: torch.dtype) -> Tensor:
    """Return a floating point tensor in another type, and any other tensor as it is."""
    return tensor.to(dst_type) if tensor.is_floating_point() else tensor


def has_meta_device(obj: Any, recurse: bool = True) -> bool:
    """Return whether a module, or an optimizer, has parameters or buffers that are not materialized."""
    if isinstance(obj, Optimizer):
        return any(one.is_meta for group in obj.param_groups for one in group["params"])
    return any(one.is_meta for one in (*obj.parameters(recurse), *obj.buffers(recurse)))


class ModuleMode:
    """Training modes of a module's parts, captured and restored."""

    def __init__(self) -> None:
        self.mode: dict[str, bool] = {}

    def capture(self, module: nn.Module) -> None:
        """Remember the mode of each part."""
        self.mode = {name: part.training for name, part in module.named_modules()}

    def restore(self, module: nn.Module) -> None:
        """Give each part the mode that it had."""
        for name, part in module.named_modules():
            part.training = self.mode.get(name, part.training)


# --- processes --------------------------------------------------------------------------------------------------------
def sync_ddp(result: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
    """Reduce a tensor over processes, in place; by default to the sum."""
    word = str(getattr(reduce_op, "name", None) or reduce_op or "sum").rpartition(".")[2].lower()
    mean, group = word in ("avg", "mean"), torch.distributed.group.WORLD if group is None else group
    kind = getattr(torch.distributed.ReduceOp, "SUM" if mean else word.upper())
    torch.distributed.all_reduce(result, op=kind, group=group)  # gloo has no mean
    size = torch.distributed.get_world_size(group)
    return result.copy_(result / size) if mean else result


def sync_ddp_if_available(result: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
    """Reduce a tensor over processes, where there is a process group."""
    return sync_ddp(result, group, reduce_op) if distributed_is_initialized() else result


def all_gather_ddp_if_available(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    """Return every process's tensor, stacked; without a process group the tensor itself."""
    if not distributed_is_initialized():
        return tensor
    if sync_grads:
        raise UnsupportedError("A gather with gradients is the module's: self.all_gather(tensor, sync_grads=True).")
    found = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(found, tensor.detach().contiguous(), group)
    return torch.stack(found)


def default_backend(device: torch.device) -> str:
    """Return torch's word for the backend of a kind of devices."""
    return torch.distributed.Backend.default_device_backend_map.get(device.type, "gloo")


def suggested_threads(num_processes: int = 1) -> int:
    """Return how many threads each of so many processes may have. Raises ValueError for less than one process."""
    if num_processes < 1:
        raise ValueError(f"`num_processes` should be >= 1, got {num_processes}.")
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


# --- data -------------------------------------------------------------------------------------------------------------
def set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    """Tell the samplers of a loader the epoch."""
    batches = getattr(dataloader, "batch_sampler", None)
    for sampler in (getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]


def is_shuffled(dataloader: Any) -> bool:
    """Return whether a loader draws the order of its samples."""
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset) or not hasattr(dataloader, "sampler"):
        return False
    batches = dataloader.batch_sampler
    return isinstance(dataloader.sampler if batches is None else getattr(batches, "sampler", batches), RandomSampler)


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """Deals out samples to processes, none of them twice: some have one more than others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not has_len(self.dataset):
            raise TypeError("The given dataset must implement the `__len__` method.")
        self.total_size = len(self.dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        order = torch.arange(self.total_size)
        if self.shuffle:
            order = torch.randperm(self.total_size, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[self.rank :: self.num_replicas].tolist())


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """Deals out the samples of another sampler to processes, none of them twice."""

    def __init__(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sampler, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self.dataset
        samples = list(sampler)
        return (samples[index] for index in super().__iter__())


# --- hooks ------------------------------------------------------------------------------------------------------------
def _called(trainer: Any, owner: Any, hook_name: str, what: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method, measured by the trainer's profiler, while the module is told the hook's name."""
    method, profiler = getattr(owner, hook_name), trainer.profiler
    if not callable(method):
        return None
    name = f"[{what}]{type(owner).__name__}.{hook_name}"
    with named_hook(trainer.lightning_module, hook_name), profiler.profile(name):
        return method(*args, **kwargs)


def call_module_hook(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    """Call a hook of the module, and return its result. Raises TypeError where there is none."""
    module = trainer.lightning_module if pl_module is None else pl_module
    if module is None:
        raise TypeError("No `LightningModule` is available to call hooks on.")
    return _called(trainer, module, hook_name, "LightningModule", *args, **kwargs)


def call_datamodule_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the data module, and return its result. Raises TypeError where there is none."""
    if trainer.datamodule is None:
        raise TypeError("No `LightningDataModule` is available to call hooks on.")
    return _called(trainer, trainer.datamodule, hook_name, "LightningDataModule", *args, **kwargs)


def call_strategy_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the strategy, and return its result."""
    return _called(trainer, trainer.strategy, hook_name, "Strategy", *args, **kwargs)


def call_callback_hooks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    """Call a hook of every callback, or of those that monitor a value, or of the others."""
    for callback in trainer.callbacks:
        if monitoring_callbacks in (None, isinstance(callback, (EarlyStopping, Checkpoint))):
            _called(trainer, callback, hook_name, "Callback", trainer, trainer.lightning_module, *args, **kwargs)


def callbacks_state_dict(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return the states of callbacks that have one, by their keys."""
    found = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    return {key: state for key, state in found.items() if state}


# --- checkpoints ------------------------------------------------------------------------------------------------------
def load_state(cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **cls_kwargs_new: Any) -> Any:
    """Build a module of a checkpoint's contents."""
    return rebuild_task(cls, checkpoint, None, None, strict, cls_kwargs_new)


def atomic_save(checkpoint: dict[str, Any], filepath: Any) -> None:
    """Write a checkpoint's contents as torch.save does, whole or not at all."""
    write_pickled(Path(filepath), checkpoint)


def is_max_limit_reached(current: int, maximum: int = -1) -> bool:
    """Return whether a count has reached its limit, if there is one."""
    return maximum != -1 and current >= maximum
