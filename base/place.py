"""This process's place in a process group (its rank and node), as defined by its launcher or the script.

This module does not import torch, because the command line uses it before torch is imported.
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .environment import get_variable, read_int
from .errors import ConfigError

CLUSTER_OFF = "To train without other processes, unset these variables or set trainer.cluster=off."


@dataclass(frozen=True)
class Place:
    """Rank, local rank and node rank of this process, and the corresponding sizes."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    origin: str = "alone"
    """Origin of the group: "alone", "legato", "torchrun", "slurm", "mpi", "environment" (RANK was set manually), or
    "script" (the script called init_process_group; an unknown local rank is -1)."""


@dataclass(frozen=True)
class Variables:
    """Environment variables for a process's rank and node. The first variable that is set determines each value."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


TORCH = Variables(
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    ("GROUP_RANK", "NODE_RANK"),
    ("GROUP_WORLD_SIZE",),
)
SLURM = Variables(
    ("SLURM_PROCID",),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ("SLURM_NODEID",),
    ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
)
# OMPI_COMM_WORLD_NODE_RANK is the rank of a process on its node, not the rank of the node
OPEN_MPI = Variables(
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
PMI = Variables(("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",))


def variables_of(place: Place) -> dict[str, str]:
    """Return the environment variables that describe this place."""
    return {name: str(getattr(place, field)) for field, names in vars(TORCH).items() for name in names}


def find_place(cluster: str = "auto") -> Place | None:
    """Return this process's place in a launcher's or the script's process group; None if there is no group.

    If `cluster` is "off", only Legato's workers have a place. Raises ConfigError if the launcher's variables conflict.
    """
    worker = get_variable("LEGATO_WORKER")
    # compared with the process id, because a worker's child processes inherit the variable but are not in the group
    if worker is not None and worker.split(":")[0] == str(os.getpid()):
        return _read(TORCH, "legato")
    if cluster == "off":
        return None
    group = find_group()
    return _launched() if group is None else _in_group(*group)


def _launched() -> Place | None:
    # checked before SLURM and MPI: torchrun's processes also have their job's variables, but torchrun defines the group
    if get_variable("TORCHELASTIC_RUN_ID") is not None:
        return _read(TORCH, "torchrun")
    # a process started by one of Legato's workers inherits RANK but is not a member of the group
    if get_variable("LEGATO_WORKER") is None and (place := _read(TORCH, "environment")) is not None:
        return place
    # an interactive shell, or a script that srun starts once, is a SLURM step with a single task: no group to join
    if read_int(*SLURM.world_size) != 1 and (place := _read(SLURM, "slurm")) is not None:
        return place
    return _read(OPEN_MPI, "mpi") or _read(PMI, "mpi")


def _read(names: Variables, origin: str) -> Place | None:
    """Return the place described by the variables; None if they are not set. Raises ConfigError if they conflict."""
    rank, world_size = read_int(*names.rank), read_int(*names.world_size)
    if rank is None or world_size is None:
        if names is TORCH and rank != world_size:
            present, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
            raise ConfigError(
                f"The environment variable {present} is set, but {missing} is not. To join a process group, set both, "
                f"as well as MASTER_ADDR and MASTER_PORT. {CLUSTER_OFF}"
            )
        return None
    nodes, node_rank, local_rank = read_int(*names.nodes), read_int(*names.node_rank), read_int(*names.local_rank)
    if names is SLURM:
        nodes = nodes or 1
        tasks = _expand_tasks(next(filter(None, map(get_variable, names.local_world_size)), ""))
        local_world_size = tasks[node_rank or 0] if (node_rank or 0) < len(tasks) else -(-world_size // nodes)
    else:
        local_world_size = read_int(*names.local_world_size) or world_size
    local_world_size = max(local_world_size, 1)  # the variable may be 0, and the code below divides by it
    nodes = nodes or -(-world_size // local_world_size)
    if node_rank is None:
        # ranks are numbered node by node
        node_rank = min(rank // local_world_size, nodes - 1) if origin == "mpi" else 0
    # launchers fill the nodes in order, and users who set RANK by hand rarely set the node rank
    local_rank = rank % local_world_size if local_rank is None else local_rank
    for number, left, size, right, most in (
        (rank, names.rank, world_size, names.world_size, world_size - 1),
        (local_rank, names.local_rank, local_world_size, names.local_world_size, local_world_size - 1),
        (node_rank, names.node_rank, nodes, names.nodes, nodes - 1),
        (local_world_size, names.local_world_size, world_size, names.world_size, world_size),
    ):
        if number > most:
            relation = "at most" if most == size else "less than"
            raise ConfigError(
                f"Environment variables conflict: {_name(left)}={number} must be {relation} {_name(right)}={size}. "
                f"Unset any variables left over from another launch. {CLUSTER_OFF}"
            )
    return Place(rank, local_rank, node_rank, world_size, local_world_size, nodes, origin)


def _name(names: tuple[str, ...]) -> str:
    """Return the first variable that is set, otherwise the last variable, which SLURM also sets outside job steps."""
    return next((name for name in names if get_variable(name)), names[-1])


def _expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node from SLURM's notation: "2(x3),1" becomes [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in runs for _ in range(int(times or 1))]


# --- groups of the script ---------------------------------------------------------------------------------------------
_made_here: Any = None
"""The default group, if Legato created it."""


def note_made_here(group: Any) -> None:
    """Record the default group that Legato created, so that `find_group` ignores it."""
    global _made_here
    _made_here = group


def _distributed() -> Any:
    """Return torch.distributed if it is imported and has a default process group, otherwise None."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def find_group() -> tuple[int, int] | None:
    """Return the rank and world size in a process group that the script created; None if there is none.

    Legato treats such a group like a launcher's group: it doesn't start any processes or destroy the group.
    """
    distributed = _distributed()
    if distributed is None or distributed.group.WORLD is _made_here:
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _in_group(rank: int, world_size: int) -> Place:
    """Return this process's place in the script's group: the launcher's place if its rank and size match."""
    try:
        launched = _launched()
    except ConfigError:  # the script may have set only some of the variables, such as WORLD_SIZE
        launched = None
    if launched is not None and (
        (launched.rank, launched.world_size) == (rank, world_size) or launched.origin == "torchrun"
    ):
        return launched
    local_rank = read_int("LOCAL_RANK")
    return Place(rank, -1 if local_rank is None else local_rank, 0, world_size, world_size, 1, "script")


# --- rank 0 -----------------------------------------------------------------------------------------------------------
def rank_zero_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function or method so that it runs only on rank 0. On other ranks it returns None."""

    @functools.wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if current_rank() == 0 else None

    return on_rank_zero


def current_rank() -> int:
    """Return this process's rank in its process group or its launcher's group; 0 if there is no group."""
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_rank())
    place = find_place()
    return 0 if place is None else place.rank
