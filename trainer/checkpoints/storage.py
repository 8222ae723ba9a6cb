"""Folder of checkpoints: a checkpoint is complete under its name, or it is not there, whenever the process dies.

`step-00001200` is written as `.step-00001200.partial` beside it, every file synced, the manifest last, and renamed. An
existing one is first renamed to `.step-00001200.replaced` and deleted last; one that is removed is first renamed to
`.partial`. So at every moment the old or the new one is complete, under its own name or as `.replaced`, and leftovers
of an interrupted process have fixed names, which the next start cleans up.
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
    """Return the temporary name of one kind for a checkpoint."""
    return checkpoint.with_name(f".{checkpoint.name}.{kind}")


class Folder(Protocol):
    """Folder of checkpoints, which are named by text.

    A save is `require_free_name` and `open_stage` on rank 0, `write` on every rank for each of its files, and `publish`
    on rank 0: the commit. No caller knows of renames, which an object store has not.
    """

    @property
    def location(self) -> Location:
        """Where it is."""

    # --- reading
    def names(self) -> list[str]:
        """Return the names of committed checkpoints (those with a manifest)."""

    def candidates(self) -> list[str]:
        """Return the names to try for a complete checkpoint: also what a dying process left under a temporary name."""

    def committed(self, name: str) -> str | None:
        """Return the name under which this checkpoint is committed, maybe a temporary one; None: it is not."""

    def read_manifest(self, name: str) -> manifest.Manifest:
        """Read a checkpoint's manifest; raises CheckpointError with the place and the problem."""

    def check_sizes(self, name: str) -> manifest.Manifest:
        """Read a checkpoint's manifest, and check the sizes of its files. Raises CheckpointError."""

    def fetch(self, name: str, content: manifest.Manifest, files: Collection[str]) -> Path:
        """Return a local folder that has these files of a checkpoint, as long as this object is there.

        Nobody has verified them.
        """

    def read_index(self) -> CheckpointIndex | None:
        """Return the index; None where there is none, or one that Legato has not written."""

    # --- writing
    def make(self) -> None:
        """Make the folder, if it is missing. Raises OSError."""

    def write_index(self, index: CheckpointIndex) -> None:
        """Replace the index; whenever the process dies, it is the old one or the new one. Raises OSError."""

    def require_free_name(self, name: str) -> None:
        """Raise CheckpointError for a name of something that is no checkpoint."""

    def open_stage(self, name: str, needed: int, run: str) -> str:
        """Make the place where a checkpoint of about `needed` bytes is written; return what the others call it."""

    def write(self, name: str, stage: str, file: str, fill: Callable[[HashedFile], FileSum]) -> FileSum:
        """Write a new file of a checkpoint by `fill`, which may be called again where that fails. Raises OSError."""

    def publish(self, name: str, stage: str, files: Mapping[str, FileSum], run: str) -> None:
        """Write the manifest and give the checkpoint its name. Raises OSError."""

    def discard(self, name: str, stage: str) -> None:
        """Delete what was written for a checkpoint that is given up."""

    def bases(self) -> dict[FileSum, dict[str, str]]:
        """Return the bases that are there (frozen_base.py), each with the SHA-256 of its tensors by name."""

    def add_base(self, write: Callable[[HashedFile], FileSum]) -> FileSum:
        """Give a base that `write` writes its name, which is its SHA-256. Any number of processes may do so at once."""

    def sweep(self) -> None:
        """Clean up after interrupted saves and removals of steps; nobody else may write to the folder."""

    def remove(self, name: str, run: str | None = None) -> None:
        """Delete a checkpoint, of `run` if given; raises CheckpointError for anything else.

        A checkpoint is a directory, not a link, with a valid manifest and no file that is missing from it.
        """


class LocalFolder:
    """Folder of a file system that all ranks see."""

    def __init__(self, path: Path) -> None:
        self.path = self.location = path

    # --- reading ----------------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Return the names of committed checkpoints."""
        paths = map(self.path.joinpath, self.candidates())
        return [path.name for path in paths if path.name[0] != "." and (path / manifest.MANIFEST).is_file()]

    def candidates(self) -> list[str]:
        """Return checkpoints, and those that a dying process was replacing."""
        candidates: dict[str, str] = {}
        # ".step-..." sorts first and yields to "step-..."
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            name = path.name.removeprefix(".").removesuffix(f".{REPLACED}")
            if path.name not in (name, temporary_path(self.path / name, REPLACED).name) or path.is_symlink():
                continue
            files = path / manifest.MANIFEST, path / manifest.STATE_FILE
            # a user may have named a checkpoint: then its files tell it from any other folder
            if path.is_dir() and (STEP_NAME.fullmatch(name) or all(file.is_file() for file in files)):
                candidates[name] = path.name
        return list(candidates.values())

    def committed(self, name: str) -> str | None:
        """Return the name of a checkpoint, or its temporary one if a dying process was replacing it."""
        # the second: a process died while it replaced the checkpoint
        for path in (self.path / name, temporary_path(self.path / name, REPLACED)):
            if (path / manifest.MANIFEST).is_file():
                return path.name
        return None

    def read_manifest(self, name: str) -> manifest.Manifest:
        """Read a manifest."""
        return manifest.load_manifest(self.path / name)

    def check_sizes(self, name: str) -> manifest.Manifest:
        """Read a manifest, and check the sizes of its files."""
        directory = self.path / name
        if not directory.is_dir():
            raise CheckpointError(f"There is no checkpoint at {directory}: it is not a directory.")
        content = self.read_manifest(name)
        own, bases = content.split()
        for stored in bases.files:
            if not os.path.lexists(self.path / manifest.BASE / stored):
                raise manifest.lacks_base(directory, stored)
        # links and devices are refused before any is opened
        for folder, each in ((directory, own), (self.path / manifest.BASE, bases)):
            for file, expected in each.files.items():
                manifest.require_size(folder, file, manifest.regular_size(folder, each.path(file)), expected.size)
        return content

    def fetch(self, name: str, content: manifest.Manifest, files: Collection[str]) -> Path:
        """Return the directory of a checkpoint's files."""
        return self.path / name / content.prefix

    def read_index(self) -> CheckpointIndex | None:
        """Read the index."""
        return parse_index(parse_small(self.path / INDEX))

    # --- writing ----------------------------------------------------------------------------------------------------
    def make(self) -> None:
        """Make the folder."""
        make_folder(self.path)

    def write_index(self, index: CheckpointIndex) -> None:
        """Replace the index."""
        replace_file(self.path / INDEX, index.dump())

    def require_free_name(self, name: str) -> None:
        """Raise CheckpointError for a name of something that is no checkpoint."""
        path = self.path / name
        if not name:
            raise CheckpointError(f"A checkpoint needs a name of its own, got {str(path)!r}.")
        if not os.path.lexists(path):
            return
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder or not ((path / manifest.MANIFEST).exists() or manifest.are_file_names(os.listdir(path))):
            raise CheckpointError(f"{path} exists and is not a checkpoint, so it is not replaced. Choose another name.")

    def open_stage(self, name: str, needed: int, run: str) -> str:
        """Make the folder in which a checkpoint of about `needed` bytes is written."""
        make_folder(self.path)
        self._clean_up(name)
        free_space_check(self.path, needed)
        os.mkdir(temporary_path(self.path / name, PARTIAL))
        return ""

    def write(self, name: str, stage: str, file: str, fill: Callable[[HashedFile], FileSum]) -> FileSum:
        """Write a new file of the checkpoint that is being written."""
        folder = temporary_path(self.path / name, PARTIAL)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not there: a checkpoint to which every process writes needs a folder that all of them "
                f"share. Set default_root_dir to one."
            )
        return fill(HashedFile(folder / file))

    def publish(self, name: str, stage: str, files: Mapping[str, FileSum], run: str) -> None:
        """Write the manifest and give the checkpoint its name; raises OSError where that fails."""
        new, old, target = (
            temporary_path(self.path / name, PARTIAL),
            temporary_path(self.path / name, REPLACED),
            self.path / name,
        )
        write_bytes(HashedFile(new / manifest.MANIFEST), manifest.dump_manifest(files, run))
        # names before the rename: a file system may keep a rename through a power cut and lose what it points to
        sync_folder(new)
        if target.exists():
            self._rename(target, old)
        self._rename(new, target)
        _delete(old)

    def discard(self, name: str, stage: str) -> None:
        """Delete what was written for a checkpoint that is given up."""
        with suppress(OSError):
            self._clean_up(name)

    def bases(self) -> dict[FileSum, dict[str, str]]:
        """Read the headers of the bases; one that is damaged is none."""
        bases = {}
        for path in sorted((self.path / manifest.BASE).glob("*.safetensors")):
            with suppress(CheckpointError, OSError):
                size = manifest.regular_size(path.parent, path.name)
                with path.open("rb") as file:
                    digests = manifest.digests_of_base(size, lambda start, end: file.read(end - start))
                bases.update({FileSum(size, path.stem): digests} if digests else {})
        return bases

    def add_base(self, write: Callable[[HashedFile], FileSum]) -> FileSum:
        """Write under a name that nobody else has, and rename: two with the same content take each other's place."""
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
        """Clean up after interrupted saves and removals of steps; nobody else may write to the folder."""
        entries = os.listdir(self.path) if self.path.is_dir() else []
        for name in sorted({leftover[1] for entry in entries if (leftover := _LEFTOVER.fullmatch(entry))}):
            with _naming(self.path / name):
                self._clean_up(name)
        with _naming(self.path / manifest.BASE):
            for path in (self.path / manifest.BASE).glob(f"{'[0-9a-f]' * 32}.{PARTIAL}"):
                path.unlink(missing_ok=True)
            self._remove_unused_bases()

    def remove(self, name: str, run: str | None = None) -> None:
        """Delete a checkpoint, and no link to one."""
        path, gone = self.path / name, temporary_path(self.path / name, PARTIAL)
        self._require_removable(path, run)
        with _naming(path):
            # first, or the checkpoint that was replaced before would later be restored
            _delete(temporary_path(self.path / name, REPLACED))
            _delete(gone)
            self._rename(path, gone)
            _delete(gone)
            self._remove_unused_bases()

    def _remove_unused_bases(self) -> None:
        """Delete the bases to which no checkpoint refers, unless a save is under way or a manifest cannot be read."""
        folder = self.path / manifest.BASE
        bases = sorted(path.name for path in folder.glob("*.safetensors"))
        entries = os.listdir(self.path) if bases else []
        if not bases or any(entry.endswith(f".{PARTIAL}") for entry in entries):
            return  # a save under way may have taken one of them, and has no manifest yet
        # also of those that were being replaced
        written = [entry for entry in entries if (self.path / entry / manifest.MANIFEST).exists()]
        for base in manifest.unused_bases(bases, map(self.read_manifest, written)):
            (folder / base).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty
            folder.rmdir()

    def _require_removable(self, path: Path, run: str | None) -> None:
        try:
            if path.is_symlink():
                raise CheckpointError("it is a link.")
            content = manifest.load_manifest(path).split()[0]
            present = {entry.relative_to(path).as_posix() for entry in path.rglob("*")} - {content.prefix}
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{path} is not removed: {error}") from error
        foreign = sorted(present - {manifest.MANIFEST, *map(content.path, content.files)})
        manifest.require_removable(path, content, foreign, run)

    def _clean_up(self, name: str) -> None:
        old, path = temporary_path(self.path / name, REPLACED), self.path / name
        if (old / manifest.MANIFEST).exists() and not path.exists():
            self._rename(old, path)  # the process died between the two renames of a replacement
        _delete(temporary_path(self.path / name, PARTIAL))
        _delete(old)

    def _rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        sync_folder(self.path)


def folder_at(location: Location) -> Folder:
    """Return the folder of checkpoints at a place."""
    return ObjectFolder(location) if isinstance(location, Address) else LocalFolder(location)


def is_file(location: Location) -> bool:
    """Return whether there is a file at a place: no checkpoint of Legato, but maybe weights of another program."""
    return is_object(location) if isinstance(location, Address) else location.is_file()


@contextmanager
def local_file(location: Location) -> Iterator[Path]:
    """Yield a file with the contents of the file at a place: itself, or a copy for the time of this context."""
    if isinstance(location, Path):
        yield location
        return
    with tempfile.TemporaryDirectory(prefix="legato-") as folder:
        yield download(location, Path(folder))


def fetch_file(folder: Folder, name: str, content: manifest.Manifest, file: str) -> Path:
    """Return the local path of a file of a checkpoint, or of one of its bases."""
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
        raise CheckpointError(f"{path} could not be removed or tidied up: {error}.") from error


def _delete(path: Path) -> None:
    """Delete a temporary name, the manifest first; two processes or threads may do so at once."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        # from now on the rest is no checkpoint, wherever the process dies
        (path / manifest.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


# --- files and folders ------------------------------------------------------------------------------------------------
def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and sync each."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, and so the names in it."""
    # fsync of a file does not sync its name, which is in the folder
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space_check(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if a save does not fit in the free space of a folder."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SLACK:
        raise CheckpointError(
            f"A checkpoint needs {format_bytes(needed_bytes)} in {folder}, where {format_bytes(free)} are free; "
            f"nothing was written. Free some space, keep fewer checkpoints, or put the run on another disk."
        )


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file; a kill or a power cut leaves the old one or the new one. Raises OSError."""
    partial = temporary_path(path, PARTIAL)
    partial.unlink(missing_ok=True)  # of a process that was killed
    write_bytes(HashedFile(partial), data)
    partial.replace(path)
    sync_folder(path.parent)


def require_new(target: Path) -> None:
    """Raise CheckpointError if something has this name."""
    require_local(target, "The file to write")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already, and is not replaced. Choose another name.")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a path to write, with the suffix of `target`; after the context it is `target`, whole, or nothing is there.

    Raises CheckpointError where an OSError comes.
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
