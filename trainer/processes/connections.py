"""Connections of the process groups: the TCP sockets that were opened while the groups were made.

gloo closes a group's sockets one after the other, 10 ms each, and a rank that waits learns of a death only when the
neighbour that waits for the dead rank has closed its own. Over n ranks that would take 5 n² ms (20 s for 64).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The addresses of both ends of a connection: host and port."""

_noted: dict[int, Ends] = {}


@contextmanager
def noting(*, more: bool = False) -> Iterator[None]:
    """Note which connections are opened in this context; none where the system does not list a process's files.

    `more`: beside those noted before, for a group made within the default one; else those are forgotten.
    """
    before = _connected()
    yield
    if not more:
        _noted.clear()
    _noted.update((number, ends) for number, ends in _connected().items() if before.get(number) != ends)


def shut_down(*, keep_port: int | None = None) -> None:
    """Tell all peers at once that this process has left; the groups are of no use from then on.

    `keep_port`: port of a store, whose connections stay: a peer may have opened one while a group was made.
    """
    now = _connected()
    for number, ends in _noted.items():
        # else it is closed, and its number may be another's by now
        if now.get(number) == ends and keep_port not in (ends[0][1], ends[1][1]):
            with suppress(OSError), _borrowed(number) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _noted.clear()


def _connected() -> dict[int, Ends]:
    """Return the ends of this process's TCP connections by file number."""
    connections: dict[int, Ends] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux
        return connections
    for number in numbers:
        # closed by now, or not a socket, or not connected
        with suppress(OSError), _borrowed(number) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connections[number] = connection.getsockname()[:2], connection.getpeername()[:2]
    return connections


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Look at an open socket of someone else, which stays open. Raises OSError if there is none."""
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # under one of the script's the socket would become non-blocking, for its owner, too
    try:
        connection = socket.socket(fileno=number)
    finally:
        socket.setdefaulttimeout(limit)
    try:
        yield connection
    finally:
        connection.detach()
