"""Sizes of a mesh's axes, without torch.

Processes are ordered in the mesh as (pipeline, data, shard, tensor), the last axis varying fastest, so that the
processes of a tensor-parallel group, which communicate most, are neighbours on one machine.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from ....base.errors import ConfigError, did_you_mean

Size = int | Literal["auto"]
AXES = ("data", "shard", "tensor", "pipeline")
"""Names of the axes, in the order of messages."""
PLACES = ("pipeline", "data", "shard", "tensor")
"""The axes in the order of the mesh's dimensions."""
Schedule = Literal["gpipe", "1f1b", "interleaved"]
STAGES_EACH = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages of each process of a pipeline, by its schedule."""


class Sizes(NamedTuple):
    """Number of processes along each axis."""

    data: int
    shard: int
    tensor: int
    pipeline: int

    @property
    def replicating(self) -> int:
        """Number of processes that have batches of their own."""
        return self.data * self.shard

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        # the last axis varies fastest: its processes are neighbours on one machine
        found = {}
        for axis in reversed(PLACES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def data_rank(self, rank: int) -> int:
        """Return a rank's coordinate on the axes data and shard together; ranks with the same one share batches."""
        place = self.place_of(rank)
        return place["data"] * self.shard + place["shard"]


def stages_each(schedule: str) -> int:
    """Return how many stages each process of a pipeline has; raises ConfigError for a schedule that there is not."""
    if schedule not in STAGES_EACH:
        hint = did_you_mean(str(schedule), STAGES_EACH)
        raise ConfigError(f"strategy mesh: schedule={schedule!r}; there are {', '.join(STAGES_EACH)}.{hint}")
    return STAGES_EACH[schedule]


def count_pieces(samples: Sequence[int], wanted: int, schedule: Schedule, places: int) -> int:
    """Return into how many equal pieces, at most `wanted`, batches can be cut so that torch's schedule takes them.

    samples: of each batch. places: processes of the pipeline.
    """
    # torch's interleaved schedule works in rounds of as many pieces as processes, and pieces must be equal in size
    for pieces in range(min(wanted, *samples), 1, -1):
        rounds = max(1, pieces // places) if schedule == "interleaved" else 1
        if pieces % rounds == 0 and not any(count % pieces for count in samples):
            return pieces
    return 1


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
