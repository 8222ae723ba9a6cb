"""Legato's version of `lightning.pytorch.accelerators`."""

# fmt: off

from legato.compat.lightning.accelerators import (
    Accelerator, AcceleratorRegistry, CPUAccelerator, CUDAAccelerator, MPSAccelerator,
)
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

find_usable_cuda_devices, get_cpu_stats, get_device_stats, get_nvidia_gpu_stats = placeholders(
    __name__, "find_usable_cuda_devices get_cpu_stats get_device_stats get_nvidia_gpu_stats",
    "Call torch.cuda.device_count and torch.cuda.memory_stats, or psutil. DeviceStatsMonitor logs these statistics.",
)
XLAAccelerator, TPUAccelerator = placeholders(
    __name__, "XLAAccelerator TPUAccelerator",
    "Legato runs on CPU, CUDA and MPS devices, not on TPUs. Pass accelerator='auto'.",
)
HPUAccelerator, = placeholders(
    __name__, "HPUAccelerator",
    "Legato runs on CPU, CUDA and MPS devices, not on HPUs. Pass accelerator='auto'.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    accelerator cpu cuda mps xla
""")
