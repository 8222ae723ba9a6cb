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
        """Return figures of a device by name."""
        return {}

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

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return the use of CPU and memory in percent. Needs psutil."""
        return get_cpu_stats()


class CUDAAccelerator(Accelerator):
    """CUDA devices."""

    kind = "cuda"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return torch's figures of CUDA memory."""
        return torch.cuda.memory_stats(device)

    @classmethod
    def is_available(cls) -> bool:
        """Return whether there is a CUDA device."""
        return torch.cuda.is_available()


class MPSAccelerator(Accelerator):
    """The GPU of an Apple machine."""

    kind = "mps"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return the memory of the GPU, and the use of CPU and memory. Needs psutil."""
        return get_device_stats()

    @classmethod
    def is_available(cls) -> bool:
        """Return whether there is one."""
        return torch.backends.mps.is_available()


KINDS = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}


class Accelerators(dict[str, Any]):
    """The registry of accelerators: word -> class."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an object of the class behind a word. Raises KeyError for an unknown one."""
        return self[name]() if name in self or default is None else default

    def register(
        self, name: str, accelerator: Any = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Any:
        """Remember a class under a word, also as a decorator; Trainer takes the kinds of this module alone."""
        if accelerator is None:
            return partial(self.register, name, description=description, override=override, **init_params)
        self[name] = partial(accelerator, **init_params) if init_params else accelerator
        return accelerator

    def available_accelerators(self) -> set[str]:
        """Return the words."""
        return set(self)

    def remove(self, name: str) -> None:
        """Forget a word."""
        self.pop(name)

    def __str__(self) -> str:
        return f"Registered Accelerators: {', '.join(self)}"


AcceleratorRegistry = Accelerators({**KINDS, "gpu": CUDAAccelerator})


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


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of CUDA devices on which a tensor can be made.

    Raises RuntimeError if fewer than `num_devices` (-1: all there are) can be used.
    """
    if num_devices == 0:
        return []
    usable: list[int] = []
    for index in range(torch.cuda.device_count()):
        try:
            torch.zeros(1, device=torch.device("cuda", index))
        except RuntimeError:
            continue
        usable.append(index)
        if len(usable) == num_devices:
            break
    if num_devices > len(usable):
        raise RuntimeError(f"Asked for {num_devices} CUDA devices, but only {usable} can be used.")
    return usable


def get_cpu_stats() -> dict[str, float]:
    """Return the use of CPU, memory and swap in percent. Needs psutil."""
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def get_device_stats() -> dict[str, float]:
    """Return the memory of an Apple GPU in bytes, and the use of CPU and memory. Needs psutil."""
    import psutil

    return {
        "M1_vm_percent": psutil.virtual_memory().percent,
        "M1_percent": psutil.cpu_percent(),
        "M1_swap_percent": psutil.swap_memory().percent,
    }


def get_nvidia_gpu_stats(device: Any) -> dict[str, float]:
    """Return the use of a CUDA device by NVIDIA's library, as torch reports it."""
    index = torch.device(device) if isinstance(device, str) else device
    free, total = torch.cuda.mem_get_info(index)
    return {
        "utilization.gpu (%)": float(torch.cuda.utilization(index)),
        "memory.used (MB)": (total - free) / 2**20,
        "memory.free (MB)": free / 2**20,
        "temperature.gpu (°C)": float(torch.cuda.temperature(index)),
    }
