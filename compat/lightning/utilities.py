"""Functions from lightning.pytorch.utilities and lightning.fabric.utilities."""

import gc
import importlib.util
import inspect
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection as apply_to_collection
from lightning_utilities.core.enums import StrEnum
from torch import Tensor, nn
from torch.distributed import group as group
from torch.utils.data import IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from ...base.environment import get_variable, set_variable
from ...base.errors import WorkerError
from ...tasks.data_hooks import DataHooks
from .rank_zero import rank_prefixed_message, rank_zero_warn

log = logging.getLogger("lightning.pytorch")

LightningEnum = StrEnum

max_seed_value, min_seed_value = (1 << 32) - 1, 0
FLOAT16_EPSILON, FLOAT32_EPSILON, FLOAT64_EPSILON = (
    torch.finfo(dtype).eps for dtype in (torch.float16, torch.float32, torch.float64)
)
LIGHTNING_LOGO = ""
CPU_DEVICE = torch.device("cpu")


def cli_lightning_logo() -> None:
    """Print nothing, because Legato has no logo."""


def package_available(package_name: str) -> bool:
    """Return whether a package is installed."""
    return importlib.util.find_spec(package_name) is not None


def get_init_args(frame: FrameType) -> Any:
    """Return the arguments of the `__init__` call in a frame, including its keyword arguments."""
    values: Any = inspect.getargvalues(frame)
    return {name: values.locals[name] for name in values.args[1:]} | values.locals.get(values.keywords or "", {})


# --- seeds --------------------------------------------------------------------------------------------------------


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed the Python, NumPy and torch random number generators, set PL_GLOBAL_SEED, and return the seed.

    Args:
        seed: The seed. None: the environment variable PL_GLOBAL_SEED, or 0 if it is not set.
        workers: Stored in PL_SEED_WORKERS. Legato always seeds loader workers by batch position.

    Raises ValueError for a seed that NumPy does not accept.
    """
    if seed is None:
        variable = get_variable("PL_GLOBAL_SEED")
        if variable is None and verbose:
            rank_zero_warn("No seed found, seed set to 0")
        try:
            seed = int(variable or 0)
        except ValueError:
            raise ValueError(f"Invalid seed specified via PL_GLOBAL_SEED: {variable!r}") from None
    seed = int(seed)
    if not min_seed_value <= seed <= max_seed_value:
        raise ValueError(f"{seed} is not in bounds, numpy accepts from {min_seed_value} to {max_seed_value}")
    if verbose:
        log.info(rank_prefixed_message(f"Seed set to {seed}", launched_rank()))
    # in the environment, for ranks that start later
    set_variable("PL_GLOBAL_SEED", str(seed))
    set_variable("PL_SEED_WORKERS", str(int(workers)))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def launched_rank() -> int | None:
    """Return this process's rank from the launcher's environment variables; None if there is no launcher."""
    return next((int(rank) for rank in map(get_variable, ("RANK", "LOCAL_RANK", "SLURM_PROCID")) if rank), None)


def reset_seed() -> None:
    """Reset all random generators to the seed set by `seed_everything`, or do nothing if it was not called."""
    seed = get_variable("PL_GLOBAL_SEED")
    if seed is not None:
        seed_everything(int(seed), get_variable("PL_SEED_WORKERS") == "1", verbose=False)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the states of all random number generators when the context exits."""
    cuda = torch.cuda.get_rng_state_all() if include_cuda and torch.cuda.is_available() else []
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


# --- batches and loaders --------------------------------------------------------------------------------------------


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Move the tensors in a collection, and other objects that have a `to` method, to a device."""
    return DataHooks().transfer_batch_to_device(batch, torch.device(device), 0)


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Return a collection with its tensors detached and optionally moved to the CPU."""
    return apply_to_collection(in_dict, Tensor, lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach())


def has_iterable_dataset(dataloader: object) -> bool:
    """Return whether a loader's dataset is a stream."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: object) -> int | None:
    """Return the length of a loader; None if the length is unknown."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


# --- modules --------------------------------------------------------------------------------------------------------


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and the norm of all gradients as `grad_{norm_type}_norm_total`.

    Raises ValueError if `norm_type` is not positive.
    """
    kind = float(norm_type)
    if kind <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {kind}")
    norms = {
        f"grad_{kind}_norm{group_separator}{name}": parameter.grad.detach().norm(kind)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        device = next(iter(norms.values())).device
        norms[f"grad_{kind}_norm_total"] = torch.stack([norm.to(device) for norm in norms.values()]).norm(kind)
    return norms


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None
) -> int:
    """Return the number of floating-point operations in a forward pass and, if `loss_fn` is set, its backward pass."""
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


class DeviceDtypeMixin(nn.Module):
    """A module with the device and dtype of its parameters as attributes."""

    @property
    def device(self) -> torch.device:
        """The parameters' device, or the CPU if there are no parameters."""
        return next((parameter.device for parameter in self.parameters()), CPU_DEVICE)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype, or torch's default dtype if there are no parameters."""
        dtypes = (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())
        return next(dtypes, torch.get_default_dtype())


def original_module(model: Any) -> nn.Module | None:
    """Return the module that torch.compile wrapped to create `model`; None if `model` is not compiled."""
    if type(model).__name__ != "OptimizedModule" or not isinstance(model, nn.Module):
        return None
    return next(model.children())


# --- memory ---------------------------------------------------------------------------------------------------------


def is_oom_error(exception: BaseException) -> bool:
    """Return whether an error, possibly from a worker process, means that the device or the host ran out of memory."""
    words = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")
    return isinstance(exception, (RuntimeError, WorkerError)) and any(word in str(exception) for word in words)


def garbage_collection_cuda() -> None:
    """Free unused memory on the host and on GPUs."""
    # before emptying the cache, because cycles, such as an exception and its frames, keep tensors alive
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# --- dictionaries, arguments and names ------------------------------------------------------------------------------


class GradClipAlgorithmType(LightningEnum):
    """Gradient clipping algorithms."""

    VALUE = "value"
    NORM = "norm"


def main() -> None:
    """Print that checkpoints need no upgrade."""
    print("Legato reads checkpoints from all Lightning 2 versions, so there is nothing to upgrade.")


# --- files ----------------------------------------------------------------------------------------------------------


def get_filesystem(path: str | Path, **kwargs: Any) -> Any:
    """Return the fsspec filesystem for a path. Raises ModuleNotFoundError if fsspec is not installed."""
    return importlib.import_module("fsspec.core").url_to_fs(str(path), **kwargs)[0]


def load_file(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Load an object saved by `torch.save` from a path, file or URL. weights_only=False can execute arbitrary code."""
    from .checkpoint import read

    if not isinstance(path_or_url, (str, Path)):
        return read(path_or_url, map_location, weights_only)
    if str(path_or_url).startswith("http"):
        return torch.hub.load_state_dict_from_url(str(path_or_url), map_location=map_location, weights_only=True)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return read(file, map_location, weights_only)


def is_local_file_protocol(path: str | Path) -> bool:
    """Return whether a path is on the local file system."""
    return "://" not in str(path) or str(path).startswith("file://")


def distributed_is_initialized() -> bool:
    """Return whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def num_cuda_devices() -> int:
    """Return the number of CUDA devices."""
    return torch.cuda.device_count()
