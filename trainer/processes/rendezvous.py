"""Rendezvous of the ranks: a store on one address, which names ranks that are missing or there twice."""

import atexit
import errno
import ipaddress
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.errors import ConfigError, WorkerError
from .failures import end_process
from .transport import is_communication

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rendezvous:
    """Address of the store through which ranks find each other."""

    host: str = ""
    port: int = 0
    path: str = ""
    hosted_elsewhere: bool = False
    """Whether a launcher serves the store, rather than rank 0."""
    one_node: bool = False
    attempt: int = 0
    remedy: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Kept until exit: other ranks may still use a store when this rank is done, and the next group (of a second `fit`)
# finds them at the same address, under its own number.
_open: "dict[Rendezvous, tuple[Store, itertools.count[int]]]" = {}
atexit.register(_open.clear)
_met = False
"""Whether this process has been at a rendezvous."""

LEAVE_SECONDS = 20.0
"""Seconds in which rank 0, which has the store, waits for the others to hear that a rank failed before it came."""


def post_failure(where: Rendezvous, rank: int, world_size: int, text: str, by_user: bool) -> None:
    """Tell the ranks that wait at a rendezvous that this one failed before it came there.

    Does nothing once this process has been at one. Raises ConfigError where there is no store within LEAVE_SECONDS.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if _met or where.path or where.hosted_elsewhere:
        return
    store = _open_store(where, rank, world_size, timedelta(seconds=LEAVE_SECONDS))
    prefixed = PrefixStore(f"legato/{where.attempt}/0", store)
    prefixed.set("failed", json.dumps([rank, text, by_user]))
    _leave_failed(prefixed, rank, world_size)


def _leave_failed(store: "Store", rank: int, world_size: int) -> None:
    """Count this rank as one that knows of the failure; on rank 0 wait for the others, who ask its store."""
    store.add("know", 1)
    deadline = time.monotonic() + LEAVE_SECONDS
    while rank == 0 and store.add("know", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)


def join_store(where: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> "Store":
    """Return an empty store that all ranks have joined.

    Raises ConfigError if the address is taken or unknown, if nothing answers within `timeout`, or if ranks are missing
    (named) or there twice.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    global _met
    _met = True
    if where not in _open:
        _open[where] = (_open_store(where, rank, world_size, timeout), itertools.count())
    store, meetings = _open[where]
    store.set_timeout(timeout)
    store = PrefixStore(f"legato/{where.attempt}/{next(meetings)}", store)
    # Agents of several nodes each count their own restarts, so that keys of an earlier attempt may be in their store.
    if where.one_node or not where.hosted_elsewhere:
        try:
            _await_all_ranks(store, rank, world_size, where, timeout)
        except (ConfigError, WorkerError):
            del _open[where]  # closes the port on rank 0
            raise
    return store


@contextmanager
def telling_failure(store: "Store", rank: int, world_size: int) -> Iterator[None]:
    """Tell the other ranks where this one fails to connect to them, and end this process where another one has.

    They would wait for the limit of start-up. Raises WorkerError with gloo's error and what to do.
    """
    connected = threading.Event()
    connection = store.clone()  # type: ignore[attr-defined]  # the main thread's connection serves one call at a time
    threading.Thread(target=_end_with_others, args=(connection, connected), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if not is_communication(error):
            raise
        connected.set()
        reason = " ".join(str(error).split())
        said = (
            f"Rank {rank} of {world_size} cannot connect to the others ({reason}). Ranks reach each other at the "
            f"address of the interface in GLOO_SOCKET_IFNAME, or else of the machine's name: set that variable and "
            f"NCCL_SOCKET_IFNAME, on each machine, to the interface that leads to the others. See to firewalls, too."
        )
        store.set("unconnected", said)
        _leave_failed(store, rank, world_size)
        raise WorkerError(said, rank) from error
    finally:
        connected.set()


def _end_with_others(store: "Store", connected: threading.Event) -> None:
    """End this process once a rank has told that it cannot connect."""
    while not connected.wait(0.5):
        with suppress(RuntimeError):  # the store is gone
            if store.check(["unconnected"]) and not connected.is_set():
                said = store.get("unconnected").decode()
                store.add("know", 1)
                end_process(WorkerError(said))


def _open_store(where: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> "Store":
    from torch.distributed import DistError, FileStore, TCPStore  # type: ignore[attr-defined]

    if where.path:
        if not Path(where.path).parent.is_dir():
            raise ConfigError(f"The folder of init_method's file {where.path} does not exist. Make it, on every node.")
        return FileStore(where.path, world_size)
    if rank == 0 and not where.hosted_elsewhere:
        return host_store(where.host, where.port, where.one_node, where.remedy)
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


def host_store(host: str, port: int, one_node: bool, remedy: str) -> "Store":
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
        raise ConfigError(f"Port {port} of {host}, where the ranks are to meet, {reason}. {remedy}") from error
    port = listener.getsockname()[1]
    # on a socket that is bound here: TCPStore itself would listen on all interfaces
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _await_all_ranks(store: "Store", rank: int, world_size: int, where: Rendezvous, timeout: timedelta) -> None:
    """Wait until every rank has joined; raise ConfigError that names missing and duplicate ranks."""
    from torch.distributed import DistError

    try:
        # counted, not set: two processes of one rank would otherwise meet, and gloo hangs while it connects them
        if store.add(f"rank {rank}", 1) > 1:
            remedy = (
                f"If no other run uses {where.path}, an earlier one has left it: delete it."
                if where.path
                else "Another run may use this address, or RANK is the same in two processes."
            )
            raise ConfigError(f"Rank {rank} of {world_size} is at {where} already. {remedy}")
        if store.add("arrived", 1) == world_size:
            store.set("complete", "yes")
        failure = _await_complete(store, timeout)
    except (DistError, RuntimeError) as error:
        try:
            missing = [str(rank) for rank in range(world_size) if not store.check([f"rank {rank}"])]
        except (DistError, RuntimeError):  # the store was served by rank 0, which has exited
            missing = ["0"]
        raise ConfigError(
            f"Rank {rank} waited {timeout.total_seconds():g} s at {where} for {world_size} ranks; missing: "
            f"{', '.join(missing) or 'none any more'}. See that every rank starts with the same address and world size "
            "(under SLURM by srun, not by the batch script itself)."
        ) from error
    if failure:
        failed, text, by_user = json.loads(failure)
        _leave_failed(store, rank, world_size)
        kind = ConfigError if by_user else WorkerError
        raise kind(f"Rank {failed} of {world_size} failed before it met the others: {text}")


def _await_complete(store: "Store", timeout: timedelta) -> str:
    """Wait until all ranks are there; return "", or how one failed before it came. Raises DistError at the timeout."""
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.01
    while time.monotonic() < deadline:
        if store.check(["complete"]):
            return ""
        if store.check(["failed"]):
            return store.get("failed").decode()
        time.sleep(pause)
        pause = min(0.5, 1.2 * pause)  # many ranks may ask, for minutes
    store.wait(["complete"], timedelta(milliseconds=1))
    return ""
