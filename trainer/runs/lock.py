"""RunLock: at most one run at a time writes to a folder, and a dead one does not keep it.

A lease of filelock: the holder touches `.lock` every few seconds. A dead holder on this machine is recognized at once,
one elsewhere after LEASE seconds without a touch. So it works on any file system with exclusive creation, and on one
machine no living holder is ever superseded, however long it stands still: there nobody waits as long as a lease.
"""

import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from ...base.errors import CheckpointError, ConfigError
from ...base.run_names import parse_small

log = logging.getLogger("legato")

LOCK, HOLDER = ".lock", ".lock-holder"
LEASE = 30.0
"""Seconds without a touch after which a run on another machine counts as dead."""
END_WAIT, RELEASE_WAIT = 1.0, 5.0
"""Seconds for a holder on this machine that may be about to end, and for one that is known to be."""


class RunLock:
    """Right to write to a folder, from `take` to `release`; forked children do not have it."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.path, self.stage = folder, folder / LOCK, stage
        # one for each RunLock, and for all threads: a background save checks it too
        self._lease = SoftFileLease(self.path, lease_duration=LEASE, thread_local=False, is_singleton=False)

    def take(self, patient: bool = False) -> None:
        """Take the lock; `patient`: wait a moment for a living holder to release it.

        Raises ConfigError that names the holder, if there is one.
        """
        self._remove_empty_marker()
        holder = holder_of(self.folder)
        seconds = RELEASE_WAIT if patient or is_alive(holder) is False else END_WAIT
        if self.path.exists() and (not holder or is_alive(holder) is None):
            seconds = LEASE + END_WAIT  # of a holder elsewhere only time tells whether it is at work
            tell_of_wait(self.folder, holder, LEASE)
        try:
            self._lease.acquire(timeout=seconds)
        except Timeout:
            raise ConfigError(self._refusal()) from None
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error.strerror}.") from error
        # beside the lease, whose file belongs to filelock: who it is, and what it does
        record = {**this_process(), "stage": self.stage, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        (self.folder / HOLDER).write_text(json.dumps(record), encoding="utf-8")

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the lock meanwhile; take it again if its file was deleted."""
        if not self._lease.is_locked or self._lease.is_lock_held_by_us:
            return
        if self.folder.is_dir() and not self.path.exists():
            # somebody has tidied up: as long as nobody else holds it, that is no reason to end a run
            self._lease.release(force=True)
            try:
                self.take()
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
            return
        raise CheckpointError(f"This run has lost its folder: {self._refusal()}")

    def release(self) -> None:
        """Release the lock."""
        if self._lease.is_locked:
            with suppress(OSError):  # of a folder that is gone
                if self._lease.is_lock_held_by_us:
                    (self.folder / HOLDER).unlink(missing_ok=True)
                self._lease.release(force=True)

    def _remove_empty_marker(self) -> None:
        # what a power cut leaves while the file is written; filelock keeps it for ever, since it names no holder
        with suppress(OSError):
            marker = self.path.stat()
            if not marker.st_size and time.time() - marker.st_mtime > LEASE:
                self.path.unlink()

    def _refusal(self) -> str:
        return refusal(self.folder, holder_of(self.folder))


def holder_of(folder: Path) -> dict[str, Any]:
    """Return what the newest holder wrote of itself: host, pid, stage, since; {} if that is not known."""
    record = parse_small(folder / HOLDER)
    return record if isinstance(record, dict) else {}


def belongs_to_training(folder: Path) -> bool:
    """Return whether a training run holds a folder, or died holding it."""
    return bool(holder_of(folder).get("stage") == "fit")


def is_held(folder: Path) -> bool:
    """Return whether a live run holds a folder, without taking its lock or waiting; True where that cannot be told."""
    try:
        age = time.time() - (folder / LOCK).stat().st_mtime
    except FileNotFoundError:
        return False
    except OSError:
        return True
    # a lease runs on for half a minute after a kill; on this machine its process tells at once
    alive = is_alive(holder_of(folder))
    return age < holder_of(folder).get("lease", LEASE) if alive is None else alive


def tell_of_wait(folder: object, holder: dict[str, Any], seconds: float) -> None:
    """Log that a run waits to see whether the holder of a folder is at work."""
    log.info("%s is held by %s; looking on for up to %g s whether it is at work.", folder, who(holder), seconds)


def refusal(folder: object, holder: dict[str, Any]) -> str:
    """Return why a run may not write to a folder."""
    return (
        f"{folder} is being written to by {who(holder)}; nothing was changed. Wait until it ends, or end it; for a run "
        f"beside it set another run.name, or leave resume out."
    )


def who(holder: dict[str, Any]) -> str:
    """Return how messages call a holder."""
    if not holder:
        return "another run"
    stage, since = holder.get("stage"), holder.get("since")
    return f"process {holder.get('pid')} on {holder.get('host')} ({stage}, since {since})"


def this_process() -> dict[str, Any]:
    """Return what tells this process from all others, for the record of a holder."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _state_and_start(pid)[1]}


def is_alive(holder: dict[str, Any]) -> bool | None:
    """Return whether the process of a record exists; None if it is on another machine or in another container."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or holder.get("machine") != _machine():
        return None
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists, and belongs to another user
        return True
    # numbers are given again, but not with the same start; a zombie has ended, and only its parent does not know
    state, since = _state_and_start(pid)
    return since == holder.get("started") and state not in ("Z", "X")


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process, and when it was started, in ticks since boot; "" if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _machine() -> str:
    """Return the boot and the PID namespace, in which a process has its number."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
