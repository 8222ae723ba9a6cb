"""Accelerators: what a run asks of a device of any kind. Only this module names kinds.

It asks torch's generic functions (torch.accelerator, the device's module). What is said of a kind by name is what torch
has no question for.
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
"""Backends that refuse two ranks on one device."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable by which a process is given some of a machine's devices, by kind."""
_CUBLAS, _FIXED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def find_kinds() -> list[str]:
    """Return the kinds of device that this process can use: "cpu", and the accelerator that torch sees."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # the accelerator last: "auto" means the last kind, and find_kind suggests it
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def find_kind(wanted: str) -> str:
    """Return the kind of device that trainer.accelerator names. Raises ConfigError where torch sees none."""
    kinds, kind = find_kinds(), OTHER_NAMES.get(wanted, wanted)
    if kind == "auto":
        return kinds[-1]
    if kind not in kinds:
        raise ConfigError(
            f"trainer.accelerator={wanted!r}, but torch sees no such device here; try accelerator={kinds[-1]}."
            f"{did_you_mean(kind, kinds)}"
        )
    return kind


def has_streams(device: torch.device) -> bool:
    """Return whether the device has streams of work that run behind the host, and beside each other."""
    return device.type not in ("cpu", "mps", "meta")  # torch has no streams of MPS


def name_of(device: torch.device) -> str:
    """Return the name of the device's product; where torch has none, its kind."""
    ask = _question(device, "get_device_name")
    return device.type if ask is None else str(ask(device))


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory of a device; None for the host, and where torch cannot tell."""
    if (ask := _question(device, "recommended_max_memory")) is not None:  # of torch.mps, in the host's memory
        return int(ask())
    ask = _question(device, "get_device_properties")
    return None if ask is None else getattr(ask(device), "total_memory", None)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors have taken on a device; None for the host, and where torch does not count."""
    ask = _question(device, "max_memory_allocated")
    return None if ask is None else int(ask(device))


@cache
def pins_memory() -> bool:
    """Return whether torch can pin the host's memory for this process's accelerator."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _question(device: torch.device, name: str) -> Any:
    """Return a function of the device's module, such as torch.cuda.get_device_name; None where it has none."""
    return getattr(getattr(torch, device.type, None), name, None)


def make_current(device: torch.device) -> None:
    """Make this the device that its kind without a number means, in a task's own code too."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_for(device: torch.device, chosen: str | None = None, shared: bool = False) -> str:
    """Return the backends of a process group: for tensors on this device, and gloo for those on the host.

    chosen: the backend of the device's tensors; None: torch's default for the kind of device.
    shared: several processes use this device.

    Raises ConfigError where torch has none.
    """
    from torch import distributed

    kind = device.type
    backend = chosen or distributed.Backend.default_device_backend_map.get(kind, "")
    if shared and kind != "cpu" and backend in ONE_RANK_A_DEVICE:
        if chosen:
            raise ConfigError(
                f"process_group_backend={chosen} takes a device for each process, but trainer.devices gives several "
                f"the same one. Leave process_group_backend out (gloo), or name each device once."
            )
        backend = "gloo"
    # torch knows no kinds of a backend that was registered without them
    kinds = distributed.Backend.backend_capability.get(backend, [kind] if chosen else [])
    if kind not in kinds and kind != "cpu":
        has = f"its {backend} takes those of {' and '.join(kinds)}" if backend else "it knows no backend"
        raise ConfigError(
            f"Several processes on {kind} need a process group for {kind} tensors, and torch has none: {has}. Use one "
            f"process (trainer.devices=1), accelerator=cpu, or the backend of a plug-in by process_group_backend."
        )
    # others have no tensors of the host, where loss weights, flags and names live
    return backend if kind == "cpu" or backend in ("gloo", "mpi") else f"cpu:gloo,{kind}:{backend}"


def has_bfloat16(kind: str) -> bool:
    """Return whether devices of this kind compute in bfloat16 themselves; torch's emulation for older ones is slow."""
    ask = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    if ask is None:
        return True
    return bool(ask(including_emulation=False) if kind == "cuda" else ask())


@cache  # asked in each step
def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which the device adds up most exactly: float64, or float32 where it has no other."""
    # to ask a device starts it, and of the others torch says that they have float64
    if device.type == "xpu":
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64


def autocasts(kind: str, dtype: torch.dtype) -> bool:
    """Return whether autocast to this dtype does anything on a kind of device; else torch warns and switches it off."""
    if not torch.amp.is_autocast_available(kind):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast(kind, dtype=dtype):
            return torch.is_autocast_enabled(kind)


def autocast_kinds() -> list[str]:
    """Return the kinds of device whose dtype of autocast is recorded: the same on every machine, and this build's."""
    module = torch.accelerator.current_accelerator()
    return [*dict.fromkeys(("cpu", "cuda", "cpu" if module is None else module.type))]


@cache
def built_with() -> dict[str, str | None]:
    """Return the versions of the vendors' libraries that torch was built with, and of those that it calls."""
    others = {name: getattr(torch.version, name, None) for name in ("hip", "xpu")}
    # another build of the same torch may have others; torch.backends.cudnn.version() would start CUDA
    found = re.findall(r"- (?:Intel\S+ )?(?:oneAPI )?(Math|MKL-DNN|CuDNN) \D*([\d.]+)", torch.__config__.show())
    names = {"Math": "mkl", "MKL-DNN": "onednn", "CuDNN": "cudnn_version"}  # `cudnn` is a switch
    others |= {names[library]: version for library, version in found}
    if torch.version.cuda:  # packages of their own, which pip may replace
        for distribution in ("nvidia-cublas", f"nvidia-cublas-cu{torch.version.cuda.partition('.')[0]}"):
            with suppress(PackageNotFoundError):
                others["cublas"] = version_of(distribution)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            others["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, **{name: version for name, version in others.items() if version}}


@cache  # a build of torch has one accelerator at most: to ask in each step costs 3 us
def device_module() -> Any:
    """Return the module of this process's accelerator, such as torch.cuda, or None."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator)


def _module_in_use() -> Any:
    """Return the module of this process's accelerator; None where nothing has used it so far.

    Asking a device for its generators would start it, also in loader workers, where it cannot be after a fork.
    """
    module = device_module()
    if module is None:
        return None
    # torch.mps cannot tell
    return module if getattr(module, "is_initialized", torch.accelerator.is_available)() else None


def seed_devices(key: int) -> None:
    """Seed the generators of all devices in use."""
    # called in each step: without an accelerator it ends here
    module = None if device_module() is None else _module_in_use()
    if module is not None:
        # torch.mps has one device, and no manual_seed_all
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(key)


def generator_states() -> list[torch.Tensor]:
    """Return the states of the generators of all devices in use."""
    module = _module_in_use()
    return [] if module is None else [module.get_rng_state(index) for index in range(module.device_count())]


def set_generators(states: list[torch.Tensor]) -> None:
    """Set the generators to states that `generator_states` returned."""
    module = _module_in_use()
    if module is not None:
        for index, state in enumerate(states):
            module.set_rng_state(state, index)


def visible_devices(wanted: str) -> tuple[str, str]:
    """Return the variable that gives a process some of the devices, and the devices' names in it; else "" and "".

    wanted: trainer.accelerator.
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
    """Return the name of the one device of this machine that a launcher shows this process; "" where it shows others.

    SLURM's --gpus-per-task=1 does so: each rank has a cuda:0 of its own.
    """
    variables = [VISIBLE.get(device.type, ""), "ROCR_VISIBLE_DEVICES"]  # AMD's devices are of kind cuda, too
    names = next(filter(None, map(get_variable, variables)), "")
    properties = _question(device, "get_device_properties")
    # in a container all ranks may have the number 0
    return "" if not names or "," in names else str(getattr(properties and properties(device), "uuid", names))


@contextmanager
def deterministic_cublas(device_type: str) -> Iterator[None]:
    """Have cuBLAS add up in a fixed order: set CUBLAS_WORKSPACE_CONFIG, before CUDA starts, and remove it on exit.

    Raises ConfigError on CUDA where it is set to what leaves the order open.
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    given = get_variable(_CUBLAS)
    if given is not None and given not in _FIXED_WORKSPACES and device_type == "cuda":
        raise ConfigError(
            f"trainer.reproducible=bitwise and trainer.deterministic need {_CUBLAS} to be one of "
            f"{' and '.join(_FIXED_WORKSPACES)}, but it is {given!r}. Unset it: Legato sets it by itself."
        )
    set_default(_CUBLAS, _FIXED_WORKSPACES[0])
    try:
        yield
    finally:
        # a value that was set before the run is the program's own, and stays
        if given is None:
            unset_variable(_CUBLAS)
