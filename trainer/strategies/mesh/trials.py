"""Trials of optimizers on small parameters that are sharded: DTensor does not know the arithmetic of all of them."""

import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ....base.errors import ConfigError
from ...data.randomness import generator_states, set_generators
from ...optimization.optimizers import copy_with, has_modes, optimizer_parameters
from ...processes.ranks import Ranks

STEPS = 12
"""Steps of a trial: Lookahead does all that it does after 5, SOAP after 11."""


def refuse_unknown_arithmetic(strategy: str, optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
    """Raise ConfigError for an optimizer that fails on sharded parameters; every rank calls it."""
    for optimizer in optimizers:
        states = generator_states()
        error = _error_of_steps(optimizer)
        set_generators(states)
        said = next((said for said in ranks.gather_objects(error) if said), None)
        if said is not None:
            way_out = "ddp" if has_modes(optimizer) else "zero1, which shards the state by whole tensors, or ddp"
            raise ConfigError(
                f"{type(optimizer).__name__} does not work on the sharded parameters of strategy {strategy!r}: its "
                f"arithmetic is not among what torch's DTensor knows ({said}). Use strategy {way_out}; or an "
                f"optimizer such as AdamW."
            )


def _error_of_steps(optimizer: Optimizer) -> str:
    """Return what an optimizer raises in steps of a copy of it with small parameters; "" if nothing."""
    small: dict[Any, nn.Parameter] = {}

    def change(parameter: Tensor) -> nn.Parameter:
        key = _small_shape(parameter), parameter.dtype, parameter.requires_grad
        return small.setdefault(key, nn.Parameter(_small(parameter), parameter.requires_grad))

    # what it compiles would be compiled again for the real shapes, which takes minutes
    compiles = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            made = copy_with(optimizer, change)
            for group in made.param_groups:
                group["params"] = list(dict.fromkeys(group["params"]))
            if has_modes(made):
                made.train()
            for _ in range(STEPS):
                for parameter in optimizer_parameters(made):
                    parameter.grad = torch.full_like(parameter, 0.1) if parameter.requires_grad else None
                made.step()
    except Exception as error:  # any kind: what DTensor, or the package, makes of it
        return f"{type(error).__name__}: {textwrap.shorten(str(error), 120, placeholder=' ...')}"
    return ""


def _small_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a shape with few numbers that is cut as evenly, or unevenly, as the parameter is."""
    if not isinstance(parameter, DTensor):
        return tuple(min(size, 4) for size in parameter.shape)
    ranks = parameter.device_mesh.size()
    rows = parameter.shape[0]
    return (min(rows, 2 * ranks + (rows % ranks > 0)), *(min(size, 4) for size in parameter.shape[1:]))


def _small(parameter: Tensor) -> Tensor:
    """Return a tensor of the small shape, laid out as the parameter is, the same on all ranks."""
    size = torch.Size(_small_shape(parameter))
    values = torch.linspace(-1.0, 1.0, size.numel(), device=parameter.device).reshape(size).to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
