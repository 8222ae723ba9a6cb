"""Run directories in an object store: a run writes to a local folder, which is mirrored to the store.

    s3://bucket/runs/digits/version_3      ~/.cache/legato/runs/s3/bucket/runs/digits/version_3

As a result, loggers can write ordinary files, and other modules don't have to handle object stores. `location_of`
(base/location.py) returns the address of a mirrored folder. Checkpoints are not mirrored: they are read and written
directly in the store (ObjectFolder).
"""

import atexit
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ...base.environment import cache_folder
from ...base.errors import ConfigError
from ...base.location import Address, Location, local_folder, location_of
from ...base.run_names import CHECKPOINTS, CONFIG, EVALUATIONS, RUN_FILE
from ...loggers.json_lines import POINTS_FILE
from ..checkpoints.stores import connect, retried, sizes_below
from .lock import HOLDER, LOCK, RunLock, is_held
from .object_lock import ObjectLock
from .record import EPOCHS, GIVEN_CONFIG, RECORD, STARTS

log = logging.getLogger("legato")

EVERY = 60.0
"""Seconds between uploads of changed files."""
AT_ONCE = 8
"""Number of files downloaded in parallel."""
READ = {RUN_FILE, POINTS_FILE, CONFIG, GIVEN_CONFIG, RECORD, EPOCHS, LOCK}
"""Files needed to read a run, in addition to the folder `starts`."""


class RemoteLock(RunLock):
    """Exclusive write lock on a run directory in a store.

    While a run holds the lock, the local folder is mirrored to the store. The lock on the local folder allows a dead
    holder to be detected immediately. The lock object in the store locks out other machines.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        super().__init__(folder, stage)
        self.object, self.mirror = ObjectLock(str(location_of(folder)), stage), Mirror(folder)
        self._released: threading.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude this process's state. A worker can check the lock and upload files, but cannot release the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lease"} | {"_released": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state in a worker."""
        super().__init__(state["folder"], state["stage"])
        vars(self).update(state)

    def take(self, patient: bool = False) -> None:
        """Take both locks, download files written by this run on other machines, and mirror the local folder."""
        super().take(patient)
        try:
            self.object.take(patient)
            self.mirror.download()
        except BaseException:
            self.object.release()
            super().release()
            raise
        self._released = threading.Event()
        threading.Thread(target=self._mirror, args=(self._released,), name="legato-mirror", daemon=True).start()

    def check(self) -> None:
        """Raise CheckpointError if another run has taken one of the locks."""
        super().check()
        self.object.check()

    def release(self) -> None:
        """Upload the remaining changes and release both locks."""
        if self._released is not None:
            self._released.set()
            self._released = None
            self.mirror.upload()
            self.mirror.report_missing()
        self.object.release()
        super().release()

    def _mirror(self, released: threading.Event) -> None:
        while not released.wait(EVERY):
            self.mirror.upload()


class Mirror:
    """Copies a run directory's files between its local folder and its store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, location_of(folder)
        self._problem = ""
        """Error from the last upload; "" if it succeeded."""
        self._same: dict[str, tuple[int, int]] = {}
        """Maps each file that is identical in the store to its local size and modification time."""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the lock, which serves only this process's threads."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state in a worker."""
        vars(self).update(state, _lock=threading.Lock())

    def upload(self) -> None:
        """Upload changed files. A failure is logged once and does not end the run. The next upload tries again."""
        with self._lock:
            try:
                for name in _names_below(self.folder):
                    stamp, place = _stamp(self.folder / name), f"{self.address}/{name}"
                    if self._same.get(name) != stamp:
                        retried(place, connect(place).pipe_file, place, (self.folder / name).read_bytes())
                        self._same[name] = stamp
            except OSError as error:
                if not self._problem:
                    log.warning(
                        "The run's files cannot be uploaded: %s. The run continues; its files are in %s.",
                        error, self.folder,
                    )  # fmt: skip
                self._problem = str(error)
            else:
                self._problem = ""

    def report_missing(self) -> None:
        """At the end of a run, warn if the last upload failed. The warning includes the path to the local files."""
        if self._problem:
            log.warning(
                "Some of the run's files are not in %s: %s. All of them are in %s; copy them from there.",
                self.address, self._problem, self.folder,
            )  # fmt: skip

    def download(self) -> None:
        """Download files that are missing locally or differ from their local copies. Raises ConfigError on failure.

        A local file that starts with the stored contents is kept: it is newer if the run was killed on this machine.
        """

        def fetch(name: str) -> None:
            data, path = _read(f"{self.address}/{name}"), self.folder / name
            local = path.read_bytes() if path.is_file() else None
            if local is None or not local.startswith(data):
                _write(path, data)
            if local is None or len(local) <= len(data):
                self._same[name] = _stamp(path)

        names = objects_below(Address(self.address))
        _for_each(fetch, filter(_is_mirrored, names), self.address)


def lock_of(folder: Location, stage: str) -> "RunLock | ObjectLock":
    """Return the lock for a folder that a run writes to: a run directory or a folder of checkpoints."""
    if isinstance(folder, Address):
        return ObjectLock(folder, stage)
    return RunLock(folder, stage) if isinstance(location_of(folder), Path) else RemoteLock(folder, stage)


# --- run directories in a store ---------------------------------------------------------------------------------------
def names_in(folder: Address) -> list[str]:
    """Return the names in a store's folder; [] if the folder does not exist. Raises ConfigError on failure."""
    try:
        entries = retried(folder, connect(folder).ls, folder, detail=False)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}.") from error
    return sorted({entry.rstrip("/").rpartition("/")[2] for entry in entries})


def make(run: Address, record: bytes) -> Path | None:
    """Create a run directory in a store by writing `run.json`. Return its local folder; None if it already exists."""
    folder, place = local_folder(run), f"{run}/{RUN_FILE}"
    if names_in(run) or is_held(folder):
        return None
    try:
        retried(run, connect(run).pipe_file, place, record, mode="create")
        shutil.rmtree(folder, ignore_errors=True)  # left by a run of the same name that was deleted in the store
        _write(folder / RUN_FILE, record)
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(f"The run directory {run} cannot be created: {error}. Choose another run.root.") from error
    return folder


def upload(folder: Path) -> None:
    """Upload files that were written to a run directory after its run ended. Does nothing for a local run."""
    if isinstance(location_of(folder), Address):
        mirror = Mirror(folder)
        mirror.upload()
        mirror.report_missing()


def refresh(folder: Path) -> Path:
    """Return a run directory, after updating it from its store unless a run on this machine is writing to it."""
    if isinstance(location_of(folder), Address) and not is_held(folder):
        Mirror(folder).download()
    return folder


def copy_of(root: Address) -> Path:
    """Download the files needed to read a run. Return the local folder, which is deleted at exit."""
    area = f"read-{os.getpid()}"  # not the folder to which a run on this machine may be writing
    folder = local_folder(root, area)
    atexit.register(shutil.rmtree, cache_folder() / area, ignore_errors=True)

    def fetch(name: str) -> None:
        place, path = f"{root}/{name}", folder / name
        data = _read(place)
        _write(path, data)
        if path.name == LOCK:
            _write(path.with_name(HOLDER), data)
            with suppress(NotImplementedError):  # without the time of the lock, the run is shown as running
                written = connect(root).modified(place).timestamp()
                os.utime(path, (written, written))

    names = [name for name in objects_below(root) if PurePosixPath(name).name in READ or f"/{STARTS}/" in f"/{name}"]
    _for_each(fetch, names, root)
    return folder


def objects_below(address: Address) -> list[str]:
    """Return the relative names of all objects under an address. Raises ConfigError on failure."""
    try:
        names = sizes_below(address)
    except OSError as error:
        raise ConfigError(f"{address} cannot be read: {error}.") from error
    return [name for name in names if ".." not in name.split("/")]  # a store accepts any name


def _names_below(folder: Path) -> Iterator[str]:
    for path, folders, files in os.walk(folder):
        relative = Path(path).relative_to(folder)
        names = ((relative / file).as_posix() for file in sorted(files))
        yield from filter(_is_mirrored, names)
        if relative == Path():
            folders[:] = [name for name in folders if _is_mirrored(name)]


def _is_mirrored(name: str) -> bool:
    """Return whether a file in a run directory is mirrored. Temporary files, checkpoints and evaluations are not."""
    first, last = name.partition("/")[0], name.rpartition("/")[2]
    return first not in (CHECKPOINTS, EVALUATIONS) and not last.startswith(".") and not last.endswith(".partial")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _read(place: str) -> bytes:
    data: bytes = retried(place, connect(place).cat_file, place)
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # with the pid, because the processes of a job download at the same time
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _for_each(action: Callable[[str], None], names: Iterable[str], address: Location) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        try:
            list(threads.map(action, names))
        except OSError as error:
            raise ConfigError(f"{address} cannot be read: {error}.") from error
