"""Choice of the devices of a run."""

import torch

from ...base.errors import ConfigError
from ..accelerators import find_kind


def find_devices(accelerator: str, devices: int | str | list[int]) -> list[torch.device]:
    """Return the devices of this machine that `accelerator` and `devices` ask for; CPU devices are all the same one.

    Raises ConfigError where there are fewer than asked for.
    """
    kind = find_kind(accelerator)
    if kind == "cpu":  # its "devices" are processes that share it, so that any number will do
        return [torch.device("cpu")] * _wanted(devices, 1, "cpu", limited=False)
    there = torch.accelerator.device_count()
    if isinstance(devices, list):
        absent = [index for index in devices if index not in range(there)]
        if absent or not devices or len(set(devices)) < len(devices):
            raise ConfigError(f"trainer.devices={devices}: expected different indices below {there}.")
        return [torch.device(kind, index) for index in devices]
    return [torch.device(kind, index) for index in range(_wanted(devices, there, kind, limited=True))]


def _wanted(devices: int | str | list[int], there: int, kind: str, limited: bool) -> int:
    if isinstance(devices, list):
        return len(devices) or 1
    if devices == "auto" or devices in (-1, "-1"):
        return there
    if isinstance(devices, str) and devices.isdigit():  # as a command line gives it
        devices = int(devices)
    # True is an int, and devices=true no count
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigError(f"trainer.devices={devices!r}: expected a positive count, a list of indices, -1 or 'auto'.")
    if limited and devices > there:
        raise ConfigError(
            f"trainer.devices={devices}, but there are {there} {kind} devices here; ask for at most {there}."
        )
    return devices
