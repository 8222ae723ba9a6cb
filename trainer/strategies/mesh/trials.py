"""Tries optimizers on small sharded parameters, because DTensor lacks operations that some optimizers need."""

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
"""Number of steps in a trial. Lookahead has run all of its code after 5 steps, SOAP after 11."""


def refuse_unknown_arithmetic(strategy: str, optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
    """Raise ConfigError if an optimizer fails on sharded parameters. All ranks must call this."""
    for optimizer in optimizers:
        states = generator_states()
        error = _error_of_steps(optimizer)
        set_generators(states)
        failure = next((message for message in ranks.gather_objects(error) if message), None)
        if failure is not None:
            remedy = "ddp" if has_modes(optimizer) else "zero1, which shards the state by whole tensors, or ddp"
            raise ConfigError(
                f"{type(optimizer).__name__} does not work on the sharded parameters of strategy={strategy}, because "
                f"DTensor lacks an operation ({failure}). Use strategy={remedy}, or another optimizer, such as AdamW."
            )


def _error_of_steps(optimizer: Optimizer) -> str:
    """Run a copy of the optimizer on small parameters. Return its error message, or "" if it succeeds."""
    small: dict[Any, nn.Parameter] = {}

    def change(parameter: Tensor) -> nn.Parameter:
        key = _small_shape(parameter), parameter.dtype, parameter.requires_grad
        return small.setdefault(key, nn.Parameter(_small(parameter), parameter.requires_grad))

    # without compilation, which would take minutes and be repeated for the real shapes
    compiles = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            copy = copy_with(optimizer, change)
            for group in copy.param_groups:
                group["params"] = list(dict.fromkeys(group["params"]))
            if has_modes(copy):
                copy.train()
            for _ in range(STEPS):
                for parameter in optimizer_parameters(copy):
                    parameter.grad = torch.full_like(parameter, 0.1) if parameter.requires_grad else None
                copy.step()
    except Exception as error:  # DTensor and the optimizer's package may raise any type
        return f"{type(error).__name__}: {textwrap.shorten(str(error), 120, placeholder=' ...')}"
    return ""


def _small_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a small shape whose shards have equal sizes if and only if the parameter's shards do."""
    if not isinstance(parameter, DTensor):
        return tuple(min(size, 4) for size in parameter.shape)
    ranks = parameter.device_mesh.size()
    rows = parameter.shape[0]
    return (min(rows, 2 * ranks + (rows % ranks > 0)), *(min(size, 4) for size in parameter.shape[1:]))


def _small(parameter: Tensor) -> Tensor:
    """Return a small tensor with the parameter's placements. Its values are the same on all ranks."""
    size = torch.Size(_small_shape(parameter))
    values = torch.linspace(-1.0, 1.0, size.numel(), device=parameter.device).reshape(size).to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
