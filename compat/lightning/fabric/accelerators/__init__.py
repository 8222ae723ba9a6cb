"""Legato's version of `lightning.fabric.accelerators`."""

# fmt: off

from legato.compat.lightning.accelerators import (
    Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator, register_classes as _register_classes,
)
from legato.compat.lightning.utilities import num_cuda_devices
from torch.cuda import is_available as is_cuda_available
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

XLAAccelerator, = placeholders(
    __name__, "XLAAccelerator",
    "Legato runs on CPU, CUDA and MPS devices, not on TPUs. Pass accelerator='auto'.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    accelerator cpu cuda mps registry xla
""")
