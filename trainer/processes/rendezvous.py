"""Rendezvous of the ranks: a store on one address, which names ranks that are missing or there twice."""

import atexit
import errno
import ipaddress
import itertools
import json
import re
import resource
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ...base.environment import get_variable, read_int, restart_count, set_default
from ...base.errors import ConfigError, WorkerError
from ...base.place import Place, find_place, note_made_here
from . import connections, fork_safety
from .failures import end_process
from .transport import is_communication

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rendezvous:
    """Address of the store through which ranks find each other."""

    host: str = ""
    port: int = 0
    hosted_elsewhere: bool = False
    """Whether a launcher serves the store, rather than rank 0."""
    one_node: bool = False
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


# Kept until exit: other ranks may still use a store when this rank is done, and the next group (of a second `fit`)
# finds them at the same address, under its own number.
_open: "dict[Rendezvous, tuple[Store, itertools.count[int]]]" = {}
atexit.register(_open.clear)
_met = False
"""Whether this process has been at a rendezvous."""

LEAVE_SECONDS = 20.0
"""Seconds in which rank 0, which has the store, waits for the others to hear that a rank failed before it came."""


def find_store(place: Place, timeout: timedelta, init_method: str | None = None) -> "tuple[str, Store]":
    """Return the address of the rendezvous, and an empty store there that all ranks of `place` have joined.

    Raises ConfigError if the address is taken or unknown, if nothing answers within `timeout`, or if ranks are missing
    (named) or there twice.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    global _met
    _met, where = True, _find_rendezvous(place, init_method)
    if where.one_node:
        keep_to_loopback()
    if where not in _open:
        _open[where] = (_open_store(where, place.rank, place.world_size, timeout), itertools.count())
    store, meetings = _open[where]
    store.set_timeout(timeout)
    store = PrefixStore(f"legato/{where.attempt}/{next(meetings)}", store)
    # Agents of several nodes each count their own restarts, so that keys of an earlier attempt may be in their store.
    if where.one_node or not where.hosted_elsewhere:
        try:
            _await_all_ranks(store, place.rank, place.world_size, where, timeout)
        except (ConfigError, WorkerError):
            del _open[where]  # closes the port on rank 0
            raise
    return str(where), store


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, by its name alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_to_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface, unless the user has chosen another.

    They would take the interface of this machine's name, on which others could connect to them.
    """
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    for library in ("GLOO", "NCCL", "TP") if name else ():
        set_default(f"{library}_SOCKET_IFNAME", name)


# --- failures before the ranks have met -------------------------------------------------------------------------------
def tell_failure(text: str, by_user: bool) -> None:
    """Tell the other ranks of a launcher that this process failed before it met them; they would wait for minutes.

    `by_user`: whether they should end as this one does for a wrong config. torchrun ends them by itself. Does nothing
    once this process has been at a rendezvous. Raises ConfigError where there is no store within LEAVE_SECONDS.
    """
    place = find_place()
    if _met or place is None or place.world_size == 1 or place.origin not in ("slurm", "mpi", "environment"):
        return
    # not before: a misspelt key is to be told without the seconds that torch takes
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    where = _find_rendezvous(place, None)
    store = _open_store(where, place.rank, place.world_size, timedelta(seconds=LEAVE_SECONDS))
    prefixed = PrefixStore(f"legato/{where.attempt}/0", store)
    prefixed.set("failed", json.dumps([place.rank, text, by_user]))
    _leave_failed(prefixed, place.rank, place.world_size)


def _leave_failed(store: "Store", rank: int, world_size: int) -> None:
    """Count this rank as one that knows of the failure; on rank 0 wait for the others, who ask its store."""
    store.add("know", 1)
    deadline = time.monotonic() + LEAVE_SECONDS
    while rank == 0 and store.add("know", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def telling_failure(store: "Store", rank: int, world_size: int) -> Iterator[None]:
    """Tell the other ranks where this one fails to connect to them, and end this process where another one has.

    They would wait for the limit of start-up. Raises WorkerError with gloo's error and what to do.
    """
    connected = threading.Event()
    connection = store.clone()  # type: ignore[attr-defined]  # the main thread's connection serves one call at a time
    threading.Thread(target=_end_with_others, args=(connection, connected, rank, world_size), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if not is_communication(error):
            raise
        connected.set()
        failure = _unconnected(rank, world_size, str(error))
        with suppress(RuntimeError):  # the store is gone
            store.set("failed", json.dumps([rank, str(failure), False]))
            _leave_failed(store, rank, world_size)
        raise failure from error
    finally:
        connected.set()


def _end_with_others(store: "Store", connected: threading.Event, rank: int, world_size: int) -> None:
    """End this process once a rank has told that it cannot connect, or has ended with the store."""
    while not connected.wait(0.5):
        try:
            if not store.check(["failed"]):
                continue
            store.add("know", 1)
            failure = WorkerError(json.loads(store.get("failed"))[1])
        except RuntimeError:
            failure = _unconnected(rank, world_size, "the store, where the ranks met, has gone")
        if not connected.is_set():
            end_process(failure)


def _unconnected(rank: int, world_size: int, reason: str) -> WorkerError:
    return WorkerError(
        f"Rank {rank} of {world_size} cannot connect to the others ({' '.join(reason.split())}). Ranks reach each "
        f"other at the address of the interface in GLOO_SOCKET_IFNAME, or else of the machine's name: set that "
        f"variable and NCCL_SOCKET_IFNAME, on each machine, to the interface that leads to the others. See to "
        f"firewalls, too.",
        rank,
    )


def _open_store(where: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> "Store":
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    if rank == 0 and not where.hosted_elsewhere:
        return host_store(where.host, where.port, where.one_node)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            # a plain connection first: TCPStore tries again by itself, long beyond its limit (13 s for 5 s, torch 2.13)
            socket.create_connection((where.host, where.port), timeout=5).close()
            return TCPStore(where.host, where.port, world_size, False, timeout, wait_for_workers=False)
        except (OSError, DistError) as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Rank {rank} of {world_size} found no store at {where} within {timeout.total_seconds():g} s "
                    f"({error}). Rank 0 must run there, and the address must be the same on all ranks."
                ) from error
            time.sleep(0.05)


def host_store(host: str, port: int, one_node: bool) -> "Store":
    """Serve a store on `port` (0: a free one) of `host` only, or of all interfaces if `host` is not an address of this
    machine."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"The address {host!r}, where ranks are to meet, is unknown: {error.strerror}.") from error
    bind_to = str(address[0])
    if is_loopback(bind_to) and not one_node and not is_loopback(host):
        bind_to = ""  # Debian resolves a machine's own name to a loopback address, which other nodes cannot reach
    listener = socket.socket(family, socket.SOCK_STREAM)
    # a restart must get the port again while connections of the run before it are in TIME_WAIT
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((bind_to, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise ConfigError(
            f"Port {port} of {host}, where the ranks are to meet, {reason}. Set MASTER_PORT, or the port in "
            f"init_method, to a free one, the same on all ranks."
        ) from error
    port = listener.getsockname()[1]
    # on a socket that is bound here: TCPStore itself would listen on all interfaces
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _await_all_ranks(store: "Store", rank: int, world_size: int, where: Rendezvous, timeout: timedelta) -> None:
    """Wait until every rank has joined; raise ConfigError that names missing and duplicate ranks."""
    seconds, pause = timeout.total_seconds(), 0.01
    deadline, failure = time.monotonic() + seconds, b""
    try:
        # counted, not set: two processes of one rank would otherwise meet, and gloo hangs while it connects them
        if store.add(f"rank {rank}", 1) > 1:
            raise ConfigError(
                f"Rank {rank} of {world_size} is at {where} already. Another run may use this address, or RANK is the "
                f"same in two processes."
            )
        arrived = store.add("arrived", 1)
        while arrived < world_size and not failure:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(0.5, 1.2 * pause)  # many ranks may ask, for minutes
            failure = store.get("failed") if store.check(["failed"]) else b""
            arrived = store.add("arrived", 0)
    except (TimeoutError, RuntimeError) as error:
        try:
            missing = [str(rank) for rank in range(world_size) if not store.check([f"rank {rank}"])]
        except RuntimeError:  # the store was served by rank 0, which has exited
            missing = ["0"]
        raise ConfigError(
            f"Rank {rank} waited {seconds:g} s at {where} for {world_size} ranks; missing: "
            f"{', '.join(missing) or 'none any more'}. See that every rank starts with the same address and world size "
            "(under SLURM by srun, not by the batch script itself)."
        ) from error
    if failure:
        failed, text, by_user = json.loads(failure)
        _leave_failed(store, rank, world_size)
        kind = ConfigError if by_user else WorkerError
        raise kind(f"Rank {failed} of {world_size} failed before it met the others: {text}")


# --- the process group -----------------------------------------------------------------------------------------------
def join_process_group(
    place: Place,
    backend: str,
    timeout: timedelta,
    init_method: str | None = None,
    device: "torch.device | None" = None,
) -> str:
    """Create the default process group of `place`, unless it exists.

    Returns the address of the rendezvous, "" if the group existed.

    `init_method` is "env://" (MASTER_ADDR and MASTER_PORT, or the variables of SLURM and MPI) or "tcp://host:port". By
    default workers of Legato use their launcher's store, all others "env://". Raises ConfigError if
    the address is taken or cannot be reached, or if ranks are missing after `timeout`.

    device: the only device of this process, if there is one; NCCL then connects at once, and a rank without its
    device fails here and not in the first step.
    """
    from torch import distributed

    if distributed.is_initialized():
        fork_safety.install()
        return ""
    for name in backend.split(","):
        if not distributed.is_backend_available(name.split(":")[-1]):
            raise ConfigError(f"This build of torch has no process group backend {name.split(':')[-1]!r}; take gloo.")
    if "gloo" in backend:
        allow_connections(place.world_size)
    where, store = find_store(place, timeout, init_method)
    bound = device if ":" in backend else None  # of gloo only the host takes part
    # torchrun's agents end each other's ranks
    several = place.origin != "torchrun" and not _find_rendezvous(place, init_method).one_node
    telling = telling_failure(store, place.rank, place.world_size) if several else nullcontext()
    with connections.noting(), telling:
        distributed.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=bound
        )
    note_made_here(distributed.group.WORLD)
    fork_safety.install()
    atexit.register(leave_process_group)
    return where


GROUPS = 4
"""Process groups of a run: the script's and Legato's, and besides them those of sharded saves and batch norm."""


def allow_connections(ranks: int) -> None:
    """Raise this process's limit of open files to what gloo needs, which connects every pair of ranks in each group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + GROUPS * ranks
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def leave_process_group() -> None:
    """Destroy the process group, if there is one."""
    from torch import distributed

    atexit.unregister(leave_process_group)
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _find_rendezvous(place: Place, init_method: str | None) -> Rendezvous:
    is_local = place.nodes == 1 and place.origin in ("legato", "slurm", "mpi", "torchrun")
    if init_method not in (None, "env://"):
        address = re.fullmatch(r"tcp://(?:\[(.+)\]|([^:/?\[\]]+)):([1-9]\d{0,4})", str(init_method))
        if address is None or int(address[3]) > 65535:
            raise ConfigError(
                f"init_method must be 'env://' or 'tcp://HOST:PORT', got {init_method!r}. Rank and "
                "world size come from the launcher or from RANK and WORLD_SIZE."
            )
        host = address[1] or address[2]
        return Rendezvous(host, int(address[3]), one_node=is_local or is_loopback(host), attempt=restart_count())
    host, port = _rendezvous_address(place)
    agent = place.origin == "torchrun" and get_variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
    one_node = is_local or is_loopback(host)
    # Each of several agents counts only its own restarts, so that the count is the same on all ranks only with one
    # agent.
    return Rendezvous(host, port, agent or place.origin == "legato", one_node, restart_count() if one_node else 0)


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
            "(127.0.0.1 and a free port on one machine), or set init_method to tcp://HOST:PORT."
        )
    return host, port


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: "gpu003" for "gpu[003-005,7],cpu1"."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
