"""Accelerators: classes for device types. Programs written for Lightning use and query them."""

from functools import partial
from inspect import getmembers, isclass
from types import ModuleType
from typing import Any

import torch

from ...base.errors import ConfigError
from ...trainer.processes.devices import find_devices
from .placeholders import UnsupportedError


class Accelerator(str):
    """A device type. It is also a string with the type's name, so `trainer.accelerator` can be used as a string."""

    kind = ""
    """The device type, as passed to `Trainer(accelerator=)`."""

    def __new__(cls) -> "Accelerator":
        """Create the object as a string containing the name of the device type."""
        return super().__new__(cls, cls.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the class of the accelerator."""
        return type(self), ()

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current device. Raises ConfigError if its type does not match the accelerator."""
        if device.type != self.kind:
            raise ConfigError(f"{type(self).__name__}: expected a {self.kind} device, got {device}.")
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def setup(self, trainer: Any) -> None:
        """Called before each run of the trainer. Does nothing by default."""

    def teardown(self) -> None:
        """Release cached memory."""
        if self.kind == "cuda" and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return torch's memory statistics for a CUDA device, or an empty dict for other device types."""
        return torch.cuda.memory_stats(device) if self.kind == "cuda" else {}

    @classmethod
    def parse_devices(cls, devices: Any) -> Any:
        """Return the number of CPU devices, or the list of device indices."""
        parsed_devices = find_devices(cls.kind, read_devices(devices))
        return len(parsed_devices) if cls.kind == "cpu" else [device.index or 0 for device in parsed_devices]

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> list[torch.device]:
        """Return the devices for a device count or a list of indices."""
        return find_devices(cls.kind, read_devices(devices))

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that "auto" selects."""
        return len(find_devices(cls.kind, "auto")) if cls.is_available() else 0

    @classmethod
    def is_available(cls) -> bool:
        """Return whether this machine has a device of the accelerator's type."""
        return True

    @classmethod
    def name(cls) -> str:
        """Return the device type."""
        return cls.kind


class CPUAccelerator(Accelerator):
    """CPU devices."""

    kind = "cpu"


class CUDAAccelerator(Accelerator):
    """CUDA devices."""

    kind = "cuda"

    @classmethod
    def is_available(cls) -> bool:
        """Return whether there is a CUDA device."""
        return torch.cuda.is_available()


class MPSAccelerator(Accelerator):
    """Apple GPUs."""

    kind = "mps"

    @classmethod
    def is_available(cls) -> bool:
        """Return whether there is an MPS device."""
        return torch.backends.mps.is_available()


KINDS = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}


class Registry(dict[str, Any]):
    """A registry that maps names to classes or to functions that create objects."""

    def register(
        self, name: str, factory: Any = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Any:
        """Register a class and its arguments under a name. If no class is passed, return a decorator.

        Raises ValueError if the name is already registered and `override` is False.
        """
        if name in self and not override:
            raise ValueError(f"{name!r} is already registered. To replace it, pass override=True.")
        if factory is None:
            return partial(self.register, name, description=description, override=override, **init_params)
        self[name] = partial(factory, **init_params)
        return factory

    def remove(self, name: str) -> None:
        """Remove a name from the registry."""
        del self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Create an object of the class registered under a name. Raises KeyError for an unknown name."""
        return self[name]() if name in self or default is None else default


AcceleratorRegistry = Registry({**KINDS, "gpu": CUDAAccelerator})


def read_devices(devices: Any) -> Any:
    """Convert the Trainer argument `devices` to Legato's form. Strings such as "0,1" become lists of indices."""
    if isinstance(devices, str) and "," in devices:
        return [int(index) for index in devices.split(",") if index.strip()]
    return list(devices) if isinstance(devices, (tuple, set, range)) else devices


class AcceleratorConnector:
    """The devices that a Trainer's arguments select, under the private names that third-party packages read."""

    strategy: Any = None
    """The trainer's strategy, if the connector belongs to a trainer."""
    cluster_environment: Any = None
    """This process's rank and node, if the connector belongs to a trainer."""
    use_distributed_sampler = True
    """Whether Legato shards samples across processes."""

    def __init__(self, accelerator: Any = "auto", devices: Any = "auto", num_nodes: int = 1, **_: Any) -> None:
        word = accelerator.kind if isinstance(accelerator, Accelerator) else accelerator
        self._parallel_devices = find_devices(word, read_devices(devices))
        self.is_distributed = num_nodes * len(self._parallel_devices) > 1
        self._accelerator_flag = self._parallel_devices[0].type
        self.accelerator = KINDS[self._accelerator_flag]()
        of_cpu = self._accelerator_flag == "cpu"
        self._devices_flag: Any = len(self._parallel_devices) if of_cpu or isinstance(devices, int) else devices
        if self._devices_flag == "auto":
            self._devices_flag = [device.index or 0 for device in self._parallel_devices]

    def _choose_strategy(self) -> Any:  # private in Lightning; packages override it for their devices
        raise UnsupportedError("The Trainer creates the strategy. Choose one with Trainer(strategy='ddp').")

    def _check_and_init_precision(self) -> Any:  # private in Lightning; packages override it
        raise UnsupportedError("The Trainer creates its own precision plugin. Set Trainer(precision='bf16-mixed').")


def register_classes(registry: Any, method: str, module: ModuleType, parent: type) -> None:
    """For each subclass of `parent` in a module, call `method` with the registry if the subclass overrides it."""
    for _, kind in getmembers(module, isclass):
        if issubclass(kind, parent) and getattr(kind, method, None) is not getattr(parent, method, None):
            getattr(kind, method)(registry)
