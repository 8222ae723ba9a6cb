"""Atomic replacement and removal of checkpoint directories, whenever the process dies.

`step-00001200` is written as `.step-00001200.partial` beside it, every file synced, the manifest last, and renamed. An
existing one is first renamed to `.step-00001200.replaced` and deleted last; one that is removed is first renamed to
`.step-00001200.removed`. So at every moment the old or the new one is complete, under its own name or as `.replaced`,
and leftovers of an interrupted process have fixed names, which the next save cleans up.
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

from ...base.errors import CheckpointError
from ...base.quantities import format_bytes
from ...base.run_names import require_local
from ..processes.collectives import SINGLE, Collectives
from . import manifest
from .format import MODEL, OTHERS, FileSum, FlatState, file_sum, write_bytes, write_tensors
from .shards import SHARD_FILE, file_name

T = TypeVar("T")
ExtraFiles = Mapping[str, Callable[[Path], object]]

STEP_NAME = re.compile(r"step-([0-9]{8,})")
PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
_REST = re.compile(rf"\.({STEP_NAME.pattern})\.({PARTIAL}|{REPLACED}|{REMOVED})")
_OWN_FILES = {manifest.MODEL_FILE, manifest.TENSORS_FILE, manifest.STATE_FILE, manifest.MANIFEST}
_SLACK = 64 << 10  # bytes for headers, the manifest and folders


def temporary_path(directory: Path, kind: str) -> Path:
    """Return the temporary name of one kind for a checkpoint."""
    return directory.with_name(f".{directory.name}.{kind}")


@dataclass(frozen=True)
class Owner:
    """Run for which a checkpoint is written."""

    run: str = ""
    """Id of the run for the manifest; "": none."""
    sweeps: bool = True
    """Whether this run alone writes to the folder, so that leftovers of interrupted saves may be deleted."""


NO_OWNER = Owner()


def commit(
    directory: Path,
    flat: FlatState,
    extra_files: ExtraFiles | None = None,
    ranks: Collectives = SINGLE,
    owner: Owner = NO_OWNER,
) -> None:
    """Write a checkpoint, replacing an existing one.

    Every one of `ranks` calls this, and writes its own files. Raises CheckpointError, on every rank, if that fails; an
    existing checkpoint is kept then.
    """
    first, extra_files, stage = ranks.rank == 0, extra_files or {}, temporary_path(directory, PARTIAL)
    needed = sum(ranks.gather_objects(flat.nbytes))
    begun = False

    # Each of the three ends with a gather of errors: no rank goes on to the next while another has failed, and the
    # directory is swapped in only when every rank's files are synced.
    def begin() -> None:
        nonlocal begun
        if first:
            _check_place(directory, extra_files)
            # only now: a place that was refused belongs to somebody else, and nothing is cleared up there
            begun = True
            _open_stage(directory, stage, needed, owner.sweeps)

    def write() -> dict[str, FileSum]:
        return {**(_write_whole(stage, flat, extra_files) if first else {}), **_write_parts(stage, flat, ranks.rank)}

    def finish(sums: list[dict[str, FileSum]]) -> None:
        if first:
            files = {name: found for written in sums for name, found in written.items()}
            write_bytes(stage / manifest.MANIFEST, manifest.dump_manifest(files, owner.run))
            # names before the rename: a file system may keep a rename through a power cut and lose what it points to
            sync_folder(stage)
            _swap_in(stage, directory)

    try:
        on_all_ranks(ranks, begin)
        sums = on_all_ranks(ranks, write)
        on_all_ranks(ranks, lambda: finish(sums))
    except BaseException as error:
        if begun:
            with suppress(OSError):
                clean_up(directory)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{directory} could not be written: {error.strerror or error} ({format_bytes(needed)} needed"
                f"{_free_text(directory.parent)}). Earlier checkpoints are untouched."
            ) from error
        raise


def on_all_ranks(ranks: Collectives, action: Callable[[], T]) -> list[T]:
    """Call `action` on every rank and return the results, by rank.

    Raises its exception here, or CheckpointError if it failed on other ranks only.
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
    clean_up(directory)
    if sweeps and STEP_NAME.fullmatch(directory.name):
        sweep(directory.parent)
    free_space_check(directory.parent, needed)
    os.mkdir(stage)


def _check_place(directory: Path, extra_files: ExtraFiles) -> None:
    if not directory.name:
        raise CheckpointError(f"A checkpoint needs a name of its own, got {str(directory)!r}.")
    for name in extra_files:
        if not manifest.is_plain_name(name) or name in _OWN_FILES or SHARD_FILE.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot be a file of a checkpoint; expected a plain, free name.")
    if not os.path.lexists(directory):
        return
    foreign = directory.is_symlink() or not directory.is_dir()
    if not foreign and not (directory / manifest.MANIFEST).exists():
        foreign = any(
            entry.name not in _OWN_FILES and not SHARD_FILE.fullmatch(entry.name) for entry in directory.iterdir()
        )
    if foreign:
        raise CheckpointError(
            f"{directory} exists and is not a checkpoint, so it is not replaced. Choose another name."
        )


def _write_whole(stage: Path, flat: FlatState, extra_files: ExtraFiles) -> dict[str, FileSum]:
    state = json.dumps(flat.tree, allow_nan=False).encode("ascii")
    files: dict[str, FileSum] = {
        manifest.MODEL_FILE: write_tensors(stage / manifest.MODEL_FILE, flat.tensors[MODEL]),
        manifest.TENSORS_FILE: write_tensors(stage / manifest.TENSORS_FILE, flat.tensors[OTHERS]),
        manifest.STATE_FILE: write_bytes(stage / manifest.STATE_FILE, state),
    }
    for name, write in extra_files.items():
        write(stage / name)
        files[name] = file_sum(stage / name, sync=True)
    return files


def _write_parts(stage: Path, flat: FlatState, rank: int) -> dict[str, FileSum]:
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
    old = temporary_path(directory, REPLACED)
    replaces = directory.exists()
    if replaces:
        os.rename(directory, old)
        sync_folder(directory.parent)
    os.rename(stage, directory)
    sync_folder(directory.parent)
    if replaces:
        _delete(old)


def clean_up(directory: Path) -> None:
    """Clean up after an interrupted save or removal of this checkpoint."""
    old = temporary_path(directory, REPLACED)
    if (old / manifest.MANIFEST).exists() and not directory.exists():
        os.rename(old, directory)  # the process died between the two renames of a replacement
        sync_folder(directory.parent)
    for kind in (PARTIAL, REPLACED, REMOVED):
        _delete(temporary_path(directory, kind))


def sweep(root: Path) -> None:
    """Clean up after interrupted saves and removals in this folder; no save may be under way."""
    if root.is_dir():
        names = {found[1] for entry in os.scandir(root) if (found := _REST.fullmatch(entry.name))}
        for name in sorted(names):
            with _naming(root / name):
                clean_up(root / name)


def remove(directory: Path, run: str | None = None) -> None:
    """Delete a checkpoint, of `run` if given; raises CheckpointError for anything else.

    A checkpoint is a directory, not a link, with a valid manifest and no file that is missing from it.
    """
    _check_removable(directory, run)
    gone = temporary_path(directory, REMOVED)
    with _naming(directory):
        # First, or `clean_up` would later restore the checkpoint that was replaced before.
        _delete(temporary_path(directory, REPLACED))
        _delete(gone)
        os.rename(directory, gone)
        sync_folder(directory.parent)
        _delete(gone)


def _check_removable(directory: Path, run: str | None) -> None:
    if directory.is_symlink() or not directory.is_dir():
        kind = "a link" if directory.is_symlink() else "not there" if not directory.exists() else "no directory"
        raise CheckpointError(f"{directory} is not removed: it is {kind}.")
    try:
        files, wrote = manifest.load_manifest(directory)
        foreign = sorted({entry.name for entry in os.scandir(directory)} - {*files, manifest.MANIFEST})
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{directory} is not removed: it does not look like a checkpoint. {error}") from error
    if run is not None and run != wrote:
        raise CheckpointError(f"{directory} is not removed: another run wrote it.")
    if foreign:
        raise CheckpointError(f"{directory} is not removed: it holds {foreign[0]}, which Legato did not write.")


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{directory} could not be removed or tidied up: {error}.") from error


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
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)  # not part of a checkpoint of this version
            else:
                Path(entry.path).unlink(missing_ok=True)
        os.rmdir(path)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and sync each."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
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


def sync_folder(path: Path) -> None:
    """Sync a folder, and so the names in it."""
    # fsync of a file does not sync its name, which is in the folder
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space_check(root: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if a save does not fit in the free space of a folder."""
    while not root.exists() and root != root.parent:
        root = root.parent
    free = shutil.disk_usage(root).free
    if free < needed_bytes + _SLACK:
        raise CheckpointError(
            f"A checkpoint needs {format_bytes(needed_bytes)} in {root}, where {format_bytes(free)} are free; nothing "
            f"was written. Free some space, keep fewer checkpoints, or put the run on another disk."
        )


def _free_text(root: Path) -> str:
    with suppress(OSError):
        return f", {format_bytes(shutil.disk_usage(root).free)} free"
    return ""
