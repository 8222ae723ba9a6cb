"""Which run directory a call works in, and which checkpoint it begins from."""

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
    """Return the run directories of a name, oldest first; in a store, the folders that stand for them here."""
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

    In a SLURM job that was queued again these are its own: other jobs may have begun runs of that name meanwhile.
    """
    directories, job = versions(root, name), requeued_job()
    return [path for path in directories if job is not None and job in jobs_of(remote.refresh(path))] or directories


def create(root: Location, name: str, identity: str, stage: str) -> Path:
    """Make the directory of a new run and return it. Raises ConfigError if it is not writable."""
    if isinstance(root, Address):
        number, record = _next_number(root, name), json.dumps(run_file.new_run(identity, stage)).encode()
        while (made := remote.make(root / name / f"version_{number}", record)) is None:
            number += 1  # another run took it a moment ago
        return made
    directory = make_folder(root, name)
    run_file.create(directory, identity, stage)
    return directory


def make_folder(root: Path, name: str) -> Path:
    """Make the next folder version_N of a name and return it. Raises ConfigError if it is not writable."""
    _require_text(root)
    number = _next_number(root, name)
    while True:
        path = root / name / f"version_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} is in the way: expected a folder or nothing; move it, or set run.root."
                ) from None
            number += 1  # another run took it a moment ago
            continue
        except OSError as error:
            raise ConfigError(
                f"The run directory {path} cannot be made: {error.strerror}. Set run.root elsewhere."
            ) from error
        if not os.access(path, os.W_OK):
            raise ConfigError(f"The run directory {path} cannot be written to. Set run.root elsewhere.")
        return path


def _next_number(root: Location, name: str) -> int:
    fault = name_problem(name)
    if fault is not None:
        raise ConfigError(f"run.name {fault}")
    # after the newest: the gap of a run that was deleted would put a new run among the old ones
    return 1 + max((int(path.name.removeprefix("version_")) for path in versions(root, name)), default=-1)


def _require_text(root: Path) -> None:
    """Raise ConfigError for a folder whose name is no text in this locale: TensorBoard and JSON could not name it."""
    try:
        str(root.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"The folder of runs {str(root.absolute())!a} has a name that is not UTF-8, or not in this locale. Set "
            f"PYTHONUTF8=1 or a locale of UTF-8, or run.root to another folder."
        ) from None


def write_config(directory: Path, text: str, given: str | None, weights: Location | None) -> None:
    """Store the config of a run; that of an evaluation includes the weights, so that it can be repeated."""
    if weights is not None:
        line = f"checkpoint: {json.dumps(str(to_absolute(weights)), ensure_ascii=False)}"
        # a function, since a backslash in a text would be an escape; a string of JSON is one of YAML
        text = re.sub(r"(?m)^checkpoint: .*$", lambda _: line, text, count=1)
    run_record.store_config(directory, text, given)


def newest_in(directory: Path, check: Check = verify, folders: Sequence[Location] = ()) -> Location | None:
    """Return the newest checkpoint of a run directory that passes `check`, or of the same run in other `folders`.

    One in those is verified here, whatever `check` does.
    """
    identity = identity_of(directory)

    # one checkpoint for the whole run: the later of both counts
    def is_own(path: Location) -> bool:
        # a folder of a callback's own may hold checkpoints of several runs
        return load_manifest(path).run == identity and check(path) is not False and bool(verify(path))

    newest = [newest_complete(checkpoints_of(directory), check)]
    newest += [newest_complete(folder, is_own) for folder in folders if identity]
    return max((path for path in newest if path is not None), key=checkpoint_step, default=None)


def folder_to_read(directory: Path | None, newest: Location | None) -> Location | None:
    """Return the folder of a run's newest checkpoint, in which a reader falls back to an older one.

    Of one outside of the run directory the checkpoint itself: its folder may have other runs' checkpoints.
    """
    is_inside = newest is not None and directory is not None and location_of(directory) in newest.parents
    return newest if newest is None or (is_same_run(directory, newest) and not is_inside) else newest.parent


def is_same_run(directory: Path | None, checkpoint: Location | None) -> bool:
    """Return whether a checkpoint is of the run in a run directory, in whatever folder it is."""
    if directory is None or checkpoint is None:
        return False
    if location_of(directory.resolve()) in checkpoint.resolve().parents:
        return True
    identity = identity_of(directory)
    return bool(identity) and is_checkpoint_of(identity, checkpoint)


def run_of(checkpoint: Location, root: Location, name: str) -> Path | None:
    """Return the run directory below `root` of the run that wrote a checkpoint; elsewhere only one of this name."""
    root = root.resolve()
    folders = [folder for folder in checkpoint.resolve().parents if root in folder.parents]
    above = [remote.refresh(local_folder(where)) if isinstance(where, Address) else where for where in folders]
    runs = filter(identity_of, (*above, *versions(root, name)[::-1]))
    return next((run for run in runs if is_same_run(run, checkpoint)), None)


def newest_to_resume(root: Location, name: str) -> Path | None:
    """Return the newest run directory of a name with a checkpoint, there or in the `dirpath` of a callback.

    Only looks, for those who need the run's config first; `StoredRun.to_resume` verifies.
    """
    candidates = map(remote.refresh, reversed(versions_to_resume(root, name)))
    return next((path for path in candidates if checkpoints_in(checkpoints_of(path)) or _saves_elsewhere(path)), None)


def _saves_elsewhere(directory: Path) -> bool:
    # the config is all that is known before the task, and with it its callbacks, can be built
    values = run_file.read(directory).get("config") or {}
    folders = [
        to_location(value) for key, value in values.items() if key.endswith(".dirpath") and isinstance(value, str)
    ]
    return any(is_checkpoint_of(identity_of(directory), path) for folder in folders for path in checkpoints_in(folder))


FRESH = "checkpoint=none takes fresh weights."


@dataclass(frozen=True)
class StoredRun:
    """Run in `directory`, or the newest of a name with a complete checkpoint.

    Resolved by the process that decides for all: rank 0, or the one that starts the workers.
    """

    root: Location
    name: str
    directory: Path | None
    word: str
    """"best", "last", "auto" (resume the run), or "": the best, or the last if there is no best."""
    by_name: bool = False
    """Whether `directory` was found by the name; then it must still be the newest run of that name."""

    # --- to resume it -----------------------------------------------------------------------------------------------
    def directories(self) -> Iterator[Path]:
        """Return the run directories from which it may go on, newest first."""
        by_name = self.by_name or self.directory is None
        runs = versions_to_resume(self.root, self.name)[::-1] if by_name else [Path(str(self.directory))]
        return map(remote.refresh, runs)

    def to_resume(
        self, hold: Callable[[Path], None], release: Callable[[Path], None], check: Check, folders: Sequence[Location]
    ) -> tuple[Path | None, Location | None]:
        """Lock the run directory to go on in; return it and the checkpoint to resume from, or None for both.

        `hold` and `release` a run directory; `folders`: where else the run may have saved. Raises ConfigError if
        another run writes there, or to a newer directory of this name without a checkpoint yet.
        """
        directory = checkpoint = None
        for candidate in self.directories():
            require_readable(candidate)
            elsewhere = bool(folders) and bool(identity_of(candidate))
            saved = checkpoints_of(candidate)
            # of one in a store its lock tells whether it is about to save
            begun = isinstance(saved, Address) or any(saved.glob("*")) or belongs_to_training(candidate)
            if begun or elsewhere:
                # before it is read: a run that is just ending may still write a newer checkpoint, or remove this one
                hold(candidate)
                checkpoint = newest_in(candidate, check, folders)
                if checkpoint is not None:
                    directory = candidate
                    break
                release(candidate)
        if self.by_name and (directory is None or not directory.samefile(str(self.directory))):
            instead = f"that is {directory}" if directory is not None else "there is none"
            raise ConfigError(
                f"resume=auto has taken the config of {self.directory} for the newest run of {self.name!r} with a "
                f"complete checkpoint, but {instead}. Name the run to go on with, legato fit RUN/{CONFIG} resume=auto, "
                f"or leave resume=auto out to begin a new one."
            )
        if directory is None:
            log.info("resume=auto: there is no complete checkpoint in %s, so a new run begins.", self._place)
        return directory, checkpoint

    # --- to evaluate it ---------------------------------------------------------------------------------------------
    def weights(self, folders: Sequence[Location]) -> Location:
        """Return the checkpoint to evaluate, and log which it is; `folders`: where else the run may have saved.

        Skips a damaged one with a warning. Raises CheckpointError if there is none.
        """
        newest = self._newest(folders)
        if newest is None:
            raise CheckpointError(
                f"There is no complete checkpoint in {self._place}. Train first, or name a checkpoint; {FRESH}"
            )
        which, checkpoint = ("last", newest) if self.word == "last" else self._best(newest)
        named = self.directory is None and newest.parent.parent.parent == self.root / self.name
        of = f" of the newest run of {self.name!r} that has one" if named else ""
        log.info("checkpoint: the %s%s, %s. %s", which, of, checkpoint, FRESH)
        return checkpoint

    @property
    def _place(self) -> Location:
        return location_of(self.directory) if self.directory is not None else self.root / self.name

    def _newest(self, folders: Sequence[Location]) -> Location | None:
        """Return the newest complete checkpoint of the first of the folders that has one, or of the run directory."""
        # a callback with a `dirpath` of its own has nothing in the run directory
        for folder in folders:
            if (newest := newest_complete(folder)) is not None:
                return newest
        runs = versions(self.root, self.name)[::-1] if self.directory is None else [self.directory]
        return next((newest for run in map(remote.refresh, runs) if (newest := newest_in(run)) is not None), None)

    def _best(self, newest: Location) -> tuple[str, Location]:
        """Return the best complete checkpoint beside the newest one, which was verified; else the newest."""
        candidates = best_checkpoints(newest.parent, load_manifest(newest).run)
        best = first_complete(candidates, lambda path: path == newest or verify(path))
        if best is not None:
            return "best" if best == candidates[0] else "best that is whole", best
        if self.word == "best" and not candidates:
            raise CheckpointError(
                f"{newest.parent} does not say which checkpoint is the best: no value of a monitored metric is in its "
                f"{INDEX}. Set checkpoint=last or to a path."
            )
        return "last", newest
