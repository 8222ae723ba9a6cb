"""`legato clean`: deletes empty runs, failed runs and old checkpoints after asking for confirmation."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import CheckpointError, ConfigError
from ...base.quantities import counted, format_bytes
from ...base.run_names import require_local
from ...trainer.checkpoints import storage
from ...trainer.runs.directory import CheckpointEntry, RunDirectory, find_runs
from ...trainer.runs.lock import RunLock, is_held
from ...trainer.runs.removal import is_own_checkpoint, is_own_run, remove_run
from ...trainer.runs.run_file import FAILED, RUNNING, identity_of
from .text import folder_size

DELETABLE = {
    "empty": "runs without a checkpoint or a logged value",
    "failed": "failed runs",
    "checkpoints": "checkpoints of other runs, except the best and the newest of each run",
}
"""Kinds of folders to delete. The command asks once per kind."""


@dataclass(frozen=True)
class Deletion:
    """A folder to delete: a run directory or one of its checkpoints."""

    run: RunDirectory
    path: Path
    size: int
    note: str = ""


def run_clean(arguments: Namespace) -> None:
    """List the folders of each kind, ask for confirmation, and delete them. Raises ConfigError if it cannot ask."""
    require_local(arguments.dir, "The folder of runs to clean")
    by_kind = deletions(find_runs(Path(arguments.dir)), arguments.only or list(DELETABLE))
    if not any(by_kind.values()):
        print("There is nothing to delete.")
        return
    for kind, listed in by_kind.items():
        if not listed:
            continue
        total = format_bytes(sum(deletion.size for deletion in listed))
        print(f"{DELETABLE[kind]}: {len(listed)}, {total}")
        for deletion in listed:
            print(f"  {deletion.path}  {format_bytes(deletion.size)}{deletion.note}")
        if not arguments.dry_run and (arguments.yes or confirmed(f"Delete {counted(len(listed), 'folder')}, {total}?")):
            print(f"{counted(sum(map(delete_locked, listed)), 'folder')} deleted")


def deletions(runs: Sequence[RunDirectory], kinds: Sequence[str]) -> dict[str, list[Deletion]]:
    """Return the folders that may be deleted, by kind. Runs in use are omitted."""
    by_kind: dict[str, list[Deletion]] = {kind: [] for kind in kinds}
    for run in runs:
        # an evaluation in progress may be reading one of the run's checkpoints
        folders = (run.path, *(evaluation.path for evaluation in run.evaluations))
        if is_own_run(run.path) and not (run.state == RUNNING or any(map(is_held, folders))):
            kind, listed = deletable(run)
            by_kind.get(kind, []).extend(listed)
    return by_kind


def deletable(run: RunDirectory) -> tuple[str, list[Deletion]]:
    """Return the kind of a run's deletable folders, and the folders themselves."""
    if run.is_empty:
        return "empty", [Deletion(run, run.path, folder_size(run.path))]
    if run.state == FAILED:
        # shown to the user, since a resumable run may be worth its space
        steps = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.complete]
        note = f"  can be resumed from step {steps[-1]}" if steps else ""
        return "failed", [Deletion(run, run.path, folder_size(run.path), note)]
    return "checkpoints", [Deletion(run, Path(old.path), old.size) for old in old_checkpoints(run)]


def old_checkpoints(run: RunDirectory) -> list[CheckpointEntry]:
    """Return a run's complete checkpoints except the newest and the best, or an empty list if the best is unknown."""
    complete = [entry for entry in run.checkpoints if entry.complete and is_own_checkpoint(Path(entry.path))]
    best = run.best_checkpoint
    if best is None or best not in complete:
        return []
    return [entry for entry in complete[:-1] if entry != best]


def confirmed(question: str) -> bool:
    """Ask a yes-or-no question and return whether the answer is yes. Raises ConfigError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("Confirmation requires a terminal. Pass --yes to delete folders or --dry-run to list them.")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def delete_locked(deletion: Deletion) -> bool:
    """Delete a run or checkpoint while holding the run's lock, so the run cannot resume. Return whether it was deleted.

    If it was not deleted, print the reason.
    """
    run, path = deletion.run.path, deletion.path
    lock = RunLock(run, "clean")
    try:
        lock.take()
        # checked again under the lock, since the run may have been resumed before the answer
        if not is_own_run(run) or path not in [deletion.path for deletion in deletable(RunDirectory(run))[1]]:
            raise CheckpointError("it has changed.")
        if path == run:
            remove_run(run)
        else:
            storage.remove(path, identity_of(run))
    except (CheckpointError, ConfigError) as error:
        print(f"{path} was not deleted: {error}")
        return False
    except OSError as error:
        print(f"Cannot delete {path}: {error.strerror or error}.")
        return False
    finally:
        lock.release()
    return path != run or remove_empty(run)


def remove_empty(run: Path) -> bool:
    """Delete a run's folder if it is empty. Otherwise, print the files left in it. Return whether it was deleted."""
    try:
        run.rmdir()  # fails if a file is left or if a new run has started
    except OSError:
        names = ", ".join(sorted(path.name for path in run.iterdir()))
        print(f"{run} was kept, because Legato did not write {names}.")
        return False
    return True
