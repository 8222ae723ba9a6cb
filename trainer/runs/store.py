"""Checkpoint directories: complete or absent, without pickle; search for them in run directories.

    step-00001200/
    |-- model.safetensors      contents["state_dict"], under the task's own parameter names
    |-- tensors.safetensors    every other tensor
    |-- model-00002.safetensors, tensors-00002.safetensors
    |                          rank 2's shards of sharded tensors (shards.py)
    |-- state.json             everything else, with marks in place of tensors (format.py)
    `-- manifest.json          sizes and SHA-256 sums of the files; written last: the commit mark

Atomic writes are in commit.py, background saves in background.py, files of other programs in
foreign.py.
"""

import copy
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...base.errors import CheckpointError, ConfigError
from ...base.run_names import CHECKPOINTS as CHECKPOINTS
from ...base.run_names import CONFIG, IDENTITY, VERSION, name_problem, require_local
from ...base.run_names import identity_of as identity_of
from ..checkpoints import commit, manifest
from ..checkpoints.commit import NO_OWNER, STEP_NAME, Owner
from ..checkpoints.foreign import read_contents
from ..checkpoints.format import MODEL, OTHERS, FileSum, file_sum, flatten, read_verified, unflatten
from ..checkpoints.shards import SHARD_FILE, ShardFiles, load_stored
from ..processes.collectives import SINGLE, Collectives
from ..processes.environment import requeued_job
from . import record as run_record
from .lock import belongs_to_training
from .record import jobs_of

if TYPE_CHECKING:
    from ..resume.saver import Saver

log = logging.getLogger("legato")

FOLDER = "checkpoints"
"""Folder of the checkpoints in a run directory."""
Check = Callable[[Path], object]
"""Raises CheckpointError for an incomplete checkpoint: `verify`, or `check_sizes` if it is read afterwards. May return
False for one that was found damaged before."""


def directory_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def write(
    directory: Path,
    contents: Mapping[str, Any],
    *,
    extra_files: commit.ExtraFiles | None = None,
    ranks: Collectives = SINGLE,
    owner: Owner = NO_OWNER,
) -> None:
    """Write a checkpoint, replacing an existing one of this name atomically.

    Every one of `ranks` calls this, with the same contents: of a DTensor each writes its shard, and rank 0 the rest.
    `extra_files` maps further file names to functions that write the file at a given path. Raises CheckpointError if a
    value cannot be stored, the disk is too full or writing fails; nothing is left behind then.
    """
    require_local(directory, "The checkpoint to write")
    flat = flatten(contents)
    flat.assign_writers(ranks)
    commit.commit(Path(os.path.abspath(directory)), flat, extra_files, ranks, owner)


def read_checkpoint(directory: Path, in_parts: Collection[str] = ()) -> dict[str, Any]:
    """Verify a checkpoint and return its contents, tensors on the host.

    Under the keys `in_parts` a sharded tensor is a `StoredTensor`, read when sliced. Raises CheckpointError with the
    file and the problem.
    """
    files = check_sizes(directory)
    parts = [name for name in files if SHARD_FILE.fullmatch(name)]
    return read_rest(directory, files, read_parts(directory, {name: files[name] for name in parts}, parts), in_parts)


def read_parts(directory: Path, files: Mapping[str, FileSum], keep: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Verify files with shards, each read once; return the tensors of those to `keep`."""
    held = {}
    for name, expected in files.items():
        if name in keep:
            held[name] = read_verified(directory / name, expected)
        else:
            _verify(directory, name, expected)
    return held


def read_rest(
    directory: Path,
    files: Mapping[str, FileSum],
    held: dict[str, dict[str, Tensor]],
    in_parts: Collection[str] = (),
) -> dict[str, Any]:
    """Verify and read the files that one process reads for all; see `read_checkpoint`.

    `held`: tensors of files that are in memory.
    """
    names = {MODEL: manifest.MODEL_FILE, OTHERS: manifest.TENSORS_FILE}
    for name, expected in files.items():
        if name not in (*names.values(), manifest.STATE_FILE) and not SHARD_FILE.fullmatch(name):
            _verify(directory, name, expected)
    tensors = {key: read_verified(directory / name, files[name]) for key, name in names.items()}
    try:
        state = (directory / manifest.STATE_FILE).read_bytes()
        if hashlib.sha256(state).hexdigest() != files[manifest.STATE_FILE].sha256:
            raise CheckpointError(f"{manifest.STATE_FILE} is damaged: its SHA-256 is not the one that was written.")
        tree = manifest.parse_json(state, manifest.STATE_FILE)
        parts = [name for name in files if SHARD_FILE.fullmatch(name)]
        found = unflatten(tree, tensors, ShardFiles(directory, held), parts)
        return {key: value if key in in_parts else load_stored(value) for key, value in found.items()}
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def read_callback(directory: Path, state_key: str) -> Any:
    """Return a callback's state in a verified checkpoint, without reading its tensors; None if there is none.

    Raises CheckpointError if the state holds a tensor, or cannot be read.
    """
    try:
        tree = manifest.parse_json((directory / manifest.STATE_FILE).read_bytes(), manifest.STATE_FILE)
        found = tree.get("callbacks", {}).get(state_key)
        return unflatten({"state": found}, {})["state"]
    except (CheckpointError, OSError, AttributeError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def read_any(path: Path) -> dict[str, Any]:
    """Read the checkpoint that `resolve` finds at a path, or a foreign file there; see `foreign.read_contents`."""
    return read_contents(path, ()) if path.is_file() else read_checkpoint(resolve(path))


def verify(directory: Path) -> None:
    """Check every file against the manifest; raises CheckpointError with the file and the problem."""
    for name, expected in check_sizes(directory).items():
        _verify(directory, name, expected)


def check_sizes(directory: Path) -> dict[str, FileSum]:
    """Return the manifest's entries, after a check of the files' sizes; raises what `verify` raises."""
    if not directory.is_dir():
        raise CheckpointError(f"There is no checkpoint at {directory}: it is not a directory.")
    files = manifest.load_manifest(directory).files
    for name, expected in files.items():
        size = manifest.regular_size(directory, name)
        if size != expected.size:
            raise CheckpointError(f"{directory}: {name} has {size:,} bytes, {expected.size:,} were written.")
    return files


def _verify(directory: Path, name: str, expected: FileSum) -> None:
    try:
        damaged = file_sum(directory / name) != expected
    except OSError as error:
        raise CheckpointError(f"{directory}: {name} cannot be read: {error.strerror}.") from error
    if damaged:
        raise CheckpointError(f"{directory}: {name} is damaged: its SHA-256 is not the one that was written.")


def checkpoints_in(root: Path) -> list[Path]:
    """Return the committed checkpoints of a folder (those with a manifest), oldest step first."""
    return [path for path in _steps(root) if path.name[0] != "." and (path / manifest.MANIFEST).is_file()]


def newest_complete(root: Path, check: Check = verify) -> Path | None:
    """Return the newest checkpoint of a folder that passes `check`; warn of every newer one and its problem.

    If a process died while it replaced a checkpoint, that may be the old one under its temporary name, until the next
    `sweep` or save restores it.
    """
    for path in reversed(_steps(root)):
        try:
            if check(path) is False:
                continue
        except CheckpointError as error:
            log.warning("The checkpoint %s is passed over, it is not whole. %s", path.name, error)
        else:
            return path
    return None


def _steps(root: Path) -> list[Path]:
    """Return checkpoints, and those that a dying process was replacing, oldest step first."""
    if not root.is_dir():
        return []
    found: dict[str, Path] = {}
    for path in sorted(root.iterdir()):  # ".step-..." sorts first and yields to "step-..."
        name = path.name.removeprefix(".").removesuffix(f".{commit.REPLACED}")
        if path.name not in (name, commit.temporary_path(root / name, commit.REPLACED).name) or path.is_symlink():
            continue
        files = path / manifest.MANIFEST, path / manifest.STATE_FILE
        if path.is_dir() and (STEP_NAME.fullmatch(name) or all(file.is_file() for file in files)):
            found[name] = path
    return sorted(found.values(), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's name, its temporary one too; under any other name its own, -1 if unreadable."""
    name = path.name.strip(".").split(".")[0]
    if STEP_NAME.fullmatch(name):
        return int(name.removeprefix("step-"))
    try:
        found = manifest.parse_json((path / manifest.STATE_FILE).read_bytes(), manifest.STATE_FILE)["global_step"]
    except (CheckpointError, OSError, KeyError, TypeError):
        return -1
    return found if isinstance(found, int) else -1


def resolve(path: Path, check: Check = verify) -> Path:
    """Return the checkpoint at a path: itself, or the newest of a folder or run directory that passes `check`.

    Raises CheckpointError with the paths that were tried.
    """
    require_local(path, "The checkpoint")
    # "." has no name, and so no place beside it
    path = path if path.name else path.absolute()
    # the second: a process died while it replaced the checkpoint
    for itself in (path, commit.temporary_path(path, commit.REPLACED)):
        if (itself / manifest.MANIFEST).is_file():
            return itself
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a Legato checkpoint is a directory with a {manifest.MANIFEST}. Files of other "
            f"programs are read by fit(ckpt_path=...), load_from_checkpoint, validate, test and predict."
        )
    for folder in (path / FOLDER, path):
        if (found := newest_complete(folder, check)) is not None:
            return found
    raise CheckpointError(
        f"There is no complete checkpoint at {path}: expected a directory with a {manifest.MANIFEST}, or one with "
        f"{directory_name(1200)}-like directories, itself or in {FOLDER}/."
    )


def versions(root: Path, name: str) -> list[Path]:
    """Return the run directories of a name, oldest first."""
    folder = root / name
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if VERSION.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))


def versions_to_resume(root: Path, name: str) -> list[Path]:
    """Return the run directories that resume=auto considers, oldest first.

    In a SLURM job that was queued again these are its own: other jobs may have begun runs of that name meanwhile.
    """
    found, job = versions(root, name), requeued_job()
    return [path for path in found if job is not None and job in jobs_of(path)] or found


def create(root: Path, name: str) -> Path:
    """Make a new run directory and return it. Raises ConfigError if it is not writable."""
    fault = name_problem(name)
    if fault is not None:
        raise ConfigError(f"run.name {fault}")
    _require_text(root)
    number = 1 + max((int(path.name.removeprefix("version_")) for path in versions(root, name)), default=-1)
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


def _require_text(root: Path) -> None:
    """Raise ConfigError for a folder whose name is no text in this locale: TensorBoard and JSON could not name it."""
    try:
        str(root.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"The folder of runs {str(root.absolute())!a} has a name that is not UTF-8, or not in this locale. Set "
            f"PYTHONUTF8=1 or a locale of UTF-8, or run.root to another folder."
        ) from None


def write_config(directory: Path, text: str, given: str | None, weights: Path | None) -> None:
    """Store the config of a run; that of an evaluation includes the weights, so that it can be repeated."""
    if weights is not None:
        line = f"checkpoint: {json.dumps(os.path.abspath(weights), ensure_ascii=False)}"
        # a function, since a backslash in a text would be an escape; a string of JSON is one of YAML
        text = re.sub(r"(?m)^checkpoint: .*$", lambda _: line, text, count=1)
    run_record.store_config(directory, text, given)


def write_identity(directory: Path, identity: str) -> None:
    """Write a run's identity to its directory: its checkpoints may be elsewhere."""
    (directory / IDENTITY).write_text(identity, encoding="ascii")


def newest_in(directory: Path, check: Check = verify, folders: Sequence[Path] = ()) -> Path | None:
    """Return the newest checkpoint of a run directory that passes `check`, or of the same run in other `folders`.

    One in those is verified here, whatever `check` does.
    """
    identity = identity_of(directory)

    def is_own(path: Path) -> bool:
        # a folder of a callback's own may hold checkpoints of several runs
        if manifest.load_manifest(path).run != identity or check(path) is False:
            return False
        verify(path)
        return True

    inside = directory / CHECKPOINTS
    found = [newest_complete(inside, check)] if inside.is_dir() else []
    found += [newest_complete(folder, is_own) for folder in folders if identity]
    return max((path for path in found if path is not None), key=checkpoint_step, default=None)


def newest_checkpoint(root: Path, name: str) -> tuple[Path, Path] | None:
    """Return the newest run directory of a name with a complete checkpoint, and that checkpoint."""
    for directory in reversed(versions(root, name)):
        found = newest_in(directory)
        if found is not None:
            return directory, found
    return None


def newest_locked(
    root: Path, name: str, saver: "Saver", check: Check, folders: Sequence[Path]
) -> tuple[Path, Path] | None:
    """Return what `newest_checkpoint` does, after the directory was locked; `folders`: where else it may have saved.

    Raises ConfigError if another run of this name writes to it, or to a newer one without a checkpoint yet.
    """
    for directory in reversed(versions_to_resume(root, name)):
        elsewhere = bool(folders) and bool(identity_of(directory))
        if any((directory / CHECKPOINTS).glob("*")) or belongs_to_training(directory) or elsewhere:
            # before it is read: a run that is just ending may still write a newer checkpoint, or remove this one
            saver.hold(directory, "fit")
            found = newest_in(directory, check, folders)
            if found is not None:
                return directory, found
            saver.release(directory)
    return None


def find(
    root: Path,
    name: str,
    resume: str | Path | None,
    saver: "Saver",
    check: Check,
    folders: Sequence[Path],
) -> tuple[Path | None, Path | None]:
    """Return the directory and the checkpoint for `resume`; None for a new directory, or for no checkpoint.

    "auto" continues in the newest run directory of this name with a complete checkpoint, there or in `folders`, if any.
    From a path (a checkpoint, a folder of some, or a file of Lightning's) a new run directory starts. Raises
    CheckpointError if it has none.
    """
    if resume is None:
        return None, None
    if resume == "auto":
        found = newest_locked(root, name, saver, check, folders)
        if found is None:
            log.info("resume=auto: there is no complete checkpoint in %s, so a new run begins.", root / name)
        return found if found is not None else (None, None)
    path = Path(resume)
    require_local(path, "The checkpoint to resume from")
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}. Expected a path, 'auto', 'last', 'best' or nothing.")
    return None, path if path.is_file() else resolve(path, check)


FRESH = "checkpoint=none takes fresh weights."


@dataclass(frozen=True)
class StoredRun:
    """Run in `directory`, or the newest of a name with a complete checkpoint.

    Resolved by the process that decides for all: rank 0, or the one that starts the workers.
    """

    root: Path
    name: str
    directory: Path | None
    word: str
    """"best", "last", "auto" (resume the run), or "": the best, or the last if there is no best."""
    by_name: bool = False
    """Whether `directory` was found by the name; then it must still be the newest run of that name."""

    def weights(self, callbacks: Sequence[Any]) -> Path:
        """Return the checkpoint to evaluate, and log which it is; `callbacks` are the run's Checkpoint callbacks.

        Skips a damaged one with a warning. Raises CheckpointError if there is none.
        """
        for callback, newest in self._newest(callbacks):
            which, found = ("last", newest) if self.word == "last" else self._best(newest, callback)
            named = self.directory is None and newest.parent.parent.parent == self.root / self.name
            of = f" of the newest run of {self.name!r} that has one" if named else ""
            log.info("checkpoint: the %s%s, %s. %s", which, of, found, FRESH)
            return found
        place = self.directory if self.directory is not None else self.root / self.name
        raise CheckpointError(f"There is no complete checkpoint in {place}. Train first, or name a checkpoint; {FRESH}")

    def require(self, found: Path | None) -> None:
        """Raise ConfigError if the newest run of the name with a complete checkpoint is not the one in `directory`."""
        if self.directory is not None and (found is None or not found.samefile(self.directory)):
            instead = f"that is {found}" if found is not None else "there is none"
            raise ConfigError(
                f"resume=auto has taken the config of {self.directory} for the newest run of {self.name!r} with a "
                f"complete checkpoint, but {instead}. Name the run to go on with, legato fit RUN/{CONFIG} resume=auto, "
                f"or leave resume=auto out to begin a new one."
            )

    def to_resume(self, check: Check, folders: Sequence[Path]) -> tuple[Path | None, Path | None]:
        """Return the run directory and the checkpoint to resume from; None for both if there is no checkpoint."""
        assert self.directory is not None
        found = newest_in(self.directory, check, folders)
        if found is None:
            log.info("resume=auto: there is no complete checkpoint in %s, so a new run begins.", self.directory)
            return None, None
        return self.directory, found

    def _newest(self, callbacks: Sequence[Any]) -> Iterator[tuple[Any, Path]]:
        """Yield the newest complete checkpoint of each folder where the run may save, with its callback."""
        for callback in callbacks:
            if callback.dirpath is not None:
                found = newest_complete(Path(callback.dirpath))
                if found is not None:
                    yield callback, found
        inside = next((callback for callback in callbacks if callback.dirpath is None), None)
        if self.directory is not None:
            found = newest_in(self.directory)
        else:
            found = (newest_checkpoint(self.root, self.name) or (None, None))[1]
        if found is not None:
            yield inside, found

    def _best(self, newest: Path, callback: Any) -> tuple[str, Path]:
        """Return the best complete checkpoint, by the values that the newest one has; else the newest."""
        state = None if callback is None else read_callback(newest, callback.state_key)
        if state is None:
            if self.word == "best":
                raise CheckpointError(
                    f"{newest} does not say which checkpoint is the best. Set checkpoint=last or to a path."
                )
            return "last", newest
        # the callback itself knows which is best, but must not take over the state of another run
        ranking = copy.copy(callback)
        ranking.load_state_dict(state)
        ranking.dirpath = newest.parent
        present = {path.name for path in checkpoints_in(newest.parent)}
        ranking.scores = {name: score for name, score in ranking.scores.items() if name in present}
        passed_over = False
        while ranking.best_model_path:
            best = Path(ranking.best_model_path)
            try:
                # the newest was verified when it was found
                if best != newest:
                    verify(best)
            except CheckpointError as error:
                log.warning("The best checkpoint is passed over, it is not whole. %s", error)
                del ranking.scores[best.name]
                passed_over = True
            else:
                return ("best that is whole" if passed_over else "best"), best
        if self.word == "best" and not passed_over:
            raise CheckpointError(
                f"No checkpoint in {newest.parent} has a value of {callback.monitor!r}. Set checkpoint=last or a path."
            )
        return "last", newest
