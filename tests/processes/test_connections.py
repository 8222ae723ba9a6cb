"""Connections that are opened in a context are shut down together; other connections stay open."""

import os
import socket
from contextlib import ExitStack

import pytest
from torch.distributed import TCPStore

from legato.trainer.processes import connections


@pytest.fixture
def connect():
    """Return a function that opens a TCP connection and returns both ends."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect():
            near = opened.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
            far = opened.enter_context(listener.accept()[0])
            far.settimeout(5)
            return near, far

        yield connect
        connections.shut_down()  # what a failed test has left noted


def test_peers_of_noted_connections_hear_of_it_at_once(connect):
    earlier = connect()
    with connections.noting():
        pairs = [connect() for _ in range(3)]
    connections.shut_down()
    assert [far.recv(1) for _, far in pairs] == [b""] * 3
    assert all(near.fileno() >= 0 for near, _ in pairs)  # closed by the code that opened them
    earlier[0].sendall(b"x")
    assert earlier[1].recv(1) == b"x"


def test_a_number_that_is_another_connection_by_now(connect):
    with connections.noting():
        near, _ = connect()
    number = near.fileno()
    near.close()
    peer = connect()
    if peer[0].fileno() != number:  # a lower one was free
        os.dup2(peer[0].fileno(), number)
    connections.shut_down()
    if peer[0].fileno() != number:
        os.close(number)
    peer[0].sendall(b"x")
    assert peer[1].recv(1) == b"x"


def test_a_group_beside_the_default_one(connect):
    with connections.noting():
        first = connect()
    with connections.noting(more=True):
        second = connect()
    connections.shut_down()
    assert [far.recv(1) for _, far in (first, second)] == [b""] * 2


def test_a_second_group_takes_the_place_of_the_first(connect):
    with connections.noting():
        first = connect()
    with connections.noting():
        second = connect()
    connections.shut_down()
    assert second[1].recv(1) == b""
    first[0].sendall(b"x")
    assert first[1].recv(1) == b"x"


def test_connections_to_a_store_stay(connect):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with connections.noting():
        group, client = connect(), store.clone()
        client.set("accepted", "yes")  # both ends are open by now
    connections.shut_down(keep_port=store.port)
    assert group[1].recv(1) == b""
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_a_default_timeout_of_the_script_leaves_connections_as_they_are(connect):
    """A default timeout would make the inspected socket non-blocking, and torch's store would lose an answer."""
    near, _ = connect()
    near.settimeout(None)
    socket.setdefaulttimeout(5)
    try:
        with connections.noting():
            pass
        assert socket.getdefaulttimeout() == 5
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(near.fileno())
