"""`lightning.pytorch.overrides` on Legato."""

# fmt: off

from legato.compat.lightning.inner import alias_below, inner_name, placeholders

prepare_for_backward, = placeholders(
    __name__, "prepare_for_backward",
    "Strategy ddp prepares for backward itself: return the loss, or call manual_backward.",
)
UnrepeatedDistributedSampler, UnrepeatedDistributedSamplerWrapper = placeholders(
    __name__, "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper",
    "The Trainer counts each sample of an evaluation once; give it the loader without a sampler of its own.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    distributed
""")
