"""ObjectLock: lets one run at a time write to a folder in an object store; a dead run does not block the folder.

The lock is an object, `.lock`, which the holder creates and rewrites every BEAT seconds. A run on the holder's machine
takes the lock immediately if the holder's process is dead. A run on another machine takes the lock if the object has
not changed for LEASE seconds according to its own clock. An object store cannot guarantee an exclusive lock: a holder
that was suspended for a long time does not learn until its next save that it has lost the lock. A save checks the lock
when it starts and right before it commits the checkpoint.
"""

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

from ...base.errors import CheckpointError, ConfigError
from ..checkpoints.stores import connect, retried
from .lock import END_WAIT, LOCK, RELEASE_WAIT, is_alive, log_wait, refusal, this_process

LEASE, BEAT = 60.0, 20.0
"""Seconds without a change after which a holder is considered dead, and seconds between changes."""
SETTLE, POLL = 3.0, 1.0
"""Seconds within which two simultaneous writers see each other, and seconds between reads of a lock."""
EXCLUSIVE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""Stores that support exclusive creation of objects. In other stores, a run might replace another run's new lock."""


class ObjectLock:
    """Exclusive write lock on a folder in a store, held from `take` to `release`.

    Forked children do not inherit that right.
    """

    def __init__(self, folder: str, stage: str) -> None:
        self.folder, self.stage, self.token = folder, stage, ""
        self._beats, self._process = 0, 0
        self._released: threading.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude this process's state. In another process, `check` works and `release` does nothing."""
        return {**vars(self), "_process": 0, "_released": None}

    def take(self, patient: bool = False) -> None:
        """Take the lock. If `patient`, wait longer for a holder to exit. Raises ConfigError if the lock is held."""
        try:
            is_new = self._wait(patient)
            self.token = uuid.uuid4().hex
            with suppress(FileExistsError):  # another run was faster and owns the object
                self._write(is_new)
            if not is_new or self.folder.partition(":")[0] not in EXCLUSIVE:
                time.sleep(SETTLE)
            holder = self.holder()
        except OSError as error:
            raise ConfigError(f"{self.folder} is not writable: {error}.") from error
        if holder.get("token") != self.token:
            raise ConfigError(refusal(self.folder, holder))
        self._process, self._released = os.getpid(), threading.Event()
        threading.Thread(target=self._beat, args=(self._released,), name="legato-lock", daemon=True).start()

    def check(self) -> None:
        """Raise CheckpointError if another run has taken the lock. Write the lock again if it was deleted."""
        if not self.token:
            return
        try:
            holder = self.holder()
            if not holder:
                with suppress(FileExistsError):
                    self._write(is_new=True)
                holder = self.holder()
        except OSError as error:
            raise CheckpointError(f"{self.folder} is not writable: {error}.") from error
        if holder.get("token") != self.token:
            raise CheckpointError(f"This run has lost the lock on its folder: {refusal(self.folder, holder)}")

    def release(self) -> None:
        """Release the lock."""
        if self._released is not None and self._process == os.getpid():
            self._released.set()
            with suppress(OSError):  # the lease expires anyway
                if self.holder().get("token") == self.token:
                    retried(self.folder, connect(self.folder).rm_file, f"{self.folder}/{LOCK}")
        self._released, self.token = None, ""

    def holder(self) -> dict[str, Any]:
        """Return the record of the lock's holder; {} if there is none. Raises OSError on failure."""
        return holder_in(self.folder)

    def _wait(self, patient: bool) -> bool:
        """Wait until the lock can be taken. Return True if there is no lock object, False if its holder is dead.

        Raises ConfigError if the holder is alive.
        """
        last: dict[str, Any] = {}
        began = seen = time.monotonic()
        while holder := self.holder():
            now, alive = time.monotonic(), is_alive(holder)
            if alive is False:
                return False
            if not last and alive is None:
                log_wait(self.folder, holder, LEASE)
            if alive is None and holder == last and now - seen > LEASE:
                return False
            wait = RELEASE_WAIT if patient else END_WAIT
            is_active = alive if alive is not None else bool(last) and holder != last
            if is_active and now - began > wait:
                raise ConfigError(refusal(self.folder, holder))
            if holder != last:
                last, seen = holder, now
            time.sleep(min(POLL, wait))
        return True

    def _write(self, is_new: bool) -> None:
        self._beats += 1
        times = {"since": time.strftime("%Y-%m-%d %H:%M:%S"), "beat": self._beats, "lease": LEASE}
        record = {**this_process(), "stage": self.stage, "token": self.token, **times}
        data, mode = json.dumps(record).encode(), "create" if is_new else "overwrite"
        retried(self.folder, connect(self.folder).pipe_file, f"{self.folder}/{LOCK}", data, mode=mode)

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(BEAT):
            # a store that does not answer now may answer before the lease expires
            with suppress(OSError):
                if self.holder().get("token") != self.token:
                    return  # the lock was lost or deleted; the next save reports it
                if not released.is_set():
                    self._write(is_new=False)


def holder_in(folder: str) -> dict[str, Any]:
    """Return the record of a folder's lock holder; {} if the folder is not locked. Raises OSError on failure."""
    try:
        record = json.loads(retried(folder, connect(folder).cat_file, f"{folder}/{LOCK}"))
    except FileNotFoundError:
        return {}
    except ValueError:
        record = None
    return record if isinstance(record, dict) and record else {"host": None}  # an unknown holder
