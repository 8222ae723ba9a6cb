"""Chooses the devices of a run."""

import torch

from ...base.errors import ConfigError
from ...base.quantities import counted
from ..accelerators import find_kind


def find_devices(accelerator: str, devices: int | str | list[int]) -> list[torch.device]:
    """Return the devices on this machine that `accelerator` and `devices` select. CPU devices are interchangeable.

    Raises ConfigError if the machine has fewer devices.
    """
    accelerator, _, index = accelerator.partition(":")
    kind = find_kind(accelerator)
    if index:
        if devices != "auto" or not index.isdecimal():
            raise ConfigError(
                f"trainer.accelerator={accelerator}:{index} selects one device, but trainer.devices={devices} "
                f"selects others. Set accelerator={accelerator}, and list the indices in devices, such as devices=[0]."
            )
        devices = [int(index)]
    if kind == "cpu":  # CPU "devices" are processes that share the CPU, so any number is valid
        return [torch.device("cpu")] * _count(devices, 1, "cpu", limited=False)
    available = torch.accelerator.device_count()
    if isinstance(devices, list):  # if an index is listed twice, two processes share that device
        if not devices or any(index not in range(available) for index in devices):
            raise ConfigError(f"trainer.devices={devices}: expected {kind} device indices below {available}.")
        return [torch.device(kind, index) for index in devices]
    return [torch.device(kind, index) for index in range(_count(devices, available, kind, limited=True))]


def _count(devices: int | str | list[int], available: int, kind: str, limited: bool) -> int:
    if isinstance(devices, list):
        return len(devices) or 1
    if devices == "auto" or devices in (-1, "-1"):
        return available
    if isinstance(devices, str) and devices.isdigit():  # from a command line
        devices = int(devices)
    # a bool is an int, but devices=true is not a count
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigError(f"trainer.devices={devices!r}: expected a positive count, a list of indices, -1 or 'auto'.")
    if limited and devices > available:
        raise ConfigError(
            f"trainer.devices={devices}, but this machine has {counted(available, f'{kind} device')}. Use at "
            f"most {available}."
        )
    return devices
