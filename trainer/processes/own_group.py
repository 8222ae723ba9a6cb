"""Process groups that the script made before its Trainer.

Legato joins such a group as it joins a launcher's processes: it starts no others, and does not destroy the group.
"""

import socket
import sys
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError
from . import connections

if TYPE_CHECKING:
    import torch

    from .environment import Place

_made_here: Any = None
"""The default group, if Legato made it."""


def note_made_here() -> None:
    """Remember that Legato made the default group, so that `find_group` ignores it."""
    global _made_here
    from torch import distributed

    _made_here = distributed.group.WORLD


def find_group() -> tuple[int, int] | None:
    """Return rank and world size of the script's own process group; None if it has none."""
    distributed = sys.modules.get("torch.distributed")  # a script with a process group has imported torch.distributed
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.group.WORLD is _made_here:
        return None
    return distributed.get_rank(), distributed.get_world_size()


def located(place: "Place") -> "Place":
    """Return a place in the script's own group with node and local rank, from all ranks' host names; every rank calls
    it.

    A local rank from LOCAL_RANK, 0 or more, is kept. Any other kind of place is returned as it is.
    """
    from torch import distributed

    if place.origin != "script":
        return place
    if place.world_size == 1:
        return replace(place, local_rank=max(place.local_rank, 0))
    hosts: list[Any] = [None] * place.world_size
    distributed.all_gather_object(hosts, socket.gethostname(), group=legatos_group())
    own, names = hosts[place.rank], list(dict.fromkeys(hosts))
    local_rank = hosts[: place.rank].count(own) if place.local_rank < 0 else place.local_rank
    return replace(
        place,
        local_rank=local_rank,
        node_rank=names.index(own),
        local_world_size=hosts.count(own),
        nodes=len(names),
    )


_groups: dict[Any, Any] = {}
"""Process groups of Legato's collectives, by default group."""


def legatos_group(limit: timedelta | None = None) -> Any:
    """Return the process group of Legato's own collectives, with all ranks; every rank calls it.

    The script has the default group to itself, so that a collective which one rank calls too often there is never
    matched with one of Legato's. The group serves host tensors too, unlike one of `init_process_group("nccl")`.
    `limit`: timeout of its collectives.
    """
    from torch import distributed

    from ...base.torch_private import set_group_timeout

    world = distributed.group.WORLD
    # a new default group has new ranks: those of an earlier run are closed with the last reference
    if world not in _groups:
        _groups.clear()
        backends = ",".join(f"{device}:{name}" for device, name in devices_of_group().items())
        backend = None if serves_host() else f"cpu:gloo,{backends}"
        with connections.noting(more=True):
            _groups[world] = distributed.new_group(timeout=limit, backend=backend)
    elif limit is not None and distributed.get_backend() != "mpi":
        set_group_timeout(limit, _groups[world])
    return _groups[world]


def serves_host() -> bool:
    """Return whether the default group serves tensors on the host."""
    from torch import distributed

    return "cpu" in devices_of_group() or distributed.get_backend() == "mpi"


def devices_of_group() -> dict[str, str]:
    """Return the backend of the default group for each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    from torch import distributed

    config = distributed.get_backend_config()
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def require_backend(device: "torch.device", wanted: str | None) -> None:
    """Raise ConfigError if the default group has no backend for `device`, or another one than `wanted`."""
    from torch import distributed

    backends = devices_of_group()
    if distributed.get_backend() == "mpi":
        return
    have = backends.get(device.type)
    described = ", ".join(f"{backend} for {kind}" for kind, backend in backends.items())
    if have is None:
        raise ConfigError(
            f"The process group that exists already has {described}, but this run is on {device.type}. Make it by "
            f"init_process_group() without a backend, or set trainer.accelerator."
        )
    if wanted is not None and wanted != have:
        raise ConfigError(
            f"strategy.process_group_backend={wanted!r}, but the process group that exists already has {described}. "
            f"Leave process_group_backend out, or make the group with it."
        )
