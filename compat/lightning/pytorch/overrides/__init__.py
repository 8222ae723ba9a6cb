"""Legato's version of `lightning.pytorch.overrides`."""

# fmt: off

from legato.compat.lightning.inner import alias_below, inner_name, placeholders

prepare_for_backward, = placeholders(
    __name__, "prepare_for_backward",
    "The ddp strategy prepares the backward pass itself. Return the loss, or call manual_backward.",
)
UnrepeatedDistributedSampler, UnrepeatedDistributedSamplerWrapper = placeholders(
    __name__, "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper",
    "The Trainer counts each sample of an evaluation once. Pass the loader without a distributed sampler.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    distributed
""")
