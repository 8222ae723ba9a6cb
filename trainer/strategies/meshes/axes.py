"""The mesh of all processes, its axes named, and the groups of processes that share out batches on it."""

from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..group import SomeRanks
from .sizes import PLACES, Sizes


def make_mesh(sizes: Sizes, device_type: str) -> DeviceMesh:
    """Return the mesh of all processes, its axes named; every rank calls it."""
    shape = tuple(getattr(sizes, axis) for axis in PLACES)
    return init_device_mesh(device_type, shape, mesh_dim_names=PLACES)


def data_ranks(sizes: Sizes, rank: int) -> SomeRanks:
    """Return the ranks that together have every batch once: those that differ from `rank` on the axes data and shard.

    Every rank calls it, since making a group takes them all.
    """
    world = prod(sizes)
    if sizes.replicating in (1, world):
        return SomeRanks(sizes.replicating, None)
    together: dict[tuple[int, int], list[int]] = {}
    for other in range(world):
        place = sizes.place_of(other)
        together.setdefault((place["pipeline"], place["tensor"]), []).append(other)
    mine = None
    for ranks in together.values():
        group = dist.new_group(ranks, backend="gloo")  # small values on the host
        if rank in ranks:
            mine = group
    return SomeRanks(sizes.replicating, mine)
