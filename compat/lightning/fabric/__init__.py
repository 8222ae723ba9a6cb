"""Legato's version of `lightning.fabric`."""

# fmt: off

from legato.compat.lightning.rank_zero import disable_possible_user_warnings
from legato.compat.lightning.utilities import package_available, seed_everything
from legato.compat.lightning.fabric import accelerators, loggers, plugins, strategies, utilities
from legato.compat.lightning.inner import VERSION as __version__
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

Fabric, = placeholders(
    __name__, "Fabric",
    "Legato has no Fabric. Write the step of your loop as the training_step of a LightningModule with "
    "automatic_optimization=False, and pass the module to a Trainer.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    __about__ _graveyard _graveyard.tpu cli connector fabric wrappers
""")
