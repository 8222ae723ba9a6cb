"""`legato clean`: deletes empty and failed runs, and old checkpoints, after it has asked."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.run_lock import RunLock, is_held
from ...checkpoints.run_names import CHECKPOINTS, IDENTITY, MANIFEST
from ...errors import ConfigError
from ...quantities import format_bytes
from ...run_directory import CheckpointEntry, RunDirectory, find_runs
from ...run_status import FAILED, RUNNING, STATUS
from .text import folder_size, plural

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
            print(f"{plural(delete(listed), 'folder')} deleted")


def deletions(runs: Sequence[RunDirectory], kinds: Sequence[str]) -> dict[str, list[Deletion]]:
    """Return what may be deleted, by kind. A run that somebody writes to is left alone."""
    found: dict[str, list[Deletion]] = {kind: [] for kind in kinds}
    for run in runs:
        if run.state != RUNNING and not is_held(run.path) and not run.path.is_symlink():
            kind, listed = deletable(run)
            found.get(kind, []).extend(listed)
    return found


def deletable(run: RunDirectory) -> tuple[str, list[Deletion]]:
    """Return what of a run may be deleted, and of which kind that is."""
    if run.is_empty:
        return "empty", [Deletion(run, run.path, folder_size(run.path))]
    if run.state == FAILED:
        whole = [one.step for one in run.checkpoints if one.complete]
        note = f"  can be resumed from step {whole[-1]}" if whole else ""
        return "failed", [Deletion(run, run.path, folder_size(run.path), note)]
    return "checkpoints", [Deletion(run, one.path, one.size) for one in old_checkpoints(run)]


def old_checkpoints(run: RunDirectory) -> list[CheckpointEntry]:
    """Return a run's checkpoints but for the newest complete one and the best; none where the best is not known."""
    whole = [one for one in run.checkpoints if one.complete and not one.path.is_symlink()]
    best = run.status.get("best_checkpoint")
    if not run.status or (run.status.get("monitor") is not None and best not in {one.path.name for one in whole}):
        return []
    return [one for one in whole[:-1] if one.path.name != best]


def confirmed(question: str) -> bool:
    """Ask a question on the terminal; return whether the answer is yes. Raises ConfigError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("Nobody can be asked here: give --yes to delete, or --dry-run to look.")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def delete(listed: Sequence[Deletion]) -> int:
    """Delete folders, each under its run's lock, so that no run can begin there meanwhile; return how many."""
    count = 0
    for one in listed:
        lock = RunLock(one.run.path, "clean")
        try:
            lock.take()
        except ConfigError as error:
            print(f"{one.path} is left: {error}")
            continue
        try:
            # looked at once more under the lock, as the question may have waited for long
            now = [each.path for each in deletable(RunDirectory(one.run.path))[1]]  # somebody may have resumed it
            if one.path not in now or not is_own(one.path):
                print(f"{one.path} is left: it has changed, or is neither a run directory nor a checkpoint.")
                continue
            remove_folder(one.path)
            count += 1
        except OSError as error:
            print(f"{one.path} could not be deleted: {error.strerror or error}.")
        finally:
            lock.release()
    return count


def remove_folder(path: Path) -> None:
    """Delete a folder; a checkpoint under the name by which the next save knows that it was being removed."""
    if path.parent.name == CHECKPOINTS:
        path = path.rename(path.with_name(f".{path.name}.removed"))
    shutil.rmtree(path)


def is_own(path: Path) -> bool:
    """Return whether a folder is one that Legato has made: a run directory, or a checkpoint in one."""
    if path.is_symlink() or not path.is_dir():
        return False
    if path.parent.name == CHECKPOINTS:
        return (path / MANIFEST).is_file()
    names = {one.name for one in path.iterdir()}
    return bool(names & {STATUS, IDENTITY}) or names <= {".lock", ".lock-ranks"}
