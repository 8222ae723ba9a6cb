"""Legato's version of `lightning.pytorch.cli`. Requires jsonargparse."""

# fmt: off

from legato.compat.lightning.cli import (
    ArgsType, LightningArgumentParser, LightningCLI, LRSchedulerCallable, LRSchedulerType, LRSchedulerTypeTuple,
    LRSchedulerTypeUnion, OptimizerCallable, ReduceLROnPlateau, SaveConfigCallback, instantiate_class,
    instantiate_module,
)
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, class_from_function
from legato.compat.lightning.inner import alias_below, inner_name
from legato.compat.lightning.instantiation import ModuleType

__getattr__ = inner_name(__name__)
alias_below(__name__, "")
