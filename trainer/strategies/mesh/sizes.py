"""Sizes of a mesh's axes, without torch.

Processes are ordered in the mesh as (pipeline, data, shard, tensor), the last axis varying fastest, so that the
processes of a tensor-parallel group, which communicate most, are neighbours on one machine.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

from ....base.errors import ConfigError

Size = int | Literal["auto"]


class Sizes(NamedTuple):
    """Number of processes along each axis, in the order of the mesh's dimensions."""

    pipeline: int
    data: int
    shard: int
    tensor: int


def read_sizes(asked: Mapping[str, Size]) -> None:
    """Refuse sizes that no number of processes can have; raises ConfigError that names the axis."""
    for axis, size in asked.items():
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"strategy mesh: {axis}={size!r}; expected a positive count of processes, or 'auto'.")
    automatic = [axis for axis, size in asked.items() if size == "auto"]
    if len(automatic) > 1:
        raise ConfigError(f"strategy mesh: {' and '.join(automatic)} are 'auto'; only one axis can take what is left.")


def fit_sizes(asked: Mapping[str, Size], processes: int, machines: int = 1) -> Sizes:
    """Return the sizes for so many processes; raises ConfigError, with the sums, where they do not multiply out."""
    given = {axis: size for axis, size in asked.items() if size != "auto"}
    product = prod(given.values())
    sum_ = " x ".join(f"{axis} {size}" for axis, size in asked.items())
    where = f"{processes} process{'es' if processes > 1 else ''}"
    if machines > 1:
        where += f" ({machines} machines x {processes // machines})"
    remedy = "Change trainer.devices and trainer.num_nodes, or the axes"
    if len(given) == len(asked):
        if product != processes:
            raise ConfigError(f"strategy mesh: {sum_} = {product}, but there are {where}. {remedy}.")
        return Sizes(**given)
    if processes % product:
        raise ConfigError(
            f"strategy mesh: {sum_} needs a multiple of {product} processes, but there are {where}. {remedy}."
        )
    return Sizes(**{axis: processes // product if size == "auto" else size for axis, size in asked.items()})
