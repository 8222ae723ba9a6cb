"""RunLock: lets one run at a time write to a folder; a dead run does not block the folder.

The lock is a filelock lease: the holder touches `.lock` every few seconds. A run on the holder's machine checks the
holder's process instead of the lease. It detects a dead holder immediately, and never takes the lock from a live
holder, even a suspended one. A run on another machine waits until `.lock` has not been touched for LEASE seconds. The
lock works on any file system that supports exclusive file creation.
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
"""Seconds without a touch after which a run on another machine is considered dead."""
END_WAIT, RELEASE_WAIT = 1.0, 5.0
"""Seconds to wait for a holder on this machine that may be about to exit, and for a holder known to be exiting."""


class RunLock:
    """Exclusive write lock on a folder, held from `take` to `release`. Forked children do not inherit it."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.path, self.stage = folder, folder / LOCK, stage
        # each RunLock has its own lease, which all threads share because a background save also checks it
        self._lease = SoftFileLease(self.path, lease_duration=LEASE, thread_local=False, is_singleton=False)

    def take(self, patient: bool = False) -> None:
        """Take the lock. If `patient`, wait RELEASE_WAIT seconds for a live holder to release it.

        Raises ConfigError, with a description of the holder, if another run still holds the lock.
        """
        self._remove_empty_marker()
        holder = holder_of(self.folder)
        seconds = RELEASE_WAIT if patient or is_alive(holder) is False else END_WAIT
        if self.path.exists() and (not holder or is_alive(holder) is None):
            seconds = LEASE + END_WAIT  # only waiting shows whether a holder on another machine is alive
            log_wait(self.folder, holder, LEASE)
        try:
            self._lease.acquire(timeout=seconds)
        except Timeout:
            raise ConfigError(self._refusal()) from None
        except OSError as error:
            raise ConfigError(f"{self.folder} is not writable: {error.strerror}.") from error
        # describe the holder in a second file, because filelock owns the lease's file
        record = {**this_process(), "stage": self.stage, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        (self.folder / HOLDER).write_text(json.dumps(record), encoding="utf-8")

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the lock. Take the lock again if its file was deleted."""
        if not self._lease.is_locked or self._lease.is_lock_held_by_us:
            return
        if self.folder.is_dir() and not self.path.exists():
            # somebody has cleaned up the folder, which does not have to end the run if no other run holds the lock
            self._lease.release(force=True)
            try:
                self.take()
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
            return
        raise CheckpointError(f"This run has lost the lock on its folder: {self._refusal()}")

    def release(self) -> None:
        """Release the lock."""
        if self._lease.is_locked:
            with suppress(OSError):  # the folder may be gone
                if self._lease.is_lock_held_by_us:
                    (self.folder / HOLDER).unlink(missing_ok=True)
                self._lease.release(force=True)

    def _remove_empty_marker(self) -> None:
        # a power failure can leave an empty file, which filelock never removes because it identifies no holder
        with suppress(OSError):
            marker = self.path.stat()
            if not marker.st_size and time.time() - marker.st_mtime > LEASE:
                self.path.unlink()

    def _refusal(self) -> str:
        return refusal(self.folder, holder_of(self.folder))


def holder_of(folder: Path) -> dict[str, Any]:
    """Return the record of the latest holder (host, pid, stage, since); {} if unknown."""
    record = parse_small(folder / HOLDER)
    return record if isinstance(record, dict) else {}


def belongs_to_training(folder: Path) -> bool:
    """Return whether a training run holds a folder's lock, or died while holding it."""
    return bool(holder_of(folder).get("stage") == "fit")


def is_held(folder: Path) -> bool:
    """Return whether a live run holds, or may hold, a folder's lock. Does not wait for the lock or take it."""
    try:
        age = time.time() - (folder / LOCK).stat().st_mtime
    except FileNotFoundError:
        return False
    except OSError:
        return True
    # the lease of a killed run remains valid for half a minute; on this machine, check the run's process instead
    alive = is_alive(holder_of(folder))
    return age < holder_of(folder).get("lease", LEASE) if alive is None else alive


def log_wait(folder: object, holder: dict[str, Any], seconds: float) -> None:
    """Log that the run is waiting to see whether the holder of a folder's lock is alive."""
    log.info("%s is locked by %s. Waiting up to %g s to see if it is alive.", folder, describe(holder), seconds)


def refusal(folder: object, holder: dict[str, Any]) -> str:
    """Return an error message, with advice, for a folder that another run is using."""
    return (
        f"{folder} is in use by {describe(holder)}; nothing was changed. Wait for it to end, or stop it. To start a "
        f"separate run, set another run.name or omit resume."
    )


def describe(holder: dict[str, Any]) -> str:
    """Return a description of a lock's holder for use in messages."""
    if not holder:
        return "another run"
    stage, since = holder.get("stage"), holder.get("since")
    return f"process {holder.get('pid')} on {holder.get('host')} ({stage}, since {since})"


def this_process() -> dict[str, Any]:
    """Return the fields that identify this process in a holder's record."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _state_and_start(pid)[1]}


def is_alive(holder: dict[str, Any]) -> bool | None:
    """Return whether a holder's process exists; None if it is on another machine or in another container."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or holder.get("machine") != _machine():
        return None
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        return True
    # a process id may be reused, but not with the same start time; a zombie has exited
    state, since = _state_and_start(pid)
    return since == holder.get("started") and state not in ("Z", "X")


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and its start time in ticks since boot, or "" for any value that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _machine() -> str:
    """Return the boot id and the PID namespace. A process ID is meaningful only in combination with both."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
