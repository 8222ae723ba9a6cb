"""The place of this process among others, as its launcher gave it; where they meet; the start of workers.

torch is imported where it is needed, so that `warm_up` can start
the workers' server while the caller still reads its config.
"""

import atexit
import functools
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ...base.environment import (
    all_variables,
    get_variable,
    read_int,
    replace_variables,
    restart_count,
    set_default,
    unset_variable,
)
from ...base.errors import ConfigError
from . import connections, fork_safety, own_group, rendezvous, workers
from .interfaces import address_towards, has_public_name, interface_of, interface_to_ranks
from .rendezvous import Rendezvous, host_store, is_loopback, join_store
from .workers import GRACE
from .workers import warm_up as warm_up

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
_CUBLAS, _FIXED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_CLUSTER_OFF = "To train without the other processes, unset them or set trainer.cluster=off."


@dataclass(frozen=True)
class Place:
    """Rank, local rank and node of this process, and the sizes that they count up to."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    origin: str = "alone"
    """Origin of the group: "alone", "legato", "torchrun", "slurm", "mpi", "environment" (RANK set by hand), or
    "script" (init_process_group; a local rank of -1 is not known yet)."""


def find_place(cluster: str = "auto") -> Place | None:
    """Return this process's place in a launcher's or the script's process group; None where there is none.

    With `cluster="off"` only Legato's own workers are seen. Raises ConfigError where the variables contradict each
    other.
    """
    worker = get_variable("LEGATO_WORKER")
    # with its process id: what a worker starts (a loader's worker, a program) inherits the variable and is no member
    if worker is not None and worker.split(":")[0] == str(os.getpid()):
        return _from_environment("legato")
    if cluster == "off":
        return None
    group = own_group.find_group()
    if group is not None:
        return _in_group(*group)
    return _from_launcher(worker)


def _from_launcher(worker: str | None) -> Place | None:
    # before SLURM's and MPI's: torchrun in such a job has their variables, too, but its own processes are the members
    if get_variable("TORCHELASTIC_RUN_ID") is not None:
        return _from_environment("torchrun")
    # A process started by a worker of Legato inherits RANK without being a member of the group.
    if worker is None and (get_variable("RANK") is not None or get_variable("WORLD_SIZE") is not None):
        return _from_environment("environment")
    return _from_slurm() or _from_mpi()


def _in_group(rank: int, world_size: int) -> Place:
    """Return the place in the script's own process group: the launcher's, if that has the same rank and size."""
    try:
        launched = _from_launcher(get_variable("LEGATO_WORKER"))
    except ConfigError:  # variables that the script set for itself, such as WORLD_SIZE alone
        launched = None
    if launched is not None and (
        (launched.rank, launched.world_size) == (rank, world_size) or launched.origin == "torchrun"
    ):
        return launched
    local_rank = read_int("LOCAL_RANK")
    return Place(rank, -1 if local_rank is None else local_rank, 0, world_size, world_size, 1, "script")


def warm_up_for(strategy: str, arguments: Mapping[str, Any]) -> None:
    """Start the fork server for a run of this strategy with these arguments of the Trainer.

    It imports torch's compiler, too, if otherwise every worker would, which takes as long as torch's own import.
    """
    compiles = any(arguments[name] for name in ("compile", "deterministic", "activation_checkpointing"))
    spared = strategy in ("auto", "ddp") and arguments["reproducible"] != "bitwise" and not compiles
    warm_up([] if spared else ["torch._dynamo"])


def rank_zero_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function or method run on rank 0 only; on other ranks it returns None."""

    @functools.wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if current_rank() == 0 else None

    return on_rank_zero


def current_rank() -> int:
    """Return this process's rank, of the process group or as the launcher gave it; 0 where there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    place = find_place()
    return 0 if place is None else place.rank


def leads_job() -> bool:
    """Return whether this process is rank 0, or alone, as its launcher gave it; torch need not be imported for it."""
    worker = get_variable("LEGATO_WORKER")
    own = worker is not None and worker.split(":")[0] == str(os.getpid())
    place = _from_environment("legato") if own else _from_launcher(worker)
    return place is None or place.rank == 0


@contextmanager
def deterministic_cublas(device_type: str) -> Iterator[None]:
    """Have cuBLAS add up in a fixed order: set CUBLAS_WORKSPACE_CONFIG, before CUDA starts, and remove it on exit.

    Raises ConfigError on CUDA where it is set to what leaves the order open.
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    given = get_variable(_CUBLAS)
    if given is not None and given not in _FIXED_WORKSPACES and device_type == "cuda":
        raise ConfigError(
            f"trainer.reproducible=bitwise and trainer.deterministic need {_CUBLAS} to be one of "
            f"{' and '.join(_FIXED_WORKSPACES)}, but it is {given!r}. Unset it: Legato sets it by itself."
        )
    set_default(_CUBLAS, _FIXED_WORKSPACES[0])
    try:
        yield
    finally:
        if given is None:
            unset_variable(_CUBLAS)


def _from_environment(origin: str) -> Place:
    rank, world_size = read_int("RANK"), read_int("WORLD_SIZE")
    if rank is None or world_size is None:
        there, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        raise ConfigError(
            f"The environment variable {there} is set and {missing} is not. Set both, with MASTER_ADDR and MASTER_PORT,"
            f" to join a group. {_CLUSTER_OFF}"
        )
    local_rank, local_world_size = read_int("LOCAL_RANK"), read_int("LOCAL_WORLD_SIZE") or max(world_size, 1)
    nodes = read_int("GROUP_WORLD_SIZE") or -(-world_size // local_world_size)
    local_rank = rank % local_world_size if local_rank is None else local_rank
    node_rank = read_int("GROUP_RANK", "NODE_RANK") or 0
    place = Place(rank, local_rank, node_rank, world_size, local_world_size, nodes, origin)
    return _check_numbers(
        place, ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    )


def _from_slurm() -> Place | None:
    rank, world_size = read_int("SLURM_PROCID"), read_int("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    # An interactive shell is a step of one task; so is a script that srun starts once: there is nothing to join.
    if rank is None or world_size is None or world_size == 1:
        return None
    nodes = read_int("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    node_rank, local_rank = read_int("SLURM_NODEID") or 0, read_int("SLURM_LOCALID")
    tasks = _expand_tasks(get_variable("SLURM_STEP_TASKS_PER_NODE") or get_variable("SLURM_TASKS_PER_NODE") or "")
    local_world_size = max(1, tasks[node_rank] if node_rank < len(tasks) else -(-world_size // nodes))
    local_rank = rank % local_world_size if local_rank is None else local_rank
    place = Place(rank, local_rank, node_rank, world_size, local_world_size, nodes, "slurm")
    return _check_numbers(
        place,
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NNODES"),
    )


def _from_mpi() -> Place | None:
    open_mpi = get_variable("OMPI_COMM_WORLD_RANK") is not None
    rank, world_size = read_int("OMPI_COMM_WORLD_RANK", "PMI_RANK"), read_int("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    if rank is None or world_size is None:
        return None
    local_rank = read_int("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    local_world_size = read_int("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") or max(world_size, 1)
    local_rank = rank % local_world_size if local_rank is None else local_rank
    # OMPI_COMM_WORLD_NODE_RANK is a process's rank on its node, not the node's.
    nodes = -(-world_size // local_world_size)
    node_rank = min(rank // local_world_size, nodes - 1)
    place = Place(rank, local_rank, node_rank, world_size, local_world_size, nodes, "mpi")
    names = ("RANK", "LOCAL_RANK", "", "SIZE", "LOCAL_SIZE", "")
    return _check_numbers(
        place,
        tuple(f"OMPI_COMM_WORLD_{name}" for name in names)
        if open_mpi
        else ("PMI_RANK", "MPI_LOCALRANKID", "", "PMI_SIZE", "MPI_LOCALNRANKS", ""),
    )


def _check_numbers(place: Place, names: tuple[str, ...]) -> Place:
    """Return `place` if its numbers fit together; `names`: the variables they were read from, in the order of its
    fields."""
    for number, size, left, right in (
        (place.rank, place.world_size, names[0], names[3]),
        (place.local_rank, place.local_world_size, names[1], names[4]),
        (place.node_rank, place.nodes, names[2], names[5]),
        (place.local_world_size, place.world_size + 1, names[4], names[3]),
    ):
        if number >= size:
            size -= left == names[4]
            fits = "at most" if left == names[4] else "less than"
            raise ConfigError(
                f"The environment contradicts itself: {left}={number} must be {fits} {right}={size}. Unset what is "
                f"left over from another launch. {_CLUSTER_OFF}"
            )
    return place


def _expand_tasks(text: str) -> list[int]:
    """Return SLURM's tasks per node: "2(x3),1" is [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: "gpu003" for "gpu[003-005,7],cpu1"."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


# --- how they find each other ---------------------------------------------------------------------------------------


def join_process_group(
    place: Place,
    backend: str,
    timeout: timedelta,
    init_method: str | None = None,
    device: "torch.device | None" = None,
) -> str:
    """Create the default process group of `place`, unless it exists.

    Returns the address of the rendezvous, "" if the group existed.

    `init_method` is "env://" (MASTER_ADDR and MASTER_PORT, or the variables of SLURM and MPI), "tcp://host:port" or
    "file:///path". By default workers of Legato use their launcher's store, all others "env://". Raises ConfigError if
    the address is taken or cannot be reached, or if ranks are missing after `timeout`.

    device: the only device of this process, if there is one; NCCL then connects at once, and a rank without its
    device fails here and not in the first step.
    """
    from torch import distributed

    if distributed.is_initialized():
        fork_safety.install()
        have = (distributed.get_rank(), distributed.get_world_size())
        if have != (place.rank, place.world_size):
            raise ConfigError(
                f"The process group that exists already has rank {have[0]} of {have[1]}; this run expects rank "
                f"{place.rank} of {place.world_size}. End it by torch.distributed.destroy_process_group()."
            )
        return ""
    for name in backend.split(","):
        if not distributed.is_backend_available(name.split(":")[-1]):
            raise ConfigError(f"This build of torch has no process group backend {name.split(':')[-1]!r}; take gloo.")
    if backend == "mpi":  # MPI assigns ranks itself
        distributed.init_process_group("mpi", timeout=timeout)
        own_group.note_made_here()
        return "MPI's own place"
    if "gloo" in backend:
        allow_connections(place.world_size)
    where, store = find_store(place, timeout, init_method)
    bound = device if ":" in backend else None  # of gloo and MPI only the host takes part
    # torchrun's agents end each other's ranks
    several = place.origin != "torchrun" and not _find_rendezvous(place, init_method).one_node
    telling = rendezvous.telling_failure(store, place.rank, place.world_size) if several else nullcontext()
    with connections.noting(), telling:
        distributed.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=bound
        )
    own_group.note_made_here()
    fork_safety.install()
    atexit.register(leave_process_group)
    return where


LEAST_GROUPS, MOST_GROUPS = 2, 4
"""Process groups of a run: the script's and Legato's, and besides them those of sharded saves and batch norm."""


def allow_connections(ranks: int) -> None:
    """Raise this process's limit of open files to what gloo needs, which connects every pair of ranks in each group.

    Raises ConfigError where the system does not allow as many.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least, wanted = 64 + LEAST_GROUPS * ranks, 256 + MOST_GROUPS * ranks
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < least:
        raise ConfigError(
            f"{ranks} processes need about {least} open files each, for their connections, and this machine allows "
            f"{hard}. Raise the limit (`ulimit -Hn`, or nofile in /etc/security/limits.conf), or start fewer processes."
        )
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(wanted, hard), hard))


def find_store(place: Place, timeout: timedelta, init_method: str | None = None) -> "tuple[str, Store]":
    """Return the address of the rendezvous and the store there, once all ranks of `place` have joined it."""
    where = _find_rendezvous(place, init_method)
    if where.one_node:
        _keep_to_loopback()
    store = join_store(where, place.rank, place.world_size, timeout)
    if not where.one_node:
        name = interface_to_ranks(store, where.host, place.rank, place.world_size)
        if not has_public_name():
            _keep_to_interface(name)
    return str(where), store


def tell_failure(text: str, by_user: bool) -> None:
    """Tell the other ranks of a launcher that this process failed before it met them; they would wait for minutes.

    `by_user`: whether they should end as this one does for a wrong config. torchrun ends them by itself.
    """
    place = find_place()
    if place is None or place.world_size == 1 or place.origin not in ("slurm", "mpi", "environment"):
        return
    rendezvous.post_failure(_find_rendezvous(place, None), place.rank, place.world_size, text, by_user)


def leave_process_group() -> None:
    """Destroy the process group, if there is one."""
    from torch import distributed

    atexit.unregister(leave_process_group)
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _find_rendezvous(place: Place, init_method: str | None) -> Rendezvous:
    parts = urlsplit(init_method or "env://")
    known = place.nodes == 1 and place.origin in ("legato", "slurm", "mpi", "torchrun")
    if parts.scheme == "file" and parts.path and not parts.query:
        return Rendezvous(path=parts.netloc + parts.path, one_node=known, attempt=restart_count())
    if parts.scheme == "tcp" and parts.hostname and not parts.query and (port := _port_of(parts)):
        remedy = f"Choose another port in init_method={init_method!r}."
        one_node = known or is_loopback(parts.hostname)
        return Rendezvous(parts.hostname, port, one_node=one_node, attempt=restart_count(), remedy=remedy)
    if parts.scheme != "env" or parts.netloc or parts.path or parts.query:
        raise ConfigError(
            f"init_method must be 'env://', 'tcp://HOST:PORT' or 'file:///PATH', got {init_method!r}. Rank and "
            "world size come from the launcher or from RANK and WORLD_SIZE."
        )
    host, port = _rendezvous_address(place)
    agent = place.origin == "torchrun" and get_variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elsewhere = agent or place.origin == "legato"
    one_node = known or is_loopback(host)
    # Each of several agents counts only its own restarts, so that the count is the same on all ranks only with one
    # agent.
    attempt = restart_count() if one_node else 0
    return Rendezvous(
        host, port, "", elsewhere, one_node, attempt, "Set MASTER_PORT to a free port, the same on all ranks."
    )


def _port_of(parts: Any) -> int | None:
    try:
        return parts.port or None
    except ValueError:
        return None


def _rendezvous_address(place: Place) -> tuple[str, int]:
    host, port = (get_variable("MASTER_ADDR") or ""), read_int("MASTER_PORT")
    if place.origin in ("slurm", "mpi") and place.nodes == 1:
        host = host or "127.0.0.1"
    if place.origin == "slurm":
        host = host or first_host(get_variable("SLURM_STEP_NODELIST") or (get_variable("SLURM_JOB_NODELIST") or ""))
        # Jobs of one node often have ids in a row, and steps of a job always: a job's next step must not meet at the
        # port of the next job. Below the ephemeral ports.
        number, step = read_int("SLURM_JOB_ID", "SLURM_JOBID") or 0, read_int("SLURM_STEP_ID", "SLURM_STEPID") or 0
        port = port or 15000 + (number + 7919 * step) % 16000
    if place.origin == "mpi":
        job = get_variable("PMIX_NAMESPACE")
        port = port or (15000 + zlib.crc32(job.encode()) % 16000 if job else 29500)
    if not host or not port or port > 65535:
        raise ConfigError(
            "Ranks meet by env:// at MASTER_ADDR and MASTER_PORT, "
            f"got MASTER_ADDR={host!r} and MASTER_PORT={port or ''!r}. Set both, the same on all ranks "
            "(127.0.0.1 and a free port on one machine), or set init_method to tcp://HOST:PORT or file:///PATH."
        )
    return host, port


def keep_to_route(host: str) -> None:
    """Restrict gloo and NCCL to the network interface that leads to `host`, unless the user has chosen another."""
    if is_loopback(host):
        _keep_to_loopback()
    elif not has_public_name():
        _keep_to_interface(interface_of(address_towards(host)))


def _keep_to_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface, unless the user has chosen another."""
    _keep_to_interface(next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), ""))


def _keep_to_interface(name: str) -> None:
    """Restrict gloo and NCCL to a network interface, if there is one, unless the user has chosen another."""
    if name:
        set_default("GLOO_SOCKET_IFNAME", name)
        set_default("NCCL_SOCKET_IFNAME", name)
        set_default("TP_SOCKET_IFNAME", name)


# --- Legato's own workers -------------------------------------------------------------------------------------------


def run_workers(
    function: Callable[[], T],
    processes: int,
    *,
    threads: int | None = None,
    max_restarts: int = 0,
    nodes: int = 1,
    grace: float = GRACE,
) -> T:
    """Call `function` in `processes` new processes of this machine and return what the first of them returned.

    Each has `threads` intra-op threads (None: OMP_NUM_THREADS, else its share of the cores; at most the caller's).
    After a failure all are stopped and, up to `max_restarts` times, started again. With `nodes` > 1 every node makes
    the same call, with NODE_RANK, MASTER_ADDR and MASTER_PORT set. `grace`, errors: see `launch_workers`.
    """
    if processes < 1:
        raise ConfigError(f"The number of processes must be at least 1, got {processes}.")
    if nodes > 1 and max_restarts:
        raise ConfigError("max_restarts restarts one node's workers only; with num_nodes > 1 use torchrun's.")
    warm_up()
    node_rank, host, port = _node(nodes) if nodes > 1 else (0, "127.0.0.1", 0)
    store: Any = None
    if node_rank == 0:
        # Here and not in rank 0, which may die: the workers of a restart meet at the same store. No worker is forked
        # from this process, since a child of the process that serves a TCPStore may hang (in 6 of 12 rounds in a test).
        store = host_store(host, port, nodes == 1, "Set MASTER_PORT to a free port, the same on all nodes.")
        port = store.port
    environment = all_variables()
    threads = threads or threads_of_worker(processes)
    ranks = range(node_rank * processes, (node_rank + 1) * processes)

    def enter(attempt: int, rank: int) -> Callable[[], None]:
        place = Place(rank, rank - ranks[0], node_rank, processes * nodes, processes, nodes, "legato")
        return functools.partial(set_worker_environment, place, environment, host, port, attempt, threads)

    result: T = workers.launch_workers(
        function, ranks, processes * nodes, enter, max_restarts=max_restarts, grace=grace
    )
    return result


def node_rank(nodes: int) -> int:
    """Return the rank of this machine among `nodes`. Raises ConfigError where no variable has it."""
    return _node(nodes)[0] if nodes > 1 else 0


def _node(nodes: int) -> tuple[int, str, int]:
    node_rank = read_int("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
    host, port = (get_variable("MASTER_ADDR") or ""), read_int("MASTER_PORT")
    if node_rank is None or not host or not port:
        raise ConfigError(
            f"With num_nodes={nodes} each node needs NODE_RANK (0 to {nodes - 1}), MASTER_ADDR (the address of node 0) "
            "and MASTER_PORT (a free port of it) in its environment; or start the processes with torchrun or srun."
        )
    if node_rank >= nodes:
        raise ConfigError(f"NODE_RANK={node_rank} must be less than num_nodes={nodes}.")
    return node_rank, host, port


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_worker(processes: int) -> int:
    """Return the number of intra-op threads of each worker: at most as many as the caller has chosen for itself."""
    import torch

    return min(read_int("OMP_NUM_THREADS") or max(1, _cores() // processes), torch.get_num_threads())


def set_worker_environment(
    place: Place, environment: dict[str, str], host: str, port: int, attempt: int, threads: int
) -> None:
    """Set the environment of a worker: the caller's current one (the fork server's is older), with the variables of
    `place`."""
    import torch

    variables = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.node_rank),
        "NODE_RANK": str(place.node_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "LEGATO_WORKER": f"{os.getpid()}:{attempt}",
    }
    replace_variables(environment | variables)
    # OpenMP has read its variable already, in the fork server, when torch was imported
    torch.set_num_threads(threads)
