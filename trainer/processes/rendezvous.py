"""Rendezvous of the ranks through a store, with errors that list missing and duplicate ranks."""

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
    """True if a launcher serves the store, False if rank 0 does."""
    one_node: bool = False
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


# Kept until exit: other ranks may still be using a store when this rank is done, and the next group (of a second `fit`)
# meets at the same address, under a new number.
_open: "dict[Rendezvous, tuple[Store, itertools.count[int]]]" = {}
atexit.register(_open.clear)
_met = False
"""True once this process has taken part in a rendezvous."""

LEAVE_SECONDS = 20.0
"""Seconds that rank 0, which serves the store, waits for other ranks to learn of a failure before the rendezvous."""


def find_store(place: Place, timeout: timedelta, init_method: str | None = None) -> "tuple[str, Store]":
    """Return the rendezvous address and an empty store at that address, which all ranks have joined.

    Raises ConfigError if the address is in use or unknown, if nothing responds within `timeout`, or if ranks are
    missing or duplicate. The error lists missing and duplicate ranks.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    global _met
    _met, address = True, _find_rendezvous(place, init_method)
    if address.one_node:
        keep_to_loopback()
    if address not in _open:
        _open[address] = (_open_store(address, place.rank, place.world_size, timeout), itertools.count())
    store, meetings = _open[address]
    store.set_timeout(timeout)
    store = PrefixStore(f"legato/{address.attempt}/{next(meetings)}", store)
    # On multiple nodes, each agent counts only its own restarts, so the store may contain keys from an earlier attempt.
    if address.one_node or not address.hosted_elsewhere:
        try:
            _await_all_ranks(store, place.rank, place.world_size, address, timeout)
        except (ConfigError, WorkerError):
            del _open[address]  # closes the port on rank 0
            raise
    return str(address), store


def is_loopback(host: str) -> bool:
    """Return whether `host` is "localhost" or a numeric loopback address; other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_to_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface, unless the user has chosen a different one.

    By default, gloo and NCCL use the interface that this machine's name resolves to, which accepts connections from
    other machines.
    """
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    for library in ("GLOO", "NCCL", "TP") if name else ():
        set_default(f"{library}_SOCKET_IFNAME", name)


# --- failures before the ranks have met -------------------------------------------------------------------------------
def tell_failure(text: str, by_user: bool) -> None:
    """Tell the launcher's other processes that this process failed before the rendezvous.

    Otherwise, the other ranks would wait at the rendezvous for minutes.

    Args:
        by_user: True if the user caused the failure. The other ranks then raise ConfigError instead of WorkerError.

    Does nothing after a rendezvous, or under torchrun, which terminates the other ranks itself.

    Raises ConfigError if no store is available within LEAVE_SECONDS.
    """
    place = find_place()
    if _met or place is None or place.world_size == 1 or place.origin not in ("slurm", "mpi", "environment"):
        return
    # not imported earlier: a misspelled key must be reported without first waiting seconds for torch
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    address = _find_rendezvous(place, None)
    store = _open_store(address, place.rank, place.world_size, timedelta(seconds=LEAVE_SECONDS))
    prefixed = PrefixStore(f"legato/{address.attempt}/0", store)
    prefixed.set("failed", json.dumps([place.rank, text, by_user]))
    _leave_failed(prefixed, place.rank, place.world_size)


def _leave_failed(store: "Store", rank: int, world_size: int) -> None:
    """Record that this rank knows of the failure. Rank 0, which serves the store, then waits for the other ranks."""
    store.add("know", 1)
    deadline = time.monotonic() + LEAVE_SECONDS
    while rank == 0 and store.add("know", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def telling_failure(store: "Store", rank: int, world_size: int) -> Iterator[None]:
    """Report connection failures to all ranks: if any rank cannot connect in this context, all ranks exit.

    Otherwise, the other ranks would wait for the startup timeout to expire. If this rank cannot connect, raises
    WorkerError with gloo's error and advice. If another rank reports a failure, terminates this process.
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
    """Terminate this process if a rank cannot connect, or if rank 0, which serves the store, has exited."""
    while not connected.wait(0.5):
        try:
            if not store.check(["failed"]):
                continue
            store.add("know", 1)
            failure = WorkerError(json.loads(store.get("failed"))[1])
        except RuntimeError:
            failure = _unconnected(rank, world_size, "the rendezvous store is no longer available")
        if not connected.is_set():
            end_process(failure)


def _unconnected(rank: int, world_size: int, reason: str) -> WorkerError:
    return WorkerError(
        f"Rank {rank} of {world_size} cannot connect to the others ({' '.join(reason.split())}). Ranks connect through "
        f"the interface named in GLOO_SOCKET_IFNAME or, by default, that of the machine's host name. On each machine, "
        f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that reaches the others. Check the firewall.",
        rank,
    )


def _open_store(address: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> "Store":
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    if rank == 0 and not address.hosted_elsewhere:
        return host_store(address.host, address.port, address.one_node)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            # a plain connection first, because TCPStore's retries exceed its timeout (13 s for 5 s in torch 2.13)
            socket.create_connection((address.host, address.port), timeout=5).close()
            return TCPStore(address.host, address.port, world_size, False, timeout, wait_for_workers=False)
        except (OSError, DistError) as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Rank {rank} of {world_size} found no store at {address} within {timeout.total_seconds():g} s "
                    f"({error}). Rank 0 must be running there, and the address must be the same on all ranks."
                ) from error
            time.sleep(0.05)


def host_store(host: str, port: int, one_node: bool) -> "Store":
    """Serve a store on `port` (0 means any free port) of `host`, or on all interfaces if `host` cannot be bound."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"Unknown host {host!r}: {error.strerror}. Set MASTER_ADDR to rank 0's address.") from error
    bind_to = str(address[0])
    if is_loopback(bind_to) and not one_node and not is_loopback(host):
        bind_to = ""  # Debian resolves a machine's name to a loopback address, which other nodes cannot reach
    listener = socket.socket(family, socket.SOCK_STREAM)
    # a restart needs the port again while connections of the previous run are in TIME_WAIT
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
            f"The rendezvous port {port} on {host} {reason}. Set MASTER_PORT, or the port in init_method, to the same "
            f"free port on all ranks."
        ) from error
    port = listener.getsockname()[1]
    # on a socket bound here, because TCPStore would listen on all interfaces
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _await_all_ranks(store: "Store", rank: int, world_size: int, address: Rendezvous, timeout: timedelta) -> None:
    """Wait until every rank has joined. Raises a ConfigError that lists any missing or duplicate ranks."""
    seconds, pause = timeout.total_seconds(), 0.01
    deadline, failure = time.monotonic() + seconds, b""
    try:
        # counted, not set: otherwise two processes with the same rank would meet, and gloo hangs when it connects them
        if store.add(f"rank {rank}", 1) > 1:
            raise ConfigError(
                f"Rank {rank} of {world_size} has already joined at {address}. Another run may be using this address, "
                f"or two processes may have the same RANK."
            )
        arrived = store.add("arrived", 1)
        while arrived < world_size and not failure:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(0.5, 1.2 * pause)  # many ranks may poll for minutes
            failure = store.get("failed") if store.check(["failed"]) else b""
            arrived = store.add("arrived", 0)
    except (TimeoutError, RuntimeError) as error:
        try:
            missing = [str(rank) for rank in range(world_size) if not store.check([f"rank {rank}"])]
        except RuntimeError:  # rank 0, which served the store, has exited
            missing = ["0"]
        raise ConfigError(
            f"Rank {rank} waited {seconds:g} s at {address} for {world_size} ranks; missing: "
            f"{', '.join(missing) or 'none now'}. Start every rank with the same address and world size (under "
            "SLURM with srun, not from the batch script itself)."
        ) from error
    if failure:
        failed, text, by_user = json.loads(failure)
        _leave_failed(store, rank, world_size)
        kind = ConfigError if by_user else WorkerError
        raise kind(f"Rank {failed} of {world_size} failed before the rendezvous: {text}")


# --- the process group -----------------------------------------------------------------------------------------------
def join_process_group(
    place: Place,
    backend: str,
    timeout: timedelta,
    init_method: str | None = None,
    device: "torch.device | None" = None,
) -> str:
    """Create the default process group; return the address of the rendezvous, or "" if the group already exists.

    Args:
        init_method: "env://" (MASTER_ADDR and MASTER_PORT, or the variables set by SLURM or MPI) or "tcp://host:port".
            By default, Legato's workers use their launcher's store, and all other processes use "env://".
        device: the process's device if it has only one. NCCL then connects immediately, so a rank whose device is
            missing fails here rather than in the first step.

    Raises ConfigError if the address is in use or cannot be reached, or if ranks are missing after `timeout`.
    """
    from torch import distributed

    if distributed.is_initialized():
        fork_safety.install()
        return ""
    for name in backend.split(","):
        if not distributed.is_backend_available(name.split(":")[-1]):
            raise ConfigError(f"torch was built without {name.split(':')[-1]!r}. Set process_group_backend=gloo.")
    if "gloo" in backend:
        allow_connections(place.world_size)
    address, store = find_store(place, timeout, init_method)
    bound = device if ":" in backend else None  # gloo alone uses only the host
    # not under torchrun, whose agents terminate each other's ranks
    several = place.origin != "torchrun" and not _find_rendezvous(place, init_method).one_node
    telling = telling_failure(store, place.rank, place.world_size) if several else nullcontext()
    with connections.noting(), telling:
        distributed.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=bound
        )
    note_made_here(distributed.group.WORLD)
    fork_safety.install()
    atexit.register(leave_process_group)
    return address


GROUPS = 4
"""Number of process groups in a run: the script's, Legato's, and those for sharded saves and batch norm."""


def allow_connections(ranks: int) -> None:
    """Raise this process's open-file limit, because gloo connects every pair of ranks in each group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + GROUPS * ranks
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def leave_process_group() -> None:
    """Destroy the process group if it exists."""
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
                f"init_method must be 'env://' or 'tcp://HOST:PORT', got {init_method!r}. The rank and "
                "world size come from the launcher, or from RANK and WORLD_SIZE."
            )
        host = address[1] or address[2]
        return Rendezvous(host, int(address[3]), one_node=is_local or is_loopback(host), attempt=restart_count())
    host, port = _rendezvous_address(place)
    agent = place.origin == "torchrun" and get_variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
    one_node = is_local or is_loopback(host)
    # each agent counts only its own restarts, so the count is equal on all ranks only with a single agent
    return Rendezvous(host, port, agent or place.origin == "legato", one_node, restart_count() if one_node else 0)


def _rendezvous_address(place: Place) -> tuple[str, int]:
    host, port = (get_variable("MASTER_ADDR") or ""), read_int("MASTER_PORT")
    if place.origin in ("slurm", "mpi") and place.nodes == 1:
        host = host or "127.0.0.1"
    if place.origin == "slurm":
        host = host or first_host(get_variable("SLURM_STEP_NODELIST") or (get_variable("SLURM_JOB_NODELIST") or ""))
        # Jobs on a node often have consecutive ids, and the steps of a job always do: a job's next step must not use
        # the next job's port. The ports are below the ephemeral ones.
        number, step = read_int("SLURM_JOB_ID", "SLURM_JOBID") or 0, read_int("SLURM_STEP_ID", "SLURM_STEPID") or 0
        port = port or 15000 + (number + 7919 * step) % 16000
    if place.origin == "mpi":
        job = get_variable("PMIX_NAMESPACE")
        port = port or (15000 + zlib.crc32(job.encode()) % 16000 if job else 29500)
    if not host or not port or port > 65535:
        raise ConfigError(
            "The env:// rendezvous requires MASTER_ADDR and MASTER_PORT, "
            f"got MASTER_ADDR={host!r} and MASTER_PORT={port or ''!r}. Set both to the same values on all ranks "
            "(127.0.0.1 and a free port on a single machine), or set init_method to tcp://HOST:PORT."
        )
    return host, port


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: "gpu003" for "gpu[003-005,7],cpu1"."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(text or "" for text in match.groups()) if match else ""
