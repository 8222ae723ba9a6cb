"""Legato's version of `lightning.pytorch.tuner`."""

# fmt: off

from legato.compat.lightning.tuner import Tuner
from legato.compat.lightning.tuner import LearningRateSweep as _LRFinder
from legato.compat.lightning.inner import alias_below, inner_name

__getattr__ = inner_name(__name__)
alias_below(__name__, """
    batch_size_scaling lr_finder tuning
""")
