"""Choice of the devices of a run."""

import torch

from ...base.errors import ConfigError
from ..accelerators import find_kind


def find_devices(accelerator: str, devices: int | str | list[int]) -> list[torch.device]:
    """Return the devices of this machine that `accelerator` and `devices` ask for; CPU devices are all the same one.

    Raises ConfigError where there are fewer than asked for.
    """
    accelerator, _, index = accelerator.partition(":")
    kind = find_kind(accelerator)
    if index:
        if devices != "auto" or not index.isdecimal():
            raise ConfigError(
                f"trainer.accelerator={accelerator}:{index} names a device, and trainer.devices={devices} others: say "
                f"accelerator={accelerator} and devices=[0], with the indices that you want."
            )
        devices = [int(index)]
    if kind == "cpu":  # its "devices" are processes that share it, so that any number will do
        return [torch.device("cpu")] * _wanted(devices, 1, "cpu", limited=False)
    there = torch.accelerator.device_count()
    if isinstance(devices, list):  # an index that stands there twice is a device for two processes
        if not devices or any(index not in range(there) for index in devices):
            raise ConfigError(f"trainer.devices={devices}: expected indices of {kind} devices, below {there}.")
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
