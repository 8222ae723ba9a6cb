"""Connections of the process groups: the TCP sockets that are opened while the groups are made.

gloo closes a group's sockets one by one, 10 ms each, and a waiting rank learns of a death only when the neighbor that
waits for the dead rank has closed its sockets. Over n ranks that would take 5 n² ms (20 s for 64).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Host and port of both ends of a connection."""

_noted: dict[int, Ends] = {}


@contextmanager
def noting(*, more: bool = False) -> Iterator[None]:
    """Note the connections opened in this context. Does nothing if the system does not list a process's files.

    Args:
        more: whether to keep earlier notes, for a group made within the default group. If False, they are dropped.
    """
    before = _connected()
    yield
    if not more:
        _noted.clear()
    _noted.update((number, ends) for number, ends in _connected().items() if before.get(number) != ends)


def shut_down(*, keep_port: int | None = None) -> None:
    """Shut down all noted connections, so that all peers learn at once that this process has left its groups.

    Args:
        keep_port: port of a store. Its connections stay open, because a peer may have opened one while a group was
            made.
    """
    now = _connected()
    for number, ends in _noted.items():
        # otherwise the connection is closed, and another file may have reused its number
        if now.get(number) == ends and keep_port not in (ends[0][1], ends[1][1]):
            with suppress(OSError), _borrowed(number) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _noted.clear()


def _connected() -> dict[int, Ends]:
    """Return the two addresses of each of this process's TCP connections, by file descriptor."""
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
    """Yield an open socket without taking ownership, so that it stays open.

    Raises OSError if the file is not a socket.
    """
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # the script's timeout would make the socket non-blocking, for its owner too
    try:
        connection = socket.socket(fileno=number)
    finally:
        socket.setdefaulttimeout(limit)
    try:
        yield connection
    finally:
        connection.detach()
