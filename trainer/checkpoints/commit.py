"""How a checkpoint comes to stand in its place, and goes from it: whole or not at all, whenever the process dies.

`step-00001200` is written as `.step-00001200.partial` beside it, every file synced, the manifest last, and renamed. One
that is in the way is first renamed to `.step-00001200.replaced` and deleted last; one that is removed is first renamed
to `.step-00001200.removed`. So at every moment the old or the new one is whole, under its own name or as `.replaced`,
and what an interrupted process leaves has a fixed name, which the next save settles.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError
from ..processes.collectives import SINGLE, Collectives
from . import manifest
from .format import MODEL, OTHERS, Flat, Sum, file_sum, write_bytes, write_tensors
from .shards import PART_FILE, file_name

T = TypeVar("T")
ExtraFiles = Mapping[str, Callable[[Path], object]]

STEP_NAME = re.compile(r"step-([0-9]{8,})")
PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
_REST = re.compile(rf"\.({STEP_NAME.pattern})\.({PARTIAL}|{REPLACED}|{REMOVED})")
_OWN_FILES = {manifest.MODEL_FILE, manifest.TENSORS_FILE, manifest.STATE_FILE, manifest.MANIFEST}
_SLACK = 64 << 10  # bytes: headers, the manifest, folders


def beside(directory: Path, kind: str) -> Path:
    """Return the fixed temporary name of one kind for a checkpoint."""
    return directory.with_name(f".{directory.name}.{kind}")


@dataclass(frozen=True)
class Owner:
    """On whose behalf a checkpoint is written."""

    run: str = ""
    """The identity of the run, for the manifest; "": no run's."""
    sweeps: bool = True
    """Whether nobody else writes to the folder, so that what interrupted saves left in it may be cleared up."""


NOBODY = Owner()


def commit(
    directory: Path,
    flat: Flat,
    extra_files: ExtraFiles | None = None,
    ranks: Collectives = SINGLE,
    owner: Owner = NOBODY,
) -> None:
    """Write a checkpoint to its place, replacing one that is there.

    With several `ranks` each of them calls this, and writes its own files. Raises CheckpointError, on every rank, where
    that fails; what stood there before then stands there still.
    """
    first, extra_files, stage = ranks.rank == 0, extra_files or {}, beside(directory, PARTIAL)
    needed = sum(ranks.gather_objects(flat.nbytes))
    begun = False

    def begin() -> None:
        nonlocal begun
        if first:
            _check_place(directory, extra_files)
            begun = True
            _open_stage(directory, stage, needed, owner.sweeps)

    def write() -> dict[str, Sum]:
        return {**(_write_whole(stage, flat, extra_files) if first else {}), **_write_parts(stage, flat, ranks.rank)}

    def finish(sums: list[dict[str, Sum]]) -> None:
        if first:
            files = {name: found for written in sums for name, found in written.items()}
            write_bytes(stage / manifest.MANIFEST, manifest.dump_manifest(files, owner.run))
            sync_folder(stage)
            _swap_in(stage, directory)

    try:
        together(ranks, begin)
        sums = together(ranks, write)
        together(ranks, lambda: finish(sums))
    except BaseException as error:
        if begun:
            with suppress(OSError):
                settle(directory)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{directory} could not be written: {error.strerror or error} ({_megabytes(needed)} needed"
                f"{_free_text(directory.parent)}). Earlier checkpoints are untouched."
            ) from error
        raise


def together(ranks: Collectives, action: Callable[[], T]) -> list[T]:
    """Call `action` on every rank and return what it returned, by rank.

    Raises what it raised here, or CheckpointError where it failed on other ranks only.
    """
    if ranks.size == 1:
        return [action()]
    error: Exception | None = None
    found: Any = None
    try:
        found = action()
    except Exception as caught:
        error, found = caught, None
    answers = ranks.gather_objects((found, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(answers):
        if problem is not None:
            raise CheckpointError(f"Rank {rank} could not write its part of the checkpoint. {problem}")
    return [answer for answer, _ in answers]


def _open_stage(directory: Path, stage: Path, needed: int, sweeps: bool) -> None:
    make_folder(directory.parent)
    settle(directory)
    if sweeps and STEP_NAME.fullmatch(directory.name):
        sweep(directory.parent)
    free_space_check(directory.parent, needed)
    os.mkdir(stage)


def _check_place(directory: Path, extra_files: ExtraFiles) -> None:
    if not directory.name:
        raise CheckpointError(f"A checkpoint needs a name of its own, got {str(directory)!r}.")
    for name in extra_files:
        if not manifest.is_plain_name(name) or name in _OWN_FILES or PART_FILE.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot be a file of a checkpoint; expected a plain, free name.")
    if not os.path.lexists(directory):
        return
    foreign = directory.is_symlink() or not directory.is_dir()
    if not foreign and not (directory / manifest.MANIFEST).exists():
        foreign = any(
            entry.name not in _OWN_FILES and not PART_FILE.fullmatch(entry.name) for entry in directory.iterdir()
        )
    if foreign:
        raise CheckpointError(f"{directory} is there and is no checkpoint, so it is not replaced. Choose another name.")


def _write_whole(stage: Path, flat: Flat, extra_files: ExtraFiles) -> dict[str, Sum]:
    state = json.dumps(flat.tree, allow_nan=False).encode("ascii")
    files: dict[str, Sum] = {
        manifest.MODEL_FILE: write_tensors(stage / manifest.MODEL_FILE, flat.tensors[MODEL]),
        manifest.TENSORS_FILE: write_tensors(stage / manifest.TENSORS_FILE, flat.tensors[OTHERS]),
        manifest.STATE_FILE: write_bytes(stage / manifest.STATE_FILE, state),
    }
    for name, write in extra_files.items():
        write(stage / name)
        files[name] = file_sum(stage / name, sync=True)
    return files


def _write_parts(stage: Path, flat: Flat, rank: int) -> dict[str, Sum]:
    files = {}
    for file, parts in flat.parts.items():
        if parts:
            if not stage.is_dir():
                raise CheckpointError(
                    f"{stage} is not there: a checkpoint to which every process writes needs a folder that all of them "
                    f"share. Set default_root_dir to one."
                )
            name = file_name(file, rank)
            files[name] = write_tensors(stage / name, {name: part.block for name, part in parts.items()})
    return files


def _swap_in(stage: Path, directory: Path) -> None:
    old = beside(directory, REPLACED)
    replaces = directory.exists()
    if replaces:
        os.rename(directory, old)
        sync_folder(directory.parent)
    os.rename(stage, directory)
    sync_folder(directory.parent)
    if replaces:
        _delete(old)


def settle(directory: Path) -> None:
    """Clear up what an interrupted save or removal of this one checkpoint left behind."""
    old = beside(directory, REPLACED)
    if (old / manifest.MANIFEST).exists() and not directory.exists():
        os.rename(old, directory)  # the process died between the two renames of a replacement
        sync_folder(directory.parent)
    for kind in (PARTIAL, REPLACED, REMOVED):
        _delete(beside(directory, kind))


def sweep(root: Path) -> None:
    """Clear up after interrupted saves and removals in this folder; call it where no save is under way."""
    if root.is_dir():
        names = {found[1] for entry in os.scandir(root) if (found := _REST.fullmatch(entry.name))}
        for name in sorted(names):
            with _naming(root / name):
                settle(root / name)


def remove(directory: Path, run: str | None = None) -> None:
    """Delete a checkpoint, of `run` if one is given; raises CheckpointError for anything else.

    What verifies is deleted: a directory, no link, with a manifest that is whole, and with no file that is not in it.
    """
    _check_removable(directory, run)
    gone = beside(directory, REMOVED)
    with _naming(directory):
        _delete(beside(directory, REPLACED))  # first, or settling would later bring back what was replaced before
        _delete(gone)
        os.rename(directory, gone)
        sync_folder(directory.parent)
        _delete(gone)


def _check_removable(directory: Path, run: str | None) -> None:
    if directory.is_symlink() or not directory.is_dir():
        kind = "a link" if directory.is_symlink() else "not there" if not directory.exists() else "no directory"
        raise CheckpointError(f"{directory} is not removed: it is {kind}.")
    try:
        files, wrote = manifest.load_manifest(directory), manifest.run_of(directory)
        foreign = sorted({entry.name for entry in os.scandir(directory)} - {*files, manifest.MANIFEST})
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{directory} is not removed: it does not look like a checkpoint. {error}") from error
    if run is not None and run != wrote:
        raise CheckpointError(f"{directory} is not removed: it is no checkpoint of this run; another one wrote it.")
    if foreign:
        raise CheckpointError(f"{directory} is not removed: it holds {foreign[0]}, which Legato did not write.")


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{directory} could not be removed or tidied up: {error}.") from error


def _delete(path: Path) -> None:
    """Delete a temporary name, the commit mark first; two processes or threads may do so at once."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        (path / manifest.MANIFEST).unlink(missing_ok=True)
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)  # of no checkpoint that this version writes
            else:
                Path(entry.path).unlink(missing_ok=True)
        os.rmdir(path)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each of them synced."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """See the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space_check(root: Path, needed_bytes: int) -> None:
    """Raise CheckpointError that names the folder, what is needed and what is free, where a save cannot fit."""
    while not root.exists() and root != root.parent:
        root = root.parent
    free = shutil.disk_usage(root).free
    if free < needed_bytes + _SLACK:
        raise CheckpointError(
            f"A checkpoint needs {_megabytes(needed_bytes)} in {root}, where {_megabytes(free)} are free; nothing was "
            f"written. Free some space, keep fewer checkpoints, or put the run on another disk."
        )


def _free_text(root: Path) -> str:
    with suppress(OSError):
        return f", {_megabytes(shutil.disk_usage(root).free)} free"
    return ""


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
