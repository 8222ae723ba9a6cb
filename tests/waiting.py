"""Helpers for tests of real processes: which of them run, marks to wait for, a port that is free."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def free_port() -> int:
    """Return a port of this machine that is free, and is none of those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # processes that test at once are seeded alike
        with suppress(OSError), socket.create_server(("", port)):
            return port


def runs(process: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(process: int | None = None) -> set[int]:
    """Return the processes below one, by default this one, that still run."""
    return {child.pid for child in psutil.Process(process).children(recursive=True) if runs(child.pid)}


def members(session: int) -> list[int]:
    """Return the processes of a session that still run."""
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return processes


def kill_session(session: int) -> None:
    """Kill the processes of a session that still run."""
    for process in members(session):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process, signal.SIGKILL)


def own_lines(output: str) -> list[str]:
    """Return the lines of a program's standard output without gloo's, which torch 2.10 writes for each group."""
    return [line for line in output.splitlines() if not line.startswith("[Gloo] ")]


def leave(mark: Path, text: str = "") -> None:
    """Write a mark that other processes wait for; they read all of its text, also while it is written again."""
    temporary = mark.with_name(f".{os.getpid()}{mark.name}")
    temporary.write_text(text)
    temporary.replace(mark)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Wait until a condition holds; return whether it came to that within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
