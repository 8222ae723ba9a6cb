"""Terminates a worker: writes its report, and kills a process whose main thread hangs."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import NoReturn

from .transport import Failure, pack

_report: Path | None = None


def set_report_file(path: Path) -> None:
    """Set the file where this worker reports how it exited."""
    global _report
    _report = path


def touch_alive_file() -> None:
    """Touch this worker's alive file to show that a thread is still running."""
    if _report is not None:
        alive_file(_report).touch()


def alive_file(report: Path) -> Path:
    """Return the alive file that belongs to a worker's report."""
    return report.with_suffix(".alive")


def write_atomically(path: Path, *contents: bytes) -> None:
    """Write the `contents`, one after another, to a file that appears only once it is complete."""
    partial = path.with_suffix(".part")
    try:
        with partial.open("wb") as file:
            file.writelines(contents)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, this makes room for a smaller file, such as a failure report
        raise
    partial.replace(path)  # the launcher may read it at any moment


def leave(code: int, end: "int | Failure") -> NoReturn:
    """Write the report and kill this process and its children.

    Streams are not flushed, because a hung thread may hold a stream's lock.
    """
    try:
        if _report is not None:
            write_atomically(_report, pack(end))
    except OSError as error:  # a full disk: the launcher sees only the exit code
        text = end.text or end.summary if isinstance(end, Failure) else ""
        os.write(2, f"{text}\nThe report for the launcher cannot be written: {error}\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    # not sys.exit, which raises only in this thread and joins threads that may never exit
    os._exit(code)


def end_process(error: BaseException, tell: bool = True) -> NoReturn:
    """Report `error` and kill this process and its children. Without a launcher, print `error` if `tell` is true."""
    if _report is None and tell:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    leave(1, Failure.of_exception(error))


def end_by_force(number: int, reason: str) -> NoReturn:
    """Kill this process and its children because this process did not respond to signal `number`."""
    event = f"was ended by {signal.Signals(number).name} before its work was done, because {reason}"
    leave(128 + number, Failure(event, signal=number, is_forced=True))
