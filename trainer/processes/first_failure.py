"""Exchange of the first failure among ranks through their store, where no launcher of Legato collects failures."""

import atexit
import json
import time
import traceback
from typing import Any

from ...base.errors import WorkerError
from . import connections
from .environment import leave_process_group
from .signals import INTERRUPTED, RESUME_ME
from .transport import is_communication

TELL_SECONDS = 3.0
"""Seconds in which a rank that lost its connection is told why, and rank 0, which has the store, stays for that."""


def with_first_failure(error: BaseException, store: Any, rank: int, world_size: int) -> BaseException:
    """Return the error to raise on this rank: its own, of which the others are told, or that of the first to fail.

    `store`: a store that no other thread waits at.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0, RESUME_ME, INTERRUPTED):
        return error
    if not isinstance(error, (Exception, SystemExit)):
        return error
    try:
        if rank == 0:
            atexit.register(_stay, store, world_size)  # runs before what was registered earlier closes the store
        if is_communication(error):
            return WorkerError(_ask(store, rank, world_size), rank)
        # `add` is atomic on the server: of two that fail at once one is the first
        if store.add("failure/number", 1) == 1:
            store.set("failure/first", json.dumps([rank, _sentence(error)]))
        store.add("failure/known", 1)
    except RuntimeError:  # the store is gone
        if is_communication(error):
            return WorkerError(
                f"Rank {rank} of {world_size} lost its connections, and rank 0, which has the ranks' store, has ended "
                f"without a word: it may have been killed (out of memory: see `dmesg`).",
                rank,
            )
    return error


def _ask(store: Any, rank: int, world_size: int) -> str:
    """Return a message that names the rank that failed first."""
    deadline = time.monotonic() + TELL_SECONDS
    while not store.check(["failure/first"]):
        if time.monotonic() > deadline:
            store.add("failure/known", 1)
            return (
                f"Rank {rank} of {world_size} lost its connection to another rank, and none has told of an error: one "
                f"may have been killed (out of memory: see `dmesg`), or its machine."
            )
        time.sleep(0.05)
    first, text = json.loads(store.get("failure/first"))
    store.add("failure/known", 1)
    return (
        f"Rank {first} of {world_size} failed first: {text} Its traceback is in its own output; rank {rank} only lost "
        f"the connection to it."
    )


def _sentence(error: BaseException) -> str:
    """Return an error in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}."


def _stay(store: Any, world_size: int) -> None:
    """Leave the group, by which the others notice, and keep the store until they know why, or for TELL_SECONDS."""
    # leaving closes them only where nothing refers to a group any more
    connections.shut_down(keep_port=_port(store))
    leave_process_group()
    deadline = time.monotonic() + TELL_SECONDS
    try:
        while store.add("failure/known", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.05)
    except RuntimeError:
        return


def _port(store: Any) -> int | None:
    """Return the port of a TCP store; None for one of files or of this process alone."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)
