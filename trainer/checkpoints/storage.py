"""Folders of checkpoints. A checkpoint is either complete under its name or absent, even if the process dies.

A save writes the folder `.step-00001200.partial`, syncs every file, writes the manifest last, and renames the folder to
`step-00001200`. A checkpoint that is being replaced is first renamed to `.step-00001200.replaced`, and is deleted once
the new checkpoint has taken its name. A checkpoint that is being removed is first renamed to `.step-00001200.partial`.
As a result, at any time, either the old or the new checkpoint is complete, under its name or as `.replaced`. Anything
that an interrupted process leaves behind has a fixed name and is cleaned up the next time the run starts.
"""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from ...base.checkpoint_index import INDEX, CheckpointIndex, parse_index
from ...base.errors import CheckpointError
from ...base.location import Address, Location
from ...base.quantities import format_bytes
from ...base.run_names import parse_small, require_local
from . import manifest
from .hashed import FileSum, HashedFile, write_bytes
from .object_folder import ObjectFolder, download, is_object

STEP_NAME = re.compile(r"step-([0-9]{8,})")
PARTIAL, REPLACED = "partial", "replaced"
_LEFTOVER = re.compile(rf"\.({STEP_NAME.pattern})\.({PARTIAL}|{REPLACED})")
_SLACK = 64 << 10  # bytes for headers, the manifest and folders


def temporary_path(checkpoint: Path, kind: str) -> Path:
    """Return the temporary path of a checkpoint; `kind` is PARTIAL or REPLACED."""
    return checkpoint.with_name(f".{checkpoint.name}.{kind}")


class Folder(Protocol):
    """A folder of checkpoints. Its methods identify each checkpoint by name.

    To save a checkpoint, rank 0 calls `require_free_name` and `open_stage`, every rank calls `write` for each of its
    files, and rank 0 calls `publish` to commit the checkpoint. The interface has no rename operation, because object
    stores do not support one.
    """

    @property
    def location(self) -> Location:
        """Path or address of the folder."""

    # --- reading
    def names(self) -> list[str]:
        """Return the names of committed checkpoints (those with a manifest)."""

    def candidates(self) -> list[str]:
        """Return the names of possibly complete checkpoints, including a dead process's temporary names."""

    def committed(self, name: str) -> str | None:
        """Return the (possibly temporary) name of a checkpoint; None if the checkpoint is not committed."""

    def read_manifest(self, name: str) -> manifest.Manifest:
        """Read a checkpoint's manifest. Raises a CheckpointError that identifies the location and the problem."""

    def check_sizes(self, name: str) -> manifest.Manifest:
        """Read a checkpoint's manifest and check the sizes of its files. Raises CheckpointError on failure."""

    def fetch(self, name: str, content: manifest.Manifest, files: Collection[str]) -> Path:
        """Return a local folder that contains the given files from a checkpoint. The caller must verify the files.

        The folder exists for as long as this object does.
        """

    def read_index(self) -> CheckpointIndex | None:
        """Return the index; None if it is missing or was not written by Legato."""

    # --- writing
    def make(self) -> None:
        """Create the folder if it is missing. Raises OSError on failure."""

    def write_index(self, index: CheckpointIndex) -> None:
        """Replace the index atomically. Raises OSError on failure."""

    def require_free_name(self, name: str) -> None:
        """Raise CheckpointError if the name is taken by something other than a checkpoint."""

    def open_stage(self, name: str, needed: int, run: str) -> str:
        """Create the stage that a checkpoint of about `needed` bytes will be written to. Return the stage's name."""

    def write(self, name: str, stage: str, file: str, fill: Callable[[HashedFile], FileSum]) -> FileSum:
        """Call `fill` to write a new checkpoint file, retrying if a request fails. Raises OSError on failure."""

    def publish(self, name: str, stage: str, files: Mapping[str, FileSum], run: str) -> None:
        """Write the manifest and give the checkpoint its name. Raises OSError on failure."""

    def discard(self, name: str, stage: str) -> None:
        """Delete the files of an abandoned checkpoint."""

    def bases(self) -> dict[FileSum, dict[str, str]]:
        """Return the existing bases (frozen_base.py), each with the SHA-256 of its tensors, keyed by name."""

    def add_base(self, write: Callable[[HashedFile], FileSum]) -> FileSum:
        """Write a base by calling `write` and name it after its SHA-256. Processes may call this concurrently."""

    def sweep(self) -> None:
        """Clean up after interrupted saves and removals. No other process may write to the folder at the same time."""

    def remove(self, name: str, run: str | None = None) -> None:
        """Delete a checkpoint, which must be a directory with a valid manifest that lists every file in it.

        Raises CheckpointError for anything else, including links, and if `run` did not write the checkpoint.
        """


class LocalFolder:
    """A folder on a file system shared by all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = self.location = path

    # --- reading ----------------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Return the names of committed checkpoints."""
        paths = map(self.path.joinpath, self.candidates())
        return [path.name for path in paths if path.name[0] != "." and (path / manifest.MANIFEST).is_file()]

    def candidates(self) -> list[str]:
        """Return checkpoint names, including temporary names left by a process that died while replacing one."""
        candidates: dict[str, str] = {}
        # ".step-..." sorts first, so "step-..." replaces it
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            name = path.name.removeprefix(".").removesuffix(f".{REPLACED}")
            if path.name not in (name, temporary_path(self.path / name, REPLACED).name) or path.is_symlink():
                continue
            files = path / manifest.MANIFEST, path / manifest.STATE_FILE
            # a user may choose a checkpoint's name; its files then distinguish it from other folders
            if path.is_dir() and (STEP_NAME.fullmatch(name) or all(file.is_file() for file in files)):
                candidates[name] = path.name
        return list(candidates.values())

    def committed(self, name: str) -> str | None:
        """Return a checkpoint's name, or its temporary name if a process died while replacing the checkpoint."""
        for path in (self.path / name, temporary_path(self.path / name, REPLACED)):
            if (path / manifest.MANIFEST).is_file():
                return path.name
        return None

    def read_manifest(self, name: str) -> manifest.Manifest:
        """Read a manifest."""
        return manifest.load_manifest(self.path / name)

    def check_sizes(self, name: str) -> manifest.Manifest:
        """Read a manifest and check the sizes of its files."""
        directory = self.path / name
        if not directory.is_dir():
            raise CheckpointError(f"There is no checkpoint at {directory}: it is not a directory.")
        content = self.read_manifest(name)
        unshared, bases = content.split()
        for stored in bases.files:
            if not os.path.lexists(self.path / manifest.BASE / stored):
                raise manifest.lacks_base(directory, stored)
        # reject links and devices before any file is opened
        for folder, listing in ((directory, unshared), (self.path / manifest.BASE, bases)):
            for file, expected in listing.files.items():
                manifest.require_size(folder, file, manifest.regular_size(folder, listing.path(file)), expected.size)
        return content

    def fetch(self, name: str, content: manifest.Manifest, files: Collection[str]) -> Path:
        """Return the folder that contains a checkpoint's files."""
        return self.path / name / content.prefix

    def read_index(self) -> CheckpointIndex | None:
        """Read the index."""
        return parse_index(parse_small(self.path / INDEX))

    # --- writing ----------------------------------------------------------------------------------------------------
    def make(self) -> None:
        """Create the folder."""
        make_folder(self.path)

    def write_index(self, index: CheckpointIndex) -> None:
        """Replace the index."""
        replace_file(self.path / INDEX, index.dump())

    def require_free_name(self, name: str) -> None:
        """Raise CheckpointError if the name is taken by something other than a checkpoint."""
        path = self.path / name
        if not name:
            raise CheckpointError(f"Expected a checkpoint name, got the folder {str(path)!r}.")
        if not os.path.lexists(path):
            return
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder or not ((path / manifest.MANIFEST).exists() or manifest.are_file_names(os.listdir(path))):
            raise CheckpointError(f"{path} is not a checkpoint, so it will not be replaced. Choose another name.")

    def open_stage(self, name: str, needed: int, run: str) -> str:
        """Create a folder as the stage for a checkpoint of about `needed` bytes."""
        make_folder(self.path)
        self._clean_up(name)
        free_space_check(self.path, needed)
        os.mkdir(temporary_path(self.path / name, PARTIAL))
        return ""

    def write(self, name: str, stage: str, file: str, fill: Callable[[HashedFile], FileSum]) -> FileSum:
        """Write a new file to the stage."""
        folder = temporary_path(self.path / name, PARTIAL)
        if not folder.is_dir():
            raise CheckpointError(
                f"This process cannot see the folder {folder}. Every process writes to the checkpoint, so its folder "
                f"must be shared. Set default_root_dir to a folder on a shared file system."
            )
        return fill(HashedFile(folder / file))

    def publish(self, name: str, stage: str, files: Mapping[str, FileSum], run: str) -> None:
        """Write the manifest and give the checkpoint its name. Raises OSError on failure."""
        new, old, target = (
            temporary_path(self.path / name, PARTIAL),
            temporary_path(self.path / name, REPLACED),
            self.path / name,
        )
        write_bytes(HashedFile(new / manifest.MANIFEST), manifest.dump_manifest(files, run))
        # sync names before the rename: after a power failure, a file system may have the rename but not the files
        sync_folder(new)
        if target.exists():
            self._rename(target, old)
        self._rename(new, target)
        _delete(old)

    def discard(self, name: str, stage: str) -> None:
        """Delete the files of an abandoned checkpoint."""
        with suppress(OSError):
            self._clean_up(name)

    def bases(self) -> dict[FileSum, dict[str, str]]:
        """Read the headers of the bases. Damaged bases are skipped."""
        bases = {}
        for path in sorted((self.path / manifest.BASE).glob("*.safetensors")):
            with suppress(CheckpointError, OSError):
                size = manifest.regular_size(path.parent, path.name)
                with path.open("rb") as file:
                    digests = manifest.digests_of_base(size, lambda start, end: file.read(end - start))
                bases.update({FileSum(size, path.stem): digests} if digests else {})
        return bases

    def add_base(self, write: Callable[[HashedFile], FileSum]) -> FileSum:
        """Write a base under a unique name, then rename it.

        If two processes write the same base, the second file replaces the first.
        """
        folder = self.path / manifest.BASE
        make_folder(folder)
        partial = folder / f"{uuid.uuid4().hex}.{PARTIAL}"
        try:
            entry = write(HashedFile(partial))
            partial.rename(folder / f"{entry.sha256}.safetensors")
            sync_folder(folder)
        finally:
            partial.unlink(missing_ok=True)
        return entry

    # --- cleaning up ------------------------------------------------------------------------------------------------
    def sweep(self) -> None:
        """Clean up after interrupted saves and removals. No other process may write to the folder at the same time."""
        entries = os.listdir(self.path) if self.path.is_dir() else []
        for name in sorted({leftover[1] for entry in entries if (leftover := _LEFTOVER.fullmatch(entry))}):
            with _naming(self.path / name):
                self._clean_up(name)
        with _naming(self.path / manifest.BASE):
            for path in (self.path / manifest.BASE).glob(f"{'[0-9a-f]' * 32}.{PARTIAL}"):
                path.unlink(missing_ok=True)
            self._remove_unused_bases()

    def remove(self, name: str, run: str | None = None) -> None:
        """Delete a checkpoint, but not a link to one."""
        path, doomed = self.path / name, temporary_path(self.path / name, PARTIAL)
        self._require_removable(path, run)
        with _naming(path):
            # first, because a later clean-up would restore the checkpoint that this one replaced
            _delete(temporary_path(self.path / name, REPLACED))
            _delete(doomed)
            self._rename(path, doomed)
            _delete(doomed)
            self._remove_unused_bases()

    def _remove_unused_bases(self) -> None:
        """Delete bases that no checkpoint refers to, unless a save is in progress or a manifest is unreadable."""
        folder = self.path / manifest.BASE
        bases = sorted(path.name for path in folder.glob("*.safetensors"))
        entries = os.listdir(self.path) if bases else []
        if not bases or any(entry.endswith(f".{PARTIAL}") for entry in entries):
            return  # a save in progress may refer to a base and has no manifest yet
        # includes checkpoints that were left under a temporary name during a replacement
        committed = [entry for entry in entries if (self.path / entry / manifest.MANIFEST).exists()]
        for base in manifest.unused_bases(bases, map(self.read_manifest, committed)):
            (folder / base).unlink(missing_ok=True)
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()

    def _require_removable(self, path: Path, run: str | None) -> None:
        try:
            if path.is_symlink():
                raise CheckpointError("it is a link.")
            content = manifest.load_manifest(path).split()[0]
            present = {entry.relative_to(path).as_posix() for entry in path.rglob("*")} - {content.prefix}
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{path} was not removed: {error}") from error
        foreign = sorted(present - {manifest.MANIFEST, *map(content.path, content.files)})
        manifest.require_removable(path, content, foreign, run)

    def _clean_up(self, name: str) -> None:
        old, path = temporary_path(self.path / name, REPLACED), self.path / name
        if (old / manifest.MANIFEST).exists() and not path.exists():
            self._rename(old, path)  # a process died between the two renames of a replacement
        _delete(temporary_path(self.path / name, PARTIAL))
        _delete(old)

    def _rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        sync_folder(self.path)


def folder_at(location: Location) -> Folder:
    """Return the folder of checkpoints at a path or address."""
    return ObjectFolder(location) if isinstance(location, Address) else LocalFolder(location)


def is_file(location: Location) -> bool:
    """Return whether a location is a file, which may hold another program's weights but never a Legato checkpoint."""
    return is_object(location) if isinstance(location, Address) else location.is_file()


@contextmanager
def local_file(location: Location) -> Iterator[Path]:
    """Yield a local path for the file at a location: the file itself, or a copy that exists only in this context."""
    if isinstance(location, Path):
        yield location
        return
    with tempfile.TemporaryDirectory(prefix="legato-") as folder:
        yield download(location, Path(folder))


def fetch_file(folder: Folder, name: str, content: manifest.Manifest, file: str) -> Path:
    """Return the local path of one of a checkpoint's files, which include its bases."""
    if file.startswith(manifest.BASE):
        bases = content.split()[1]
        name, content, file = manifest.BASE, bases, f"{content.files[file].sha256}.safetensors"
    return folder.fetch(name, content, [file]) / file


def remove(checkpoint: Location, run: str | None = None) -> None:
    """Delete a checkpoint; see `Folder.remove`."""
    folder_at(checkpoint.parent).remove(checkpoint.name, run)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed or cleaned up: {error}.") from error


def _delete(path: Path) -> None:
    """Delete a temporary file or folder, manifest first. Two processes or threads may call this at the same time."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        # without the manifest, the remaining files are not a checkpoint if the process dies here
        (path / manifest.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


# --- files and folders ------------------------------------------------------------------------------------------------
def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync the parent of each new folder."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder to make the names in it durable."""
    # fsync of a file does not sync the file's name, which is stored in the folder
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space_check(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if a folder's disk does not have enough free space for a save."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SLACK:
        raise CheckpointError(
            f"A checkpoint needs {format_bytes(needed_bytes)} in {folder}, but only {format_bytes(free)} is free. "
            f"Nothing was written. Free some space, keep fewer checkpoints, or put the run on another disk."
        )


def replace_file(path: Path, data: bytes) -> None:
    """Replace a small file atomically: even after a crash or power failure, either the old or the new file exists.

    Raises OSError on failure.
    """
    partial = temporary_path(path, PARTIAL)
    partial.unlink(missing_ok=True)  # left by a killed process
    write_bytes(HashedFile(partial), data)
    partial.replace(path)
    sync_folder(path.parent)


def require_new(target: Path) -> None:
    """Raise CheckpointError if the name is already taken by a file or folder."""
    require_local(target, "The file to write")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} already exists and will not be replaced. Choose another name.")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path, with the same suffix as `target`, to write the complete file to.

    On success, the file is renamed to `target`. On failure, it is deleted. Raises CheckpointError instead of OSError.
    """
    partial = target.with_name(f".{target.stem}.{PARTIAL}{target.suffix}")
    try:
        make_folder(target.absolute().parent)
        yield partial
        partial.rename(target)
        sync_folder(target.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
