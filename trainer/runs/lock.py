"""RunLock: at most one run at a time writes to a folder, and a dead one does not keep it.

The holder has an exclusive `flock` on `.lock` in the folder, which contains its host, process and start time. The
system drops the flock with the process, however it ends. Other processes of the same run (workers, further ranks) have
a shared one on `.lock-ranks`, so that the next holder waits until all processes of a dead run have ended.

On a network file system a flock may be limited to one machine, or unsupported. There the holder touches the file every
few seconds, and another machine watches for that before it takes the lock; without flock, on the same machine, it looks
for the holder's process.
"""

import errno
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ...base.errors import CheckpointError, ConfigError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("legato")

LOCK, RANKS = ".lock", ".lock-ranks"
HEARTBEAT = 5.0
"""Seconds between two heartbeats, where they are needed."""
DEAD_AFTER = 30.0
"""Seconds without a heartbeat after which a run on another machine counts as dead."""
END_WAIT = 1.0
"""Seconds for a holder that is about to end."""
RELEASE_WAIT = 5.0
"""Seconds for the system to drop the locks of a killed process, and for its workers to end."""
CONTEST_WAIT = 1.0
"""Seconds after which, without flock, the last of several to write their record is the holder."""
GLANCE = 0.05
LOCAL_FILE_SYSTEMS = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "tmpfs",
    "overlay",
    "ramfs",
    "bcachefs",
    "jfs",
    "apfs",
}
"""File systems that only one machine can see."""


class RunLock:
    """Right to write to a folder, from `take` to `release`.

    The files are open in this process only: forked children close them, and started ones have none.
    """

    open_files: ClassVar[Any] = weakref.WeakSet()
    watches_forks: ClassVar[bool] = False

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.path, self.stage = folder, folder / LOCK, stage
        self.shared = not is_local(folder)
        """Whether other machines may see the folder."""
        self.record: dict[str, Any] = {}
        """Record that the holder has written; {} where this process does not hold the lock."""
        self._file: int | None = None
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    # --- the holder -------------------------------------------------------------------------------------------------
    def take(self, patient: bool = False) -> None:
        """Take the lock; `patient`: wait a moment for a living holder to release it.

        Raises ConfigError that names the holder, if there is one.
        """
        began = time.monotonic()
        while self._file is None:
            try:
                # Opened again in each round, as the holder may have removed the file: a flock on a file without a name
                # keeps nobody out. Closed in programs that are started, which would otherwise share the flock.
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise ConfigError(f"{self.folder} cannot be written to: {error.strerror}.") from error
            try:
                if self._try(file, patient, time.monotonic() - began):
                    self._file = file
            finally:
                if self._file is None:
                    os.close(file)
                    time.sleep(GLANCE)
        _watch_forks()
        self.open_files.add(self)
        self._wait_for_ranks()
        if self.shared:
            self._over.clear()
            self._beating = threading.Thread(target=self._beat, name="legato-lock", daemon=True)
            self._beating.start()

    def _try(self, file: int, patient: bool, waited: float) -> bool:
        """Return whether the lock was taken; False: try again, the holder is about to end."""
        locked = _flock(file, "exclusive")
        holder = _read_holder(file)
        if locked is False:
            exists = _exists(holder) if holder else False
            if exists is None and self.shared and not self._has_heartbeat(file, holder):
                if _is_at(file, self.path):  # its machine has died, and the server does not know yet
                    self.path.unlink(missing_ok=True)
            elif waited > (END_WAIT if exists is not False and not patient else RELEASE_WAIT):
                raise ConfigError(self._refusal(holder))
            return False
        if not _is_at(file, self.path):
            return False  # the holder has ended and removed the file
        if holder and self._is_alive(holder, file, bool(locked)):
            raise ConfigError(self._refusal(holder))
        self.record = _own_record(self.stage)
        # in place: a file that is swapped in by a rename would be another one, without the flock
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(self.record).encode(), 0)
        if locked is None:
            os.fsync(file)
            time.sleep(CONTEST_WAIT)
            if (winner := _read_holder(self.path)) != self.record:
                raise ConfigError(self._refusal(winner))
        return True

    def _is_alive(self, holder: dict[str, Any], file: int, locked: bool) -> bool:
        """Return whether the holder in a record is alive, where the flock does not tell."""
        here = holder.get("boot") == _boot() if holder.get("boot") else holder.get("host") == socket.gethostname()
        if locked and (here or not self.shared):
            return False
        exists = _exists(holder)
        if exists is not None:
            return exists
        return self._has_heartbeat(file, holder)

    def _has_heartbeat(self, file: int, holder: dict[str, Any]) -> bool:
        """Watch for a while; return whether the holder, on another machine, sends a heartbeat."""
        log.info(
            "%s names process %s on %s; looking on for up to %g s whether it is at work.",
            self.path, holder.get("pid"), holder.get("host"), DEAD_AFTER,
        )  # fmt: skip
        # that it changes counts, not when: the clocks of two machines are not compared
        seen, deadline = os.fstat(file).st_mtime_ns, time.monotonic() + DEAD_AFTER
        while time.monotonic() < deadline:
            time.sleep(GLANCE)
            try:  # reopened, as a network file system asks its server then
                again = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            changed = os.fstat(again).st_mtime_ns != seen
            os.close(again)
            if changed:
                return True
        return False

    def _refusal(self, holder: dict[str, Any]) -> str:
        who = "another run"
        if holder:
            stage, since = holder.get("stage"), holder.get("since")
            who = f"process {holder.get('pid')} on {holder.get('host')} ({stage}, since {since})"
        return (
            f"{self.folder} is being written to by {who}; nothing was changed. Wait until it ends, or end it; for a "
            f"run beside it set another run.name, or leave resume out."
        )

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the lock meanwhile."""
        if self._file is None or not self.record:
            return
        if not self.path.exists() and self.folder.is_dir():  # the folder was deleted
            self.release()
            try:
                self.take()
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
        elif (found := _read_holder(self.path)) != self.record:
            raise CheckpointError(f"This run has lost its folder: {self._refusal(found)}")

    def release(self) -> None:
        """Release the lock."""
        self._over.set()
        if self._beating is not None:
            self._beating.join()
            self._beating = None
        if self._file is not None:
            # removed while it is still locked: a process that opened it just now finds, once it has the flock, that it
            # is gone
            if self.record and _is_at(self._file, self.path) and _read_holder(self._file) == self.record:
                with suppress(OSError):  # a file that stays is unlocked, since the flock goes
                    self.path.unlink(missing_ok=True)
                    (self.folder / RANKS).unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Close the file in this process."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT):
            file = self._file
            if file is None:
                return
            try:
                os.utime(file)
            except OSError:
                return

    # --- the other processes of its run -----------------------------------------------------------------------------
    def join(self) -> None:
        """Register as a process of the holder's run until `release`, where the file system allows it."""
        path = self.folder / RANKS
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return
        if _flock(file, "shared") is not True:
            os.close(file)
            return
        self._file, self.path = file, path
        _watch_forks()
        self.open_files.add(self)

    def _wait_for_ranks(self) -> None:
        """Wait until all processes of an earlier run have ended; some take a moment."""
        path, deadline = self.folder / RANKS, time.monotonic() + RELEASE_WAIT
        if not path.exists():
            return
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            while _flock(file, "exclusive") is False:
                if time.monotonic() > deadline:
                    self.release()
                    raise ConfigError(
                        f"{self.folder}: processes of a run that has died are still at work there. End them first."
                    )
                time.sleep(GLANCE)
            path.unlink(missing_ok=True)
        finally:
            os.close(file)


def _watch_forks() -> None:
    """Make forked children close open lock files, which would keep the lock of a dead parent."""
    if not RunLock.watches_forks and hasattr(os, "register_at_fork"):
        RunLock.watches_forks = True
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for lock in list(RunLock.open_files):
        lock.close()


def belongs_to_training(folder: Path) -> bool:
    """Return whether a training run holds a folder, or died holding it."""
    return bool(_read_holder(folder / LOCK).get("stage") == "fit")


def is_held(folder: Path) -> bool:
    """Return whether a live run holds a folder, without taking its lock or waiting; True where that cannot be told."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # shared, so that two processes that only look do not take each other for the holder
        locked, holder = _flock(file, "shared"), _read_holder(file)
        if locked is False:
            return True
        here = holder.get("boot") == _boot() if holder.get("boot") else holder.get("host") == socket.gethostname()
        if not holder or (locked and (here or is_local(folder))):
            return False
        exists = _exists(holder)
        return time.time() - os.fstat(file).st_mtime < DEAD_AFTER if exists is None else exists
    finally:
        os.close(file)


def _flock(file: int, kind: str) -> bool | None:
    """Return whether the flock was taken; None if the file system has none."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if kind == "exclusive" else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _read_holder(file: int | Path) -> dict[str, Any]:
    """Return the holder's record in a file; {} if there is none."""
    try:
        found = json.loads(file.read_bytes() if isinstance(file, Path) else os.pread(file, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _own_record(stage: str) -> dict[str, Any]:
    pid = os.getpid()
    record = {"host": socket.gethostname(), "pid": pid, "started": _state_and_start(pid)[1], "boot": _boot()}
    return {**record, "space": _space(), "stage": stage, "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _exists(holder: dict[str, Any]) -> bool | None:
    """Return whether the process of a record exists; None if it is on another machine or in another container."""
    pid, started = holder.get("pid"), holder.get("started")
    if holder.get("host") != socket.gethostname() or holder.get("boot") != _boot() or holder.get("space") != _space():
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
    return since == started and state not in ("Z", "X")


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process, and when it was started, in ticks since boot; "" if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    """Return the name of this process's PID namespace."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_local(folder: Path) -> bool:
    """Return whether only this machine sees a folder; True if the system does not tell."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return True
    real = os.path.realpath(folder)
    best, kind = "", ""
    for fields in mounts:
        # mountinfo writes a space as \040; the longest mount point above the folder is its own
        point = fields[4].encode().decode("unicode_escape")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return not kind or kind in LOCAL_FILE_SYSTEMS
