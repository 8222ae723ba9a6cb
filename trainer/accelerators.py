"""Device properties for every kind of accelerator. No other module mentions a specific kind.

This module calls torch's generic functions (torch.accelerator, the device's module). It mentions a specific device type
only if torch has no generic function.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

import torch

from ..base.environment import get_variable, set_default, unset_variable
from ..base.errors import ConfigError, did_you_mean

OTHER_NAMES = {"gpu": "cuda"}
ONE_RANK_A_DEVICE = ("nccl",)
"""Backends that do not support two ranks on the same device."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Maps each kind to the environment variable that restricts a process to some of a machine's devices."""
_CUBLAS, _FIXED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def find_kinds() -> list[str]:
    """Return the device types that this process can use: "cpu", and the accelerator that torch detects."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # the accelerator last: "auto" selects the last kind, and find_kind suggests it
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def find_kind(wanted: str) -> str:
    """Return the device type that trainer.accelerator selects. Raises ConfigError if torch finds no such device."""
    kinds, kind = find_kinds(), OTHER_NAMES.get(wanted, wanted)
    if kind == "auto":
        return kinds[-1]
    if kind not in kinds:
        raise ConfigError(
            f"trainer.accelerator={wanted!r}, but torch found no such device on this machine. Try "
            f"accelerator={kinds[-1]}.{did_you_mean(kind, kinds)}"
        )
    return kind


def has_streams(device: torch.device) -> bool:
    """Return whether the device has streams, which run asynchronously with respect to the host and each other."""
    return device.type not in ("cpu", "mps", "meta")  # torch has no streams for MPS


def name_of(device: torch.device) -> str:
    """Return the device's product name, or its type if torch does not know the name."""
    ask = _question(device, "get_device_name")
    return device.type if ask is None else str(ask(device))


def memory_of(device: torch.device) -> int | None:
    """Return a device's memory in bytes, or None for the host or if torch does not report it."""
    if (ask := _question(device, "recommended_max_memory")) is not None:  # torch.mps, which shares the host's memory
        return int(ask())
    ask = _question(device, "get_device_properties")
    return None if ask is None else getattr(ask(device), "total_memory", None)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of a device's tensors in bytes, or None for the host or if torch does not track it."""
    ask = _question(device, "max_memory_allocated")
    return None if ask is None else int(ask(device))


@cache
def pins_memory() -> bool:
    """Return whether torch can pin host memory for this process's accelerator."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _question(device: torch.device, name: str) -> Any:
    """Return a function from the device's module, such as torch.cuda.get_device_name, or None if there is none."""
    return getattr(getattr(torch, device.type, None), name, None)


def make_current(device: torch.device) -> None:
    """Make `device` the default device of its type, so that "cuda" in a task's code refers to the same device."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_for(device: torch.device, chosen: str | None = None, shared: bool = False) -> str:
    """Return the backends for a process group: one for tensors on the device, and gloo for tensors on the host.

    Args:
        chosen: the backend for the device's tensors; None selects torch's default for the device type.
        shared: whether multiple processes share the device.

    Raises ConfigError if torch has no backend for the device.
    """
    from torch import distributed

    kind = device.type
    backend = chosen or distributed.Backend.default_device_backend_map.get(kind, "")
    if shared and kind != "cpu" and backend in ONE_RANK_A_DEVICE:
        if chosen:
            raise ConfigError(
                f"process_group_backend={chosen} needs one device per process, but trainer.devices assigns the same "
                f"device to several processes. Omit process_group_backend to use gloo, or list each device once."
            )
        backend = "gloo"
    # a backend may be registered without device types
    kinds = distributed.Backend.backend_capability.get(backend, [kind] if chosen else [])
    if kind not in kinds and kind != "cpu":
        reason = f"its {backend} supports only {' and '.join(kinds)}" if backend else "it has no backend for them"
        raise ConfigError(
            f"Multiple processes on {kind} need a process group for {kind} tensors, but torch has none: {reason}. Use "
            f"one process (trainer.devices=1) or accelerator=cpu, or set process_group_backend to a plug-in's backend."
        )
    # other backends cannot send host tensors, such as loss weights, flags and names
    return backend if kind == "cpu" or backend in ("gloo", "mpi") else f"cpu:gloo,{kind}:{backend}"


def has_bfloat16(kind: str) -> bool:
    """Return whether the given device type supports bfloat16 natively. torch's emulation on older devices is slow."""
    ask = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    if ask is None:
        return True
    return bool(ask(including_emulation=False) if kind == "cuda" else ask())


@cache  # called in each step
def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of the device: float64, or float32 if it does not support float64."""
    # by kind, since a query would initialize the device; all other kinds have float64
    if device.type == "xpu":
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64


def autocasts(kind: str, dtype: torch.dtype) -> bool:
    """Return whether a device type can autocast to the given dtype. If not, torch warns and disables autocast."""
    if not torch.amp.is_autocast_available(kind):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast(kind, dtype=dtype):
            return torch.is_autocast_enabled(kind)


def autocast_kinds() -> list[str]:
    """Return the device types whose autocast dtypes are recorded: "cpu", "cuda", and this machine's accelerator."""
    module = torch.accelerator.current_accelerator()
    return [*dict.fromkeys(("cpu", "cuda", "cpu" if module is None else module.type))]


@cache
def built_with() -> dict[str, str | None]:
    """Return the versions of the vendor libraries that torch was built with or calls."""
    libraries = {name: getattr(torch.version, name, None) for name in ("hip", "xpu")}
    # from the build's config, as versions differ between builds; torch.backends.cudnn.version() would start CUDA
    built = re.findall(r"- (?:Intel\S+ )?(?:oneAPI )?(Math|MKL-DNN|CuDNN) \D*([\d.]+)", torch.__config__.show())
    names = {"Math": "mkl", "MKL-DNN": "onednn", "CuDNN": "cudnn_version"}  # `cudnn` is a switch
    libraries |= {names[library]: version for library, version in built}
    if torch.version.cuda:  # separate packages, which pip may replace
        for distribution in ("nvidia-cublas", f"nvidia-cublas-cu{torch.version.cuda.partition('.')[0]}"):
            with suppress(PackageNotFoundError):
                libraries["cublas"] = version_of(distribution)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, **{name: version for name, version in libraries.items() if version}}


@cache  # a build of torch has at most one accelerator; querying torch in each step would cost 3 us
def device_module() -> Any:
    """Return the torch module for this process's accelerator, such as torch.cuda, or None."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator)


def _module_in_use() -> Any:
    """Return the torch module for this process's accelerator, or None if nothing has used the device yet.

    Reading a device's generators would initialize the device, which fails in loader workers after a fork.
    """
    module = device_module()
    if module is None:
        return None
    # torch.mps has no is_initialized
    return module if getattr(module, "is_initialized", torch.accelerator.is_available)() else None


def seed_devices(key: int) -> None:
    """Seed the generators of all devices in use."""
    # called in each step: cheap without an accelerator
    module = None if device_module() is None else _module_in_use()
    if module is not None:
        # torch.mps has one device, and no manual_seed_all
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(key)


def generator_states() -> list[torch.Tensor]:
    """Return the generator states of all devices in use."""
    module = _module_in_use()
    return [] if module is None else [module.get_rng_state(index) for index in range(module.device_count())]


def set_generators(states: list[torch.Tensor]) -> None:
    """Set the generators to the states returned by `generator_states`."""
    module = _module_in_use()
    if module is not None:
        for index, state in enumerate(states):
            module.set_rng_state(state, index)


def visible_devices(wanted: str) -> tuple[str, str]:
    """Return the environment variable that selects this process's devices, and the names of these devices.

    Returns ("", "") if there is no such variable.

    Args:
        wanted: the value of trainer.accelerator.
    """
    kind, seen = OTHER_NAMES.get(wanted, wanted), find_kinds()[-1]
    kinds = [kind] if kind != "auto" else [seen] if seen in VISIBLE else [*VISIBLE]
    for variable in (VISIBLE[kind] for kind in kinds if kind in VISIBLE):
        if (names := get_variable(variable)) is not None:
            return variable, names.replace(" ", "")
    if kinds != [seen] or seen not in VISIBLE:
        return "", ""
    return VISIBLE[seen], ",".join(map(str, range(torch.accelerator.device_count())))


def assigned_device(device: torch.device) -> str:
    """Return the name of the only device that a launcher makes visible to this process; "" if more than one is visible.

    With SLURM's --gpus-per-task=1, each rank's device is cuda:0.
    """
    variables = [VISIBLE.get(device.type, ""), "ROCR_VISIBLE_DEVICES"]  # AMD devices also have type cuda
    names = next(filter(None, map(get_variable, variables)), "")
    properties = _question(device, "get_device_properties")
    # the UUID: in containers, all ranks may have number 0
    return "" if not names or "," in names else str(getattr(properties and properties(device), "uuid", names))


@contextmanager
def deterministic_cublas(device_type: str) -> Iterator[None]:
    """Set CUBLAS_WORKSPACE_CONFIG before CUDA starts, so that cuBLAS sums in a fixed order. Unset it on exit.

    Raises ConfigError on CUDA if the variable already has a value that does not fix the order.
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    workspace = get_variable(_CUBLAS)
    if workspace is not None and workspace not in _FIXED_WORKSPACES and device_type == "cuda":
        raise ConfigError(
            f"trainer.reproducible=bitwise and trainer.deterministic require {_CUBLAS} to be "
            f"{' or '.join(_FIXED_WORKSPACES)}, but it is {workspace!r}. Unset it so that Legato can choose the value."
        )
    set_default(_CUBLAS, _FIXED_WORKSPACES[0])
    try:
        yield
    finally:
        # a value that the program has set is preserved
        if workspace is None:
            unset_variable(_CUBLAS)
