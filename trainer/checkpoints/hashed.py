"""Files with a SHA-256 hash, which is computed while the file is written and verified before the file is read."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import CheckpointError
from ..processes.save_progress import SAVES

_BLOCK = 1 << 20  # bytes; small enough to stay in a core's cache from the write to the hash


class FileSum(NamedTuple):
    """Size and SHA-256 of a file, as recorded in the manifest."""

    size: int
    sha256: str


class HashedFile:
    """A new local file that is hashed as it is written. Closing the file syncs it and sets `sum`."""

    def __init__(self, path: Path) -> None:
        self.sum = FileSum(0, "")
        self._size, self._hash = 0, hashlib.sha256()
        # O_EXCL and O_NOFOLLOW: never write through a link or into another process's file
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Append data in blocks. Each block is recorded as progress, to show that a slow save is not stuck."""
        view = memoryview(data)
        while view.nbytes:
            count = self._append(view[:_BLOCK])
            self._hash.update(view[:count])
            self._size, view = self._size + count, view[count:]
            SAVES.record()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._close(is_complete=kind is None)
        if kind is None:
            self.sum = FileSum(self._size, self._hash.hexdigest())

    def _append(self, block: memoryview) -> int:
        count = os.write(self._descriptor, block)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            # start writing this block now, not at the sync: 200 MB take 0.20 s, and 0.30 s without this
            os.posix_fadvise(self._descriptor, self._size, count, os.POSIX_FADV_DONTNEED)
        return count

    def _close(self, is_complete: bool) -> None:
        try:
            if is_complete:
                # once, at the end: a sync after each block would wait for the disk many times
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class HashedUpload(HashedFile):
    """A new object in a store, hashed as it is uploaded.

    The object appears only when the upload is closed. If an error occurs, it never appears.
    """

    def __init__(self, file: Any) -> None:
        """Upload to an open file.

        Args:
            file: a file opened with fsspec.
        """
        self.sum = FileSum(0, "")
        self._size, self._hash, self._file = 0, hashlib.sha256(), file

    def _append(self, block: memoryview) -> int:
        self._file.write(block)
        return len(block)

    def _close(self, is_complete: bool) -> None:
        is_uploaded = False
        try:
            if is_complete:
                self._file.close()
                is_uploaded = True
        finally:
            # otherwise the abandoned file's finalizer would complete its upload and overwrite the next attempt's
            if not is_uploaded:
                with suppress(AttributeError):
                    self._file.closed = True
                with suppress(Exception):
                    self._file.discard()


def write_bytes(file: HashedFile, data: bytes) -> FileSum:
    """Write and sync a new file."""
    with file:
        file.write(data)
    return file.sum


def file_sum(path: Path) -> FileSum:
    """Return the size and SHA-256 of a file. Raises OSError for a link."""
    # one buffer for all blocks: a 10 GB file would otherwise need ten thousand allocations
    digest, size, buffer = hashlib.sha256(), 0, bytearray(1 << 20)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileSum(size, digest.hexdigest())


def check_file(path: Path, expected: FileSum) -> Path:
    """Return the file's path. Raises CheckpointError if the file has changed since it was written."""
    try:
        damaged = file_sum(path) != expected
    except OSError as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {error.strerror}.") from error
    if damaged:
        raise CheckpointError(f"{path.parent}: {path.name} is damaged: its SHA-256 differs from the manifest.")
    return path


def parse_json(data: bytes, name: str) -> Any:
    """Parse strict JSON (UTF-8, no NaN, no repeated keys). Raises a CheckpointError that includes the file's name."""
    # RecursionError: anyone can craft a small file with 100,000 brackets
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {str(error)[:200]}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON readers disagree on which value of a repeated key to use, so programs could read different values
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has the same key twice")
    return entries


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
