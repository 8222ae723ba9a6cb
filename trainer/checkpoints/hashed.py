"""Files with a SHA-256: hashed while they are written, and compared before they are read."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import CheckpointError
from ..processes.save_progress import SAVES

_BLOCK = 1 << 20  # bytes, which a core's cache holds from the write to the hash


class FileSum(NamedTuple):
    """Size and SHA-256 of a file, as in the manifest."""

    size: int
    sha256: str


class HashedFile:
    """New local file that is hashed while it is written and synced when it is closed; `sum` is set afterwards."""

    def __init__(self, path: Path) -> None:
        self.sum = FileSum(0, "")
        self._size, self._hash = 0, hashlib.sha256()
        # O_EXCL and O_NOFOLLOW: never through a link, nor into a file that another process has begun
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Append data, in blocks: each is progress of the save, by which the signal watch knows it from a stuck one."""
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
            # the disk begins with this block now, not at the sync: 0.20 s for 200 MB became 0.30 without it
            os.posix_fadvise(self._descriptor, self._size, count, os.POSIX_FADV_DONTNEED)
        return count

    def _close(self, is_complete: bool) -> None:
        try:
            if is_complete:
                # only now: a sync after each block would wait for the disk many times
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class HashedUpload(HashedFile):
    """New object that is hashed while it is uploaded; it is there once it is closed, and not after an error."""

    def __init__(self, file: Any) -> None:
        """`file`: what fsspec has opened."""
        self.sum = FileSum(0, "")
        self._size, self._hash, self._file = 0, hashlib.sha256(), file

    def _append(self, block: memoryview) -> int:
        self._file.write(block)
        return len(block)

    def _close(self, is_complete: bool) -> None:
        is_there = False
        try:
            if is_complete:
                self._file.close()
                is_there = True
        finally:
            # else the finalizer of a file that was given up would complete its upload, over that of the next try
            if not is_there:
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
    """Return size and SHA-256 of a file; raises OSError for a link."""
    # one buffer for all blocks: reading 10 GB would otherwise allocate ten thousand
    digest, size, buffer = hashlib.sha256(), 0, bytearray(1 << 20)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileSum(size, digest.hexdigest())


def check_file(path: Path, expected: FileSum) -> Path:
    """Return the path; raises CheckpointError if the file is not what was written."""
    try:
        damaged = file_sum(path) != expected
    except OSError as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {error.strerror}.") from error
    if damaged:
        raise CheckpointError(f"{path.parent}: {path.name} is damaged: its SHA-256 is not the one that was written.")
    return path


def parse_json(data: bytes, name: str) -> Any:
    """Parse strict JSON: UTF-8, no NaN, no key twice; raises CheckpointError with the file's name."""
    # RecursionError: a file of 100,000 brackets is small, and anybody can write it
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {str(error)[:200]}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # readers disagree on which of two counts, so a checkpoint could say different things to different programs
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return entries


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
