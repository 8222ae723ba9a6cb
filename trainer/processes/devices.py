"""Choice of the devices of a run."""

import torch

from ...base.arguments import ACCELERATORS
from ...base.errors import ConfigError, did_you_mean


def find_devices(accelerator: str, devices: int | str | list[int]) -> list[torch.device]:
    """Return the devices of this machine that `accelerator` and `devices` ask for; CPU devices are all the same one.

    Raises ConfigError where there are fewer than asked for.
    """
    if accelerator not in ACCELERATORS:
        raise ConfigError(
            f"trainer.accelerator={accelerator!r} is not known; there are {', '.join(ACCELERATORS)}."
            f"{did_you_mean(accelerator, ACCELERATORS)}"
        )
    kind = {"gpu": "cuda"}.get(accelerator, accelerator)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cpu":
        return [torch.device("cpu")] * _wanted(devices, 1, "cpu", limited=False)
    there = torch.cuda.device_count() if kind == "cuda" else int(torch.backends.mps.is_available())
    if there == 0:
        raise ConfigError(
            f"trainer.accelerator={accelerator!r}, but torch sees no such device here; try accelerator=cpu."
        )
    if isinstance(devices, list):
        absent = [index for index in devices if index not in range(there)]
        if absent or not devices or len(set(devices)) < len(devices):
            raise ConfigError(f"trainer.devices={devices}: expected different indices below {there}.")
        return [torch.device(kind, index) for index in devices]
    return [torch.device(kind, index) for index in range(_wanted(devices, there, kind, limited=True))]


def make_current(device: torch.device) -> None:
    """Make a CUDA device the one that "cuda" without a number means, in a task's own code too."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _wanted(devices: int | str | list[int], there: int, kind: str, limited: bool) -> int:
    if isinstance(devices, list):
        return len(devices) or 1
    if devices == "auto" or devices in (-1, "-1"):
        return there
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigError(f"trainer.devices={devices!r}: expected a positive count, a list of indices, -1 or 'auto'.")
    if limited and devices > there:
        raise ConfigError(
            f"trainer.devices={devices}, but there are {there} {kind} devices here; ask for at most {there}."
        )
    return devices
