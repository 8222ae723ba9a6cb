"""ObjectFolder: a folder of checkpoints in an object store, such as s3://bucket/run/checkpoints.

A store cannot rename objects, but an object becomes visible only once it is complete, and to all readers at the same
time. So each process uploads its files directly to their final locations. The manifest is uploaded last and
commits the checkpoint. Only the manifest is ever overwritten: if a checkpoint is replaced, its new files are uploaded
to a new folder, which the manifest records as `prefix`.

step-00001200/
|-- .writing               exists while the checkpoint is being written or removed; contains the run's id
|-- model.safetensors      and the other files, as on disk (find.py)
|-- 1f0c9a7e/...           files of a checkpoint that has replaced an older one
`-- manifest.json
"""

import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...base.checkpoint_index import INDEX, CheckpointIndex, parse_index
from ...base.errors import CheckpointError
from ...base.location import Address
from . import manifest
from .hashed import FileSum, HashedFile, HashedUpload, file_sum
from .stores import connect, require_writable, retried, sizes_below

T = TypeVar("T")

WRITING = ".writing"
"""Object that marks a write or a removal in progress. It is deleted last, so that a sweep can finish the operation."""
MARK = re.compile(rf"[^/]+/([0-9a-f]{{8}}/)?{re.escape(WRITING)}")
PART = 32 << 20
"""Size in bytes of each part of a large file. S3 accepts at most 10,000 parts."""


class ObjectFolder:
    """A folder of checkpoints in an object store. Each process opens its own connection."""

    def __init__(self, location: Address) -> None:
        self.location = location
        connect(location)  # fails now if a package is missing
        self._downloads: Path | None = None
        # the stage whose manifest was sent: it may still arrive after the request fails
        self._sent: str | None = None

    def _ask(self, request: str, place: str, *arguments: Any, **options: Any) -> Any:
        return retried(place, getattr(connect(place), request), place, *arguments, **options)

    def _sizes(self, name: str = "") -> dict[str, int]:
        """Return the sizes of all objects in a checkpoint, or in the folder if `name` is "", keyed by relative path."""
        return sizes_below(self.location / name if name else self.location)

    # --- reading ----------------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Return the names of committed checkpoints."""
        paths = [path.split("/") for path in _reading(self.location, self._sizes)]
        return sorted(path[0] for path in paths if path[1:] == [manifest.MANIFEST] and path[0][:1] != ".")

    def candidates(self) -> list[str]:
        """Return the names of committed checkpoints. In a store, no others can be complete."""
        return self.names()

    def committed(self, name: str) -> str | None:
        """Return the checkpoint's name if it has a manifest, otherwise None."""
        return name if is_object(self.location / name / manifest.MANIFEST) else None

    def read_manifest(self, name: str) -> manifest.Manifest:
        """Read a manifest."""
        place = self.location / name
        try:
            return manifest.parse_manifest(_reading(place, self._ask, "cat_file", place / manifest.MANIFEST))
        except FileNotFoundError:
            raise CheckpointError(f"{place}: {manifest.MANIFEST} is missing.") from None
        except CheckpointError as error:
            raise CheckpointError(f"{place}: {error}") from error

    def check_sizes(self, name: str) -> manifest.Manifest:
        """Read a manifest and check the sizes of its files."""
        content = self.read_manifest(name)
        unshared, bases = content.split()
        _require_sizes(self.location / name, unshared, _reading(self.location / name, self._sizes, name))
        sizes = _reading(self.location, self._sizes, manifest.BASE) if bases.files else {}
        for stored in bases.files.keys() - sizes.keys():
            raise manifest.lacks_base(self.location / name, stored)
        _require_sizes(self.location / manifest.BASE, bases, sizes)
        return content

    def fetch(self, name: str, content: manifest.Manifest, files: Collection[str]) -> Path:
        """Download and verify the files that are not available locally yet. Return their local folder."""
        if self._downloads is None:
            self._downloads = Path(tempfile.mkdtemp(prefix="legato-"))
            # delete the downloads together with this object, or at exit
            weakref.finalize(self, shutil.rmtree, self._downloads, ignore_errors=True)
        folder = self._downloads / name / content.prefix
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if not (folder / file).exists():
                partial, place = folder / f"{file}.partial", self.location / name / content.path(file)
                try:
                    _reading(place, self._ask, "get_file", place, str(partial))
                except FileNotFoundError:
                    raise CheckpointError(f"{place} is missing: the checkpoint was removed or replaced.") from None
                if file in content.files and file_sum(partial) != content.files[file]:
                    raise CheckpointError(f"{place} is damaged: its SHA-256 differs from the manifest.")
                partial.rename(folder / file)
        return folder

    def read_index(self) -> CheckpointIndex | None:
        """Read the index."""
        try:
            return parse_index(manifest.parse_json(self._ask("cat_file", self.location / INDEX), INDEX))
        except (FileNotFoundError, CheckpointError):
            return None
        except OSError as error:
            raise CheckpointError(f"{self.location / INDEX} cannot be read: {error}.") from error

    # --- writing ----------------------------------------------------------------------------------------------------
    def make(self) -> None:
        """Raise ConfigError if the store is read-only. Stores have no folders to create."""
        require_writable(self.location)

    def write_index(self, index: CheckpointIndex) -> None:
        """Replace the index."""
        self._ask("pipe_file", self.location / INDEX, index.dump())

    def require_free_name(self, name: str) -> None:
        """Raise CheckpointError if the name is taken by something other than a checkpoint."""
        require_writable(self.location)
        if foreign := _foreign(self._sizes(name)):
            raise CheckpointError(
                f"{self.location / name} contains {foreign[0]}, so it is not a checkpoint. Choose another name."
            )

    def open_stage(self, name: str, needed: int, run: str) -> str:
        """Mark a checkpoint as being written and return the prefix for its files.

        If the checkpoint already exists, the prefix is a new folder.
        """
        place, sizes = self.location / name, self._sizes(name)
        marks = [file for file in sizes if file.endswith(WRITING)]
        if run and any(self._ask("cat_file", place / mark) == run.encode() for mark in marks):
            self._tidy(name)  # leftovers of an earlier process of this run
            sizes = self._sizes(name)
        if not sizes:
            # only one of two writers can create the mark, but another writer may have uploaded files earlier
            with suppress(FileExistsError):
                self._ask("pipe_file", place / WRITING, run.encode(), mode="create")
                if self._sizes(name).keys() == {WRITING}:
                    return ""
        stage = uuid.uuid4().hex[:8]
        self._ask("pipe_file", place / stage / WRITING, run.encode())
        return stage

    def write(self, name: str, stage: str, file: str, fill: Callable[[HashedFile], FileSum]) -> FileSum:
        """Upload a file, and start over if a request fails. The file appears only once it is complete."""
        place = self.location / name / manifest.path_below(stage, file)
        return retried(place, lambda: fill(HashedUpload(connect(place).open(place, "wb", block_size=PART))))

    def publish(self, name: str, stage: str, files: Mapping[str, FileSum], run: str) -> None:
        """Write the manifest and delete the files that only the previous manifest lists."""
        place, content, sizes = self.location / name, manifest.Manifest(dict(files), run, stage), self._sizes(name)
        _require_sizes(place, content.split()[0], sizes)
        if content.path(WRITING) not in sizes:
            raise CheckpointError(f"{place} was not written: another process deleted its files during the save.")
        older: list[str] = []
        if manifest.MANIFEST in sizes:
            with suppress(CheckpointError):  # if the manifest is damaged, its files are unknown
                previous = self.read_manifest(name)
                older = [previous.path(file) for file in previous.files]
        self._sent = stage
        self._ask("pipe_file", place / manifest.MANIFEST, manifest.dump_manifest(files, run, stage))
        with suppress(OSError):  # the commit is done; the mark remains, and the next sweep repeats the deletion
            self._delete(place, [*older, content.path(WRITING)])

    def discard(self, name: str, stage: str) -> None:
        """Delete the files of an abandoned checkpoint, unless its manifest might still appear."""
        if self._sent == stage:
            return  # the next sweep deletes files that no manifest lists
        with suppress(OSError):
            above = f"{stage}/" if stage else ""
            files = [file for file in self._sizes(name) if file.startswith(above)]
            written = [file for file in files if "/" not in file.removeprefix(above)]
            self._delete(self.location / name, [file for file in written if file != manifest.MANIFEST])

    def bases(self) -> dict[FileSum, dict[str, str]]:
        """Read the headers of the bases."""
        bases, above = {}, self.location / manifest.BASE
        for file, size in self._sizes(manifest.BASE).items():
            read = partial(self._ask, "cat_file", above / file)
            digests = manifest.digests_of_base(size, lambda start, end: read(start=start, end=end))  # noqa: B023
            bases.update({FileSum(size, file.partition(".")[0]): digests} if digests else {})
        return bases

    def add_base(self, write: Callable[[HashedFile], FileSum]) -> FileSum:
        """Upload a base unless it already exists. A first pass computes the base's SHA-256, which is also its name."""
        entry = write(HashedUpload(open(os.devnull, "wb")))  # noqa: SIM115 - HashedUpload closes it
        file = f"{entry.sha256}.safetensors"
        if self._sizes(manifest.BASE).get(file) != entry.size:
            self.write(manifest.BASE, "", file, write)
        return entry

    # --- cleaning up ------------------------------------------------------------------------------------------------
    def sweep(self) -> None:
        """Clean up after interrupted saves and removals."""
        try:
            # skip marks in subfolders: their checkpoints would look like files of a checkpoint without a manifest
            marks = [path for path in self._sizes() if MARK.fullmatch(path)]
            for name in sorted({path.partition("/")[0] for path in marks}):
                self._tidy(name)
            self._remove_unused_bases()
        except OSError as error:
            raise CheckpointError(f"{self.location} could not be cleaned up: {error}.") from error

    def remove(self, name: str, run: str | None = None) -> None:
        """Delete a checkpoint."""
        place = self.location / name
        try:
            manifest.require_removable(place, self.read_manifest(name), _foreign(self._sizes(name)), run)
            self._ask("pipe_file", place / WRITING, (run or "").encode())
            self._delete(place, [manifest.MANIFEST])  # without it, the remaining files are not a checkpoint
            self._tidy(name)
            self._remove_unused_bases()
        except OSError as error:
            raise CheckpointError(f"{place} could not be removed: {error}.") from error

    def _remove_unused_bases(self) -> None:
        """Delete bases that no checkpoint refers to, unless a save is in progress or a manifest is unreadable."""
        bases = self._sizes(manifest.BASE)
        if bases and not any(path.endswith(f"/{WRITING}") for path in self._sizes()):
            # all manifests are read before the first deletion
            unused = manifest.unused_bases(bases, map(self.read_manifest, self.names()))
            self._delete(self.location / manifest.BASE, unused)

    def _tidy(self, name: str) -> None:
        """Delete files in a checkpoint that its manifest does not list."""
        sizes = self._sizes(name)
        kept = set(_foreign(sizes))
        if manifest.MANIFEST in sizes:
            content = self.read_manifest(name)
            kept |= {manifest.MANIFEST, *map(content.path, content.files)}
        self._delete(self.location / name, sizes.keys() - kept)

    def _delete(self, place: Address, files: Iterable[str]) -> None:
        for file in sorted(files, key=lambda file: (file.endswith(WRITING), file)):  # the marks last
            with suppress(FileNotFoundError):
                self._ask("rm_file", place / file)


def is_object(place: Address) -> bool:
    """Return whether an object exists at an address. Raises CheckpointError if the store does not respond."""
    try:
        return bool(_reading(place, retried, place, connect(place).info, place)["type"] == "file")
    except FileNotFoundError:
        return False


def download(place: Address, folder: Path) -> Path:
    """Download an object into a folder. Return the file's path."""
    _reading(place, retried, place, connect(place).get_file, place, str(folder / place.name))
    return folder / place.name


def _reading(place: Address, request: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a request. Raises CheckpointError for any OSError except FileNotFoundError."""
    try:
        return request(*arguments)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error}.") from error


def _require_sizes(place: Address, content: manifest.Manifest, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError if a file is missing or its size differs from the manifest."""
    for file, expected in content.files.items():
        size = sizes.get(content.path(file))
        if size is None:
            raise CheckpointError(f"{place}: {content.path(file)} is missing.")
        manifest.require_size(place, content.path(file), size, expected.size)


def _foreign(files: Iterable[str]) -> list[str]:
    """Return the files in a checkpoint that Legato did not write."""
    names = {file: file.rpartition("/")[2] for file in files}
    return sorted(file for file, name in names.items() if name != WRITING and not manifest.are_file_names([name]))
