"""Sizes of a mesh's axes. This module does not import torch.

Processes are ordered in the mesh as (pipeline, data, shard, tensor), with the last axis varying fastest. So the
processes of a tensor-parallel group, which communicate the most, are neighbors on one machine.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

from ....base.errors import ConfigError
from ....base.quantities import counted

Size = int | Literal["auto"]


class Sizes(NamedTuple):
    """Number of processes along each axis, in the order of the mesh's dimensions."""

    pipeline: int
    data: int
    shard: int
    tensor: int


def read_sizes(asked: Mapping[str, Size]) -> None:
    """Raise ConfigError if a size is neither positive nor "auto", or if more than one size is "auto"."""
    for axis, size in asked.items():
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"strategy=mesh: expected a positive number of processes or 'auto', got {axis}={size!r}.")
    automatic = [axis for axis, size in asked.items() if size == "auto"]
    if len(automatic) > 1:
        raise ConfigError(f"strategy=mesh: {' and '.join(automatic)} are 'auto', but only one size may be 'auto'.")


def fit_sizes(asked: Mapping[str, Size], processes: int, machines: int = 1) -> Sizes:
    """Return the size of each axis. Raises ConfigError if the product of the sizes is not `processes`."""
    fixed = {axis: size for axis, size in asked.items() if size != "auto"}
    product = prod(fixed.values())
    axes = " x ".join(f"{axis} {size}" for axis, size in asked.items())
    count = counted(processes, "process")
    if machines > 1:
        count += f" ({machines} machines x {processes // machines})"
    remedy = "Change trainer.devices and trainer.num_nodes, or the axes"
    if len(fixed) == len(asked):
        if product != processes:
            raise ConfigError(f"strategy=mesh: {axes} = {product}, but there are {count}. {remedy}.")
        return Sizes(**fixed)
    if processes % product:
        raise ConfigError(
            f"strategy=mesh: {axes} needs a multiple of {product} processes, but there are {count}. {remedy}."
        )
    return Sizes(**{axis: processes // product if size == "auto" else size for axis, size in asked.items()})
