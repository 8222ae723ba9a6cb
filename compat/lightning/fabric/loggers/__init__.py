"""Legato's version of `lightning.fabric.loggers`."""

# fmt: off

from legato.compat.lightning.loggers import CSVLogger, FabricLogger as Logger, TensorBoardLogger, rank_zero_experiment
from legato.compat.lightning.inner import alias_below, inner_name

__getattr__ = inner_name(__name__)
alias_below(__name__, """
    csv_logs logger tensorboard
""")
