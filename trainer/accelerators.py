"""Accelerators: what a run asks of a device of any kind. Only this module names kinds."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..base.environment import get_variable, set_default, unset_variable
from ..base.errors import ConfigError, did_you_mean

OTHER_NAMES = {"gpu": "cuda"}
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
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


def make_current(device: torch.device) -> None:
    """Make this the device that its kind without a number means, in a task's own code too."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_for(device: torch.device, chosen: str | None = None) -> str:
    """Return the backends of a process group: for tensors on this device, and gloo for those on the host.

    chosen: the backend of the device's tensors; None: torch's default for the kind of device.
    """
    from torch import distributed

    backend = chosen or distributed.get_default_backend_for_device(device)
    # others have no tensors of the host, where loss weights, flags and names live
    return backend if device.type == "cpu" or backend in ("gloo", "mpi") else f"cpu:gloo,{device.type}:{backend}"


def has_bfloat16(kind: str) -> bool:
    """Return whether devices of this kind compute in bfloat16 themselves; torch's emulation for older ones is slow."""
    ask = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    if ask is None:
        return True
    return bool(ask(including_emulation=False) if kind == "cuda" else ask())


def has_float64(device: torch.device) -> bool:
    """Return whether the device computes in float64."""
    return device.type != "mps"


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
        (module.manual_seed if module is torch.mps else module.manual_seed_all)(key)


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
