"""`lightning.pytorch.overrides` on Legato."""

# fmt: off

from legato.compat.lightning.utilities import UnrepeatedDistributedSampler, UnrepeatedDistributedSamplerWrapper
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

prepare_for_backward, = placeholders(
    __name__, "prepare_for_backward",
    "Strategy ddp prepares for backward itself: return the loss, or call manual_backward.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    distributed
""")
