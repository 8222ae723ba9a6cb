"""`lightning.fabric` on Legato."""

# fmt: off

from legato.compat.lightning.rank_zero import disable_possible_user_warnings
from legato.compat.lightning.utilities import package_available, seed_everything
from legato.compat.lightning.fabric import accelerators, loggers, plugins, strategies, utilities
from legato.compat.lightning.inner import VERSION as __version__
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

Fabric, = placeholders(
    __name__, "Fabric",
    "A loop of one's own needs no Fabric: write the step as a LightningModule's training_step with "
    "automatic_optimization=False, and give it to a Trainer.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    __about__ _graveyard _graveyard.tpu cli connector fabric wrappers
""")
