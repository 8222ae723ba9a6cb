"""`legato clean`: deletes empty and failed runs, and old checkpoints, after it has asked."""

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
    "checkpoints": "checkpoints of other runs, but for the best and the newest of each",
}
"""Kinds of folders to delete, a question each."""


@dataclass(frozen=True)
class Deletion:
    """One folder to delete: a run directory, or a checkpoint of it."""

    run: RunDirectory
    path: Path
    size: int
    note: str = ""


def run_clean(arguments: Namespace) -> None:
    """Ask for each kind what to delete, and delete it. Raises ConfigError where nobody can be asked."""
    require_local(arguments.dir, "The folder of runs to clean")
    found = deletions(find_runs(Path(arguments.dir)), arguments.only or list(DELETABLE))
    if not any(found.values()):
        print("There is nothing to delete.")
        return
    for kind, listed in found.items():
        if not listed:
            continue
        total = format_bytes(sum(one.size for one in listed))
        print(f"{DELETABLE[kind]}: {len(listed)}, {total}")
        for one in listed:
            print(f"  {one.path}  {format_bytes(one.size)}{one.note}")
        if not arguments.dry_run and (arguments.yes or confirmed(f"Delete {len(listed)}, {total}?")):
            print(f"{counted(sum(map(delete_locked, listed)), 'folder')} deleted")


def deletions(runs: Sequence[RunDirectory], kinds: Sequence[str]) -> dict[str, list[Deletion]]:
    """Return what may be deleted, by kind. A run that somebody writes to is left alone."""
    found: dict[str, list[Deletion]] = {kind: [] for kind in kinds}
    for run in runs:
        # an evaluation reads a checkpoint of the run, which must stay until it is done
        is_in_use = run.state == RUNNING or any(map(is_held, (run.path, *(one.path for one in run.evaluations))))
        if is_own_run(run.path) and not is_in_use:
            kind, listed = deletable(run)
            found.get(kind, []).extend(listed)
    return found


def deletable(run: RunDirectory) -> tuple[str, list[Deletion]]:
    """Return what of a run may be deleted, and of which kind that is."""
    if run.is_empty:
        return "empty", [Deletion(run, run.path, folder_size(run.path))]
    if run.state == FAILED:
        # what can be resumed may be worth more than its space
        whole = [one.step for one in run.checkpoints if one.complete]
        note = f"  can be resumed from step {whole[-1]}" if whole else ""
        return "failed", [Deletion(run, run.path, folder_size(run.path), note)]
    return "checkpoints", [Deletion(run, Path(one.path), one.size) for one in old_checkpoints(run)]


def old_checkpoints(run: RunDirectory) -> list[CheckpointEntry]:
    """Return a run's checkpoints but for the newest complete one and the best; none where the best is not known."""
    whole = [one for one in run.checkpoints if one.complete and is_own_checkpoint(Path(one.path))]
    best = run.best_checkpoint
    if best is None or best not in whole:
        return []
    return [one for one in whole[:-1] if one != best]


def confirmed(question: str) -> bool:
    """Ask a question on the terminal; return whether the answer is yes. Raises ConfigError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("Nobody can be asked here: give --yes to delete, or --dry-run to look.")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def delete_locked(deletion: Deletion) -> bool:
    """Delete a run or a checkpoint under its run's lock, so that no run can begin there meanwhile, or say why it is
    left; return whether it is gone.
    """
    run, path = deletion.run.path, deletion.path
    lock = RunLock(run, "clean")
    try:
        lock.take()
        # looked at once more under the lock, as the question may have waited for long: somebody may have resumed it
        if not is_own_run(run) or path not in [now.path for now in deletable(RunDirectory(run))[1]]:
            raise CheckpointError("it has changed.")
        if path == run:
            remove_run(run)
        else:
            storage.remove(path, identity_of(run))
    except (CheckpointError, ConfigError) as error:
        print(f"{path} is left: {error}")
        return False
    except OSError as error:
        print(f"{path} could not be deleted: {error.strerror or error}.")
        return False
    finally:
        lock.release()
    return path != run or remove_empty(run)


def remove_empty(run: Path) -> bool:
    """Delete the folder of a run whose files are gone; say what is left there. Return whether it is gone."""
    try:
        run.rmdir()  # refused by the system where a file is left, or a new run has begun
    except OSError:
        names = ", ".join(sorted(path.name for path in run.iterdir()))
        print(f"{run} is left with what Legato did not write: {names}.")
        return False
    return True
