"""Accelerators: kinds of devices, as classes that Lightning's programs name or ask."""

from functools import partial
from inspect import getmembers, isclass
from types import ModuleType
from typing import Any

import torch

from ...base.errors import ConfigError
from ...trainer.processes.devices import find_devices
from .placeholders import UnsupportedError


class Accelerator(str):
    """A kind of device, which is the word for it, so that `trainer.accelerator` is both."""

    kind = ""
    """The word for it in `Trainer(accelerator=)`."""

    def __new__(cls) -> "Accelerator":
        """Make the word. A subclass of CPUAccelerator, CUDAAccelerator or MPSAccelerator means the same as that."""
        return super().__new__(cls, cls.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the class alone."""
        return type(self), ()

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one. Raises ConfigError if it is of another kind."""
        if device.type != self.kind:
            raise ConfigError(f"{type(self).__name__}: expected a {self.kind} device, got {device}.")
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def setup(self, trainer: Any) -> None:
        """Called before a run."""

    def teardown(self) -> None:
        """Let go of cached memory."""
        if self.kind == "cuda" and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return torch's figures of a device's memory; none of a CPU."""
        return torch.cuda.memory_stats(device) if self.kind == "cuda" else {}

    @classmethod
    def parse_devices(cls, devices: Any) -> Any:
        """Return the count of devices, or a list of their indices."""
        found = find_devices(cls.kind, read_devices(devices))
        return len(found) if cls.kind == "cpu" else [device.index or 0 for device in found]

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> list[torch.device]:
        """Return the devices of a count, or of a list of indices."""
        return find_devices(cls.kind, read_devices(devices))

    @classmethod
    def auto_device_count(cls) -> int:
        """Return how many devices "auto" means."""
        return len(find_devices(cls.kind, "auto")) if cls.is_available() else 0

    @classmethod
    def is_available(cls) -> bool:
        """Return whether this machine has such a device."""
        return True

    @classmethod
    def name(cls) -> str:
        """Return the word for it."""
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
    """The GPU of an Apple machine."""

    kind = "mps"

    @classmethod
    def is_available(cls) -> bool:
        """Return whether there is one."""
        return torch.backends.mps.is_available()


KINDS = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}


class Registry(dict[str, Any]):
    """What programs register under a word: a class, or a function that makes an object of it."""

    def register(
        self, name: str, made: Any = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Any:
        """Keep a class under a word, with arguments; without a class return a decorator.

        Raises ValueError for a word that is taken, without `override`.
        """
        if name in self and not override:
            raise ValueError(f"{name!r} is registered already: say override=True to replace it.")
        if made is None:
            return partial(self.register, name, description=description, override=override, **init_params)
        self[name] = partial(made, **init_params)
        return made

    def remove(self, name: str) -> None:
        """Forget a word."""
        del self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an object of the class behind a word. Raises KeyError for an unknown one."""
        return self[name]() if name in self or default is None else default


AcceleratorRegistry = Registry({**KINDS, "gpu": CUDAAccelerator})


def read_devices(devices: Any) -> Any:
    """Return Trainer's `devices` as Legato takes it: texts such as "0,1" are lists of indices."""
    if isinstance(devices, str) and "," in devices:
        return [int(index) for index in devices.split(",") if index.strip()]
    return list(devices) if isinstance(devices, (tuple, set, range)) else devices


class AcceleratorConnector:
    """Devices that a Trainer's arguments mean, under the private names that packages read: no other part of it."""

    strategy: Any = None
    """The trainer's strategy, where this is a trainer's."""
    cluster_environment: Any = None
    """The place of this process, where this is a trainer's."""
    use_distributed_sampler = True
    """Whether samples are dealt out to the processes."""

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

    def _choose_strategy(self) -> Any:  # private in Lightning; packages put their own in its place, for their devices
        raise UnsupportedError("Trainer chooses its strategy itself: give it one, Trainer(strategy='ddp').")

    def _check_and_init_precision(self) -> Any:  # the same
        raise UnsupportedError("Trainer makes its precision itself: give it a word, Trainer(precision='bf16-mixed').")


def register_classes(registry: Any, method: str, module: ModuleType, parent: type) -> None:
    """Let each subclass in a module that overrides this method of `parent` register itself by it."""
    for _, found in getmembers(module, isclass):
        if issubclass(found, parent) and getattr(found, method, None) is not getattr(parent, method, None):
            getattr(found, method)(registry)
