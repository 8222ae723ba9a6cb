"""Placeholders for `lightning.fabric.strategies`."""

# fmt: off

from legato.compat.lightning.inner import alias_below, inner_name

__getattr__ = inner_name(__name__)
alias_below(__name__, """
    ddp deepspeed dp fsdp launchers launchers.launcher launchers.multiprocessing launchers.subprocess_script
    launchers.xla model_parallel parallel registry single_device single_xla strategy xla xla_fsdp
""")
