"""Legato's version of `lightning.pytorch`."""

# fmt: off

from legato.compat.lightning.callbacks.callback import Callback
from legato.compat.lightning.module import LightningDataModule, LightningModule
from legato.compat.lightning.rank_zero import disable_possible_user_warnings, log as _logger
from legato.compat.lightning.trainer import Trainer
from legato.compat.lightning.utilities import LIGHTNING_LOGO, cli_lightning_logo, seed_everything
from legato.compat.lightning.pytorch.accelerators import HPUAccelerator, TPUAccelerator
from legato.compat.lightning.pytorch.strategies import HPUParallelStrategy, SingleHPUStrategy, SingleTPUStrategy
from legato.compat.lightning.pytorch import (
    callbacks, core, loggers, loops, overrides, plugins, profilers, serve, trainer, tuner, utilities,
)
from legato.compat.lightning.inner import VERSION as __version__
from legato.compat.lightning.inner import alias_below, inner_name

__getattr__ = inner_name(__name__)
alias_below(__name__, """
    __about__ _graveyard _graveyard._torchmetrics _graveyard.hpu _graveyard.precision _graveyard.tpu
""")
