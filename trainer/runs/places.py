"""Chooses the run directory for a call to the trainer and the checkpoint that the call starts from."""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.checkpoint_index import INDEX
from ...base.environment import requeued_job
from ...base.errors import CheckpointError, ConfigError
from ...base.location import Address, Location, checkpoints_of, local_folder, location_of, to_absolute, to_location
from ...base.run_names import CONFIG, VERSION, name_problem
from ..checkpoints.find import (
    Check,
    best_checkpoints,
    checkpoint_step,
    checkpoints_in,
    first_complete,
    is_checkpoint_of,
    load_manifest,
    newest_complete,
    verify,
)
from . import record as run_record
from . import remote, run_file
from .lock import belongs_to_training
from .record import jobs_of
from .run_file import identity_of, require_readable

log = logging.getLogger("legato")


def versions(root: Location, name: str) -> list[Path]:
    """Return the run directories with the given name, oldest first. For an object store, these are local folders."""
    folder = root / name
    if isinstance(folder, Address):
        directories = [local_folder(folder / name) for name in remote.names_in(folder) if VERSION.fullmatch(name)]
    elif folder.is_dir():
        directories = [path for path in folder.iterdir() if VERSION.fullmatch(path.name) and path.is_dir()]
    else:
        return []
    return sorted(directories, key=lambda path: int(path.name.removeprefix("version_")))


def versions_to_resume(root: Location, name: str) -> list[Path]:
    """Return the run directories that resume=auto considers, oldest first.

    A requeued SLURM job considers only its own runs, because other jobs may since have started runs with the same name.
    """
    directories, job = versions(root, name), requeued_job()
    return [path for path in directories if job is not None and job in jobs_of(remote.refresh(path))] or directories


def create(root: Location, name: str, identity: str, stage: str) -> Path:
    """Create a new run's directory and return its path. Raises ConfigError if it is not writable."""
    if isinstance(root, Address):
        number, record = _next_number(root, name), json.dumps(run_file.new_run(identity, stage)).encode()
        while (directory := remote.make(root / name / f"version_{number}", record)) is None:
            number += 1  # another run took the number a moment ago
        return directory
    directory = make_folder(root, name)
    run_file.create(directory, identity, stage)
    return directory


def make_folder(root: Path, name: str) -> Path:
    """Create the next folder version_N for a run name and return its path. Raises ConfigError if it is not writable."""
    _require_text(root)
    number = _next_number(root, name)
    while True:
        path = root / name / f"version_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} is not a folder, so the run cannot use it. Move it, or set run.root to another folder."
                ) from None
            number += 1  # another run took the number a moment ago
            continue
        except OSError as error:
            raise ConfigError(
                f"The run directory {path} cannot be created: {error.strerror}. Set run.root to another folder."
            ) from error
        if not os.access(path, os.W_OK):
            raise ConfigError(f"The run directory {path} is not writable. Set run.root to another folder.")
        return path


def _next_number(root: Location, name: str) -> int:
    fault = name_problem(name)
    if fault is not None:
        raise ConfigError(f"run.name {fault}")
    # continue after the highest number: a new run must not fill the gap of a deleted run and appear among older runs
    return 1 + max((int(path.name.removeprefix("version_")) for path in versions(root, name)), default=-1)


def _require_text(root: Path) -> None:
    """Raise ConfigError if the path is not valid text in the locale, because TensorBoard and JSON cannot store it."""
    try:
        str(root.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"The path of run.root, {str(root.absolute())!a}, is not valid text in this locale. Set "
            f"PYTHONUTF8=1 or a UTF-8 locale, or set run.root to another folder."
        ) from None


def write_config(directory: Path, text: str, explicit: str | None, weights: Location | None) -> None:
    """Store a run's config. For an evaluation, include the checkpoint (`weights`) so the evaluation can be rerun."""
    if weights is not None:
        line = f"checkpoint: {json.dumps(str(to_absolute(weights)), ensure_ascii=False)}"
        # a function, because re.sub interprets backslashes in a string; a JSON string is also a YAML string
        text = re.sub(r"(?m)^checkpoint: .*$", lambda _: line, text, count=1)
    run_record.store_config(directory, text, explicit)


def newest_in(directory: Path, check: Check = verify, folders: Sequence[Location] = ()) -> Location | None:
    """Return the run's newest checkpoint that passes `check`, in the run directory or in other `folders`.

    Checkpoints in `folders` are always verified, regardless of `check`.
    """
    identity = identity_of(directory)

    def is_of_run(path: Location) -> bool:
        # a callback's `dirpath` may contain checkpoints of several runs
        return load_manifest(path).run == identity and check(path) is not False and bool(verify(path))

    newest = [newest_complete(checkpoints_of(directory), check)]
    newest += [newest_complete(folder, is_of_run) for folder in folders if identity]
    return max((path for path in newest if path is not None), key=checkpoint_step, default=None)


def folder_to_read(directory: Path | None, newest: Location | None) -> Location | None:
    """Return the folder of a run's newest checkpoint, so that a reader can fall back to an older checkpoint.

    If the checkpoint is outside the run directory, return the checkpoint itself, because its folder may contain
    checkpoints from other runs.
    """
    is_inside = newest is not None and directory is not None and location_of(directory) in newest.parents
    return newest if newest is None or (is_same_run(directory, newest) and not is_inside) else newest.parent


def is_same_run(directory: Path | None, checkpoint: Location | None) -> bool:
    """Return whether a checkpoint was written by the run in a run directory, even if it is stored in another folder."""
    if directory is None or checkpoint is None:
        return False
    if location_of(directory.resolve()) in checkpoint.resolve().parents:
        return True
    identity = identity_of(directory)
    return bool(identity) and is_checkpoint_of(identity, checkpoint)


def run_of(checkpoint: Location, root: Location, name: str) -> Path | None:
    """Return the directory of the run that wrote a checkpoint; None if the directory is not found.

    Searches the folders that contain the checkpoint, up to `root`, and the run directories called `name`.
    """
    root = root.resolve()
    folders = [folder for folder in checkpoint.resolve().parents if root in folder.parents]
    parents = [remote.refresh(local_folder(folder)) if isinstance(folder, Address) else folder for folder in folders]
    runs = filter(identity_of, (*parents, *versions(root, name)[::-1]))
    return next((run for run in runs if is_same_run(run, checkpoint)), None)


def newest_to_resume(root: Location, name: str) -> Path | None:
    """Return the newest run directory with the given name whose run has a checkpoint.

    The checkpoint may also be in the `dirpath` of a callback. It is not verified here, because callers need the run's
    config first. `StoredRun.to_resume` verifies it.
    """
    candidates = map(remote.refresh, reversed(versions_to_resume(root, name)))
    return next((path for path in candidates if checkpoints_in(checkpoints_of(path)) or _saves_elsewhere(path)), None)


def _saves_elsewhere(directory: Path) -> bool:
    # read from the config, because the task and its callbacks are not built yet
    values = run_file.read(directory).get("config") or {}
    folders = [
        to_location(value) for key, value in values.items() if key.endswith(".dirpath") and isinstance(value, str)
    ]
    return any(is_checkpoint_of(identity_of(directory), path) for folder in folders for path in checkpoints_in(folder))


FRESH = "Set checkpoint=none to use new weights."


@dataclass(frozen=True)
class StoredRun:
    """The run in `directory`, or the newest run with that name that has a complete checkpoint.

    A single process chooses the run for all ranks: rank 0, or the process that starts the workers.
    """

    root: Location
    name: str
    directory: Path | None
    word: str
    """"best", "last", "auto" (resume the run), or "": the best checkpoint or, if there is none, the last."""
    by_name: bool = False
    """True if `directory` was found by name and must still be the newest run with this name."""

    # --- resuming ---------------------------------------------------------------------------------------------------
    def directories(self) -> Iterator[Path]:
        """Return the run directories that can be resumed, newest first."""
        by_name = self.by_name or self.directory is None
        runs = versions_to_resume(self.root, self.name)[::-1] if by_name else [Path(str(self.directory))]
        return map(remote.refresh, runs)

    def to_resume(
        self, hold: Callable[[Path], None], release: Callable[[Path], None], check: Check, folders: Sequence[Location]
    ) -> tuple[Path | None, Location | None]:
        """Lock the run directory to resume. Return the directory and the checkpoint to resume from, or None for both.

        `hold` and `release` lock and unlock a run directory. The run may also have saved checkpoints in `folders`.
        Raises ConfigError if a run is still writing to the directory, or to a newer directory with the same name
        that has no checkpoint yet.
        """
        directory = checkpoint = None
        for candidate in self.directories():
            require_readable(candidate)
            elsewhere = bool(folders) and bool(identity_of(candidate))
            saved = checkpoints_of(candidate)
            # in a store, only the lock shows whether the run is about to save
            may_have_saved = isinstance(saved, Address) or any(saved.glob("*")) or belongs_to_training(candidate)
            if may_have_saved or elsewhere:
                # lock before reading: a run that is about to end may write a newer checkpoint or remove the newest one
                hold(candidate)
                checkpoint = newest_in(candidate, check, folders)
                if checkpoint is not None:
                    directory = candidate
                    break
                release(candidate)
        if self.by_name and (directory is None or not directory.samefile(str(self.directory))):
            newest = f"that run is {directory}" if directory is not None else "there is no such run"
            raise ConfigError(
                f"resume=auto used the config of {self.directory}, expecting it to be the newest run of "
                f"{self.name!r} with a complete checkpoint, but {newest}. Specify the run to resume (legato fit "
                f"RUN/{CONFIG} resume=auto), or omit resume=auto to start a new run."
            )
        if directory is None:
            log.info("resume=auto: there is no complete checkpoint in %s, so a new run starts.", self._place)
        return directory, checkpoint

    # --- evaluating -------------------------------------------------------------------------------------------------
    def weights(self, folders: Sequence[Location]) -> Location:
        """Return the checkpoint to evaluate, and log it. The run may also have saved checkpoints in `folders`.

        Damaged checkpoints are skipped with a warning. Raises CheckpointError if there is no complete checkpoint.
        """
        newest = self._newest(folders)
        if newest is None:
            raise CheckpointError(
                f"There is no complete checkpoint in {self._place}. Train first, or specify a checkpoint. {FRESH}"
            )
        choice, checkpoint = ("last", newest) if self.word == "last" else self._best(newest)
        is_by_name = self.directory is None and newest.parent.parent.parent == self.root / self.name
        origin = f" of the newest run of {self.name!r} that has one" if is_by_name else ""
        log.info("checkpoint: the %s%s, %s. %s", choice, origin, checkpoint, FRESH)
        return checkpoint

    @property
    def _place(self) -> Location:
        return location_of(self.directory) if self.directory is not None else self.root / self.name

    def _newest(self, folders: Sequence[Location]) -> Location | None:
        """Return the newest complete checkpoint from the first folder that has one, or else from the run directory."""
        # a callback with a `dirpath` saves nothing in the run directory
        for folder in folders:
            if (newest := newest_complete(folder)) is not None:
                return newest
        runs = versions(self.root, self.name)[::-1] if self.directory is None else [self.directory]
        return next((newest for run in map(remote.refresh, runs) if (newest := newest_in(run)) is not None), None)

    def _best(self, newest: Location) -> tuple[str, Location]:
        """Return the best complete checkpoint in the folder of `newest`, which has already been verified."""
        candidates = best_checkpoints(newest.parent, load_manifest(newest).run)
        best = first_complete(candidates, lambda path: path == newest or verify(path))
        if best is not None:
            return "best" if best == candidates[0] else "best complete", best
        if self.word == "best" and not candidates:
            raise CheckpointError(
                f"There is no best checkpoint in {newest.parent}: {INDEX} contains no values for a monitored metric. "
                f"Set checkpoint=last or checkpoint=PATH."
            )
        return "last", newest
