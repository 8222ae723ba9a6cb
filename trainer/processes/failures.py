"""How a process ends in the middle of its work: by an error, or from another thread than the stuck one."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from .transport import Failure, pack

_report: Path | None = None


def set_report_file(path: Path) -> None:
    """Remember where this process, a worker, says how it ended."""
    global _report
    _report = path


def touch_alive_file() -> None:
    """Let the launcher of this process, a worker, know that a thread of it still runs."""
    if _report is not None:
        alive_file(_report).touch()


def alive_file(report: Path) -> Path:
    """Return the file that `touch_alive_file` touches, beside a worker's report."""
    return report.with_suffix(".alive")


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that the file is whole or not there."""
    partial = path.with_suffix(".part")
    partial.write_bytes(content)
    partial.replace(path)


def failure_of(error: BaseException, named: frozenset[str]) -> Failure:
    """Return how this process, a worker, failed.

    When a loader's worker has died torch says so by a signal, whose handler raises at any moment, also in here; until
    then the death may look like a broken connection.
    """
    from ..torch_private import raise_for_dead_loader_workers

    try:
        if isinstance(error, (OSError, EOFError)):
            raise_for_dead_loader_workers()
        return Failure.of_exception(error, named)
    except RuntimeError as cause:
        return Failure.of_exception(cause, named)


def end_process(error: BaseException, tell: bool = True) -> NoReturn:
    """End this process and its children with `error` as the reason; a process that nobody watches may `tell` it.

    Nothing is flushed: whoever is stuck may hold the lock of a stream.
    """
    if _report is not None:
        write_atomically(_report, pack(Failure.of_exception(error, frozenset())))
    elif tell:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def end_by_force(number: int, why: str) -> NoReturn:
    """End this process and its children in the midst of its work: a signal was not answered."""
    if _report is not None:
        what = f"was ended by {signal.Signals(number).name} in the midst of its work, since {why}"
        write_atomically(_report, pack(Failure(time.monotonic(), what, forced_by=number)))
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)
