"""Starts a script's ranks. As in Lightning, this process is rank 0, and every other rank reruns the script.

Attributes that `fit` sets on the module, callbacks and trainer remain available, as with a single process.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from ...base.environment import get_variable, read_int, set_variable, unset_variable

RANKS = "LEGATO_SCRIPT_RANKS"
"""Environment variable with the number of ranks. This module sets it in all ranks of a script."""
SEED = "LEGATO_SCRIPT_SEED"
RANK_0 = "LEGATO_SCRIPT_RANK_0"
"""Environment variable with rank 0's process id. Each rank removes it at startup to hide it from child processes."""
SECONDS_TO_END = 30.0
"""Time in seconds that the other ranks have to print their reports after a rank fails."""
IN_WORKERS = ("spawn", "fork", "notebook")
"""Substrings of the names of strategies and start methods that use Legato's workers instead of rerunning the script."""


def starts_script(strategy: Any) -> bool:
    """Return whether a strategy, passed as a name or an object, reruns the script instead of starting workers."""
    name = strategy if isinstance(strategy, str) else getattr(strategy, "start_method", "")
    is_script = hasattr(sys.modules["__main__"], "__file__") or "-c" in sys.orig_argv
    return is_script and not hasattr(sys, "ps1") and not any(word in name for word in IN_WORKERS)


def is_started() -> bool:
    """Return whether this module has started the script's ranks and set their environment variables."""
    return get_variable(RANKS) is not None


def shared_seed() -> int:
    """Return the seed that all of the script's ranks share if the script doesn't set one."""
    return int(get_variable(SEED) or 0)


def start_ranks(count: int, seed: int) -> None:
    """Make this process rank 0 and start ranks 1 to `count` - 1 with the same command."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    shared |= {RANKS: str(count), SEED: str(seed), RANK_0: str(os.getpid()), "NODE_RANK": "0", "GROUP_RANK": "0"}
    children: list[subprocess.Popen[bytes]] = []
    for rank in reversed(range(count)):  # set the variables of this process last
        for name, value in {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            set_variable(name, value)
        if rank:
            children.insert(0, subprocess.Popen(sys.orig_argv))
    unset_variable(RANK_0)
    # the other ranks may write files after fit, and would be interrupted if this script exited first
    atexit.register(_wait_for, children)
    threading.Thread(target=_watch, args=(children,), daemon=True).start()


_failed = threading.Event()


def note_failure() -> None:
    """Record that a run in this process has failed, so that the process waits only briefly for other ranks at exit."""
    _failed.set()


def _watch(children: "list[subprocess.Popen[bytes]]") -> None:
    """If a rank fails, terminate this process and the other ranks unless the run reports the failure first."""
    while any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children, 1) if child.poll()]
        if failed:
            # the run's report is more useful than this message, because it identifies the rank that failed first
            time.sleep(SECONDS_TO_END)
            code = children[failed[0] - 1].returncode
            print(f"legato: rank {failed[0]} of the script ended with exit code {code}.", file=sys.stderr, flush=True)
            _end(children)
            # with a signal, because an exception does not reach a main thread that is waiting in a collective
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(0.2)


def _wait_for(children: "list[subprocess.Popen[bytes]]") -> None:
    """At the end of the script, wait for the other ranks. If a run has failed, wait only for a limited time."""
    ends = time.monotonic() + SECONDS_TO_END
    for child in children:
        try:
            child.wait(max(0.1, ends - time.monotonic()) if _failed.is_set() else None)
        except subprocess.TimeoutExpired:
            _end([child])


def _end(children: "list[subprocess.Popen[bytes]]") -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()


def _follow(rank_0: int) -> None:
    """Terminate this rank SECONDS_TO_END seconds after rank 0 is killed, because rank 0 hosts the rendezvous store."""
    while os.getppid() == rank_0:  # an orphaned process has a new parent
        time.sleep(0.5)
    time.sleep(SECONDS_TO_END)
    print("legato: rank 0 of the script has ended.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


if (_rank_0 := read_int(RANK_0)) is not None:
    unset_variable(RANK_0)
    threading.Thread(target=_follow, args=(_rank_0,), daemon=True).start()
