"""`lightning.pytorch.cli` on Legato, which needs jsonargparse."""

# fmt: off

from legato.compat.lightning.cli import (
    ActionConfigFile, ArgsType, ArgumentParser, LightningArgumentParser, LightningCLI, LRSchedulerCallable,
    LRSchedulerType, LRSchedulerTypeTuple, LRSchedulerTypeUnion, Namespace, OptimizerCallable, ReduceLROnPlateau,
    SaveConfigCallback, class_from_function, instantiate_class, instantiate_module,
)
from legato.compat.lightning.inner import alias_below, inner_name
from legato.compat.lightning.instantiation import ModuleType

__getattr__ = inner_name(__name__)
alias_below(__name__, "")
