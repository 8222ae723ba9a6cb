"""Removes runs and checkpoints, deleting only files that Legato wrote.

A run is a folder with a `run.json`. `Folder.remove` deletes a checkpoint after checking that the run wrote it and that
it contains no other files. Other regular files are deleted only if they have names that Legato uses. Empty folders
are deleted last. Links are neither followed nor deleted.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from ...base.checkpoint_index import INDEX
from ...base.errors import CheckpointError
from ...base.run_names import CHECKPOINTS, CONFIG, EVALUATIONS, EVENT_FILES, RUN_FILE
from ..checkpoints.find import is_checkpoint_of
from ..checkpoints.storage import folder_at
from .lock import HOLDER, LOCK
from .record import DIFF, EPOCHS, GIVEN_CONFIG, RECORD, STARTS
from .run_file import identity_of

REMOVABLE: Mapping[str, tuple[str, ...]] = {
    "": (
        *(CONFIG, GIVEN_CONFIG, RECORD, f"{RECORD}.damaged", DIFF, "uncommitted-*.diff", EPOCHS, "spikes.jsonl"),
        *("metrics.jsonl", "metrics.csv", "hparams.yaml", f"{EVENT_FILES}*", "*-id.txt"),
        *("predictions.safetensors", "predictions.jsonl"),
        *("metrics.*.partial", ".*.json.partial", ".config*.partial"),
    ),
    "hang": ("rank-*.txt",),
    STARTS: ("*.yaml",),
}
"""Patterns for the files that Legato writes to each folder of a run; `""` is the run directory itself."""


def is_own_run(directory: Path) -> bool:
    """Return whether a path is a run directory rather than a link to one."""
    return not directory.is_symlink() and identity_of(directory) != ""


def is_own_checkpoint(path: Path) -> bool:
    """Return whether a checkpoint is in the directory of the run that wrote it."""
    run = identity_of(path.parent.parent)
    return run != "" and not path.parent.is_symlink() and is_checkpoint_of(run, path)


def remove_run(directory: Path) -> None:
    """Delete the files that Legato wrote to a run directory, except for the lock, which the caller holds.

    `run.json` is deleted last, so that the folder is still a run directory if the removal is interrupted.
    """
    for evaluation in _evaluations(directory):
        _remove_known_files(evaluation)
        _remove_files(evaluation, (RUN_FILE, LOCK, HOLDER))
        _remove_empty(evaluation, evaluation.parent)
    _remove_empty(directory / EVALUATIONS)
    _remove_checkpoints(directory / CHECKPOINTS, identity_of(directory))
    _remove_known_files(directory)
    _remove_files(directory, (RUN_FILE,))


def _evaluations(directory: Path) -> Iterator[Path]:
    for stage in _entries(directory / EVALUATIONS):
        yield from (path for path in _entries(stage) if path.is_dir() and not path.is_symlink())


def _remove_checkpoints(folder: Path, identity: str) -> None:
    if folder.is_symlink() or not folder.is_dir():
        return
    checkpoints = folder_at(folder)
    checkpoints.sweep()  # deletes leftovers with temporary names, which are not checkpoints
    for path in _entries(folder):
        # checkpoints that another run wrote or a person changed are not deleted; `clean` lists the remaining files
        with suppress(CheckpointError):
            checkpoints.remove(path.name, identity)
    _remove_files(folder, (INDEX,))
    _remove_empty(folder)


def _remove_known_files(directory: Path) -> None:
    for name, patterns in REMOVABLE.items():
        _remove_files(directory / name, patterns)
        if name:
            _remove_empty(directory / name)


def _remove_files(folder: Path, patterns: tuple[str, ...]) -> None:
    for path in _entries(folder):
        # somebody may have linked a file into the run directory
        is_regular = path.is_file() and not path.is_symlink()
        if is_regular and any(fnmatchcase(path.name, pattern) for pattern in patterns):
            path.unlink()


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        if not folder.is_symlink():
            with suppress(OSError):  # the folder does not exist or is not empty
                folder.rmdir()


def _entries(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder; [] if the path is a link or is not a folder."""
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
