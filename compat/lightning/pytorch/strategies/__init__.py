"""Legato's version of `lightning.pytorch.strategies`."""

# fmt: off

from legato.compat.lightning.strategies import (
    DDPStrategy, FSDPStrategy, ModelParallelStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy,
    StrategyRegistry,
)
from legato.compat.lightning.types import TBroadcast, TReduce
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

DeepSpeedStrategy, remove_module_hooks = placeholders(
    __name__, "DeepSpeedStrategy remove_module_hooks",
    "Pass Trainer(strategy='fsdp'). It shards parameters, gradients and optimizer states as ZeRO stage 3 does.",
)
SingleDeviceXLAStrategy, SingleTPUStrategy, XLAStrategy = placeholders(
    __name__, "SingleDeviceXLAStrategy SingleTPUStrategy XLAStrategy",
    "Legato runs on CPU, CUDA and MPS devices, not on TPUs. Pass accelerator='auto'.",
)
HPUParallelStrategy, SingleHPUStrategy = placeholders(
    __name__, "HPUParallelStrategy SingleHPUStrategy",
    "Legato runs on CPU, CUDA and MPS devices, not on HPUs. Pass accelerator='auto'.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    ddp deepspeed fsdp launchers launchers.launcher launchers.multiprocessing launchers.subprocess_script
    launchers.xla model_parallel parallel single_device single_xla strategy xla
""")
