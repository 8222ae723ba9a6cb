"""Connections of process groups: the TCP sockets opened while the groups are being created.

gloo takes 10 ms to close each of a group's sockets, one after another. If a rank dies, a waiting rank learns of it
only after the neighbor that is waiting for the dead rank has closed its sockets. For n ranks, this would take 5 n² ms
(20 s for 64 ranks).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Host and port of each end of a connection."""

_noted: dict[int, Ends] = {}


@contextmanager
def noting(*, more: bool = False) -> Iterator[None]:
    """Record the connections opened in this context. Does nothing if the system does not list a process's open files.

    Args:
        more: whether to keep earlier records, for example when a group is created in addition to the default group.
    """
    before = _connected()
    yield
    if not more:
        _noted.clear()
    _noted.update((number, ends) for number, ends in _connected().items() if before.get(number) != ends)


def shut_down(*, keep_port: int | None = None) -> None:
    """Shut down all recorded connections, so that all peers learn immediately that this process has left its groups.

    Args:
        keep_port: port of a store. Connections to the store are left open. A peer may have opened one of them while a
            group was being created, so they may be among the recorded connections.
    """
    now = _connected()
    for number, ends in _noted.items():
        # otherwise the connection is closed, and another file may have reused its number
        if now.get(number) == ends and keep_port not in (ends[0][1], ends[1][1]):
            with suppress(OSError), _borrowed(number) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _noted.clear()


def _connected() -> dict[int, Ends]:
    """Return both addresses of each of this process's TCP connections, keyed by file descriptor."""
    connections: dict[int, Ends] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux
        return connections
    for number in numbers:
        # the file may be closed by now, not a socket, or not connected
        with suppress(OSError), _borrowed(number) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connections[number] = connection.getsockname()[:2], connection.getpeername()[:2]
    return connections


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Yield the socket for an open file descriptor, and leave it open.

    Raises OSError if the file is not a socket.
    """
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # the script's timeout would make the socket non-blocking, for its owner, too
    try:
        connection = socket.socket(fileno=number)
    finally:
        socket.setdefaulttimeout(limit)
    try:
        yield connection
    finally:
        connection.detach()
