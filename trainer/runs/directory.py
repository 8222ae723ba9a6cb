"""RunDirectory: the state, config, checkpoints and metrics of a run. Also finds the run directories under a folder.

This module never writes to run directories and does not import torch. The commands that show runs use it, and Python
programs can use it as `legato.runs`.
"""

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, did_you_mean
from ...base.location import Address, Location, checkpoints_of, location_of, to_location
from ...base.run_names import (
    CHECKPOINTS,
    CONFIG,
    EVALUATIONS,
    EVENT_FILES,
    MANIFEST,
    REPLAY,
    RUN_FILE,
    regular_file_size,
)
from ...loggers.json_lines import POINTS_FILE, parse_point
from ..checkpoints import find
from . import remote
from .lock import holder_of, is_held
from .record import EPOCHS, STARTS
from .run_file import FAILED, RUNNING, STARTING, identity_of, read, require_readable

ROOT = "runs"
"""Default folder for runs, as in `run.root`."""
AT_START = {
    *(CONFIG, RUN_FILE, POINTS_FILE, CHECKPOINTS, STARTS, EPOCHS, "config_given.yaml", "environment.json"),
    *("metrics.csv", "hparams.yaml"),
}
"""Files that a run without results may leave behind, in addition to files whose names start with a dot."""
KILLED = "The run ended without an error message: it was killed, ran out of memory, or its machine went down."
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl that are searched for its last line


@dataclass(frozen=True)
class CheckpointEntry:
    """Checkpoint of a run."""

    path: Location
    step: int
    """Step of the checkpoint; -1 if unknown."""
    size: int
    """Size in bytes."""
    complete: bool


@dataclass(frozen=True)
class BestValue:
    """Best value of the metric that a run monitors."""

    metric: str
    mode: str
    value: float


class RunDirectory:
    """The contents of a run directory. Each property reads its files on first use.

    If a file is missing or damaged, no error is raised, and the values from that file are None or empty.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        """The run's folder. For a run in an object store, a local folder with copies of the run's files, which is
        deleted at exit."""
        self.location = location_of(path)
        """Path or address of the run."""
        self.name = path.name if root is None or path == root else os.path.relpath(path, root)
        """Path relative to the folder that was searched."""

    # --- state ------------------------------------------------------------------------------------------------------
    @cached_property
    def status(self) -> dict[str, Any]:
        """Contents of `run.json`; see `run_file.py`."""
        return read(self.path)

    @cached_property
    def state(self) -> str:
        """ "running", "done", "failed" or "preempted"; "unknown" for a folder that is not a run directory."""
        state = str(self.status.get("state", "unknown"))
        if state not in (STARTING, RUNNING):
            return state
        # That state was written at the start. A killed process could not update it, but no longer holds the lock.
        is_running = is_held(self.path) and holder_of(self.path).get("stage") == self.status.get("stage")
        return RUNNING if is_running else FAILED

    @property
    def step(self) -> int:
        """Latest known step of the run. For an evaluation, the step of the checkpoint being evaluated."""
        # the status is written only at the start and at the end; in between, the log has newer values
        step = _number_in(self.status, "step") or 0
        return max(step, int(self.last_point.get("step", 0))) if "ended" not in self.status else step

    @property
    def epoch(self) -> int | None:
        """Latest epoch known to have started, counted from 1; 0 before the first epoch."""
        stored = _number_in(self.status, "epoch")
        logged = None if "ended" in self.status else _number_in(self.last_point, "epoch")
        epochs = [stored, None if logged is None else logged + 1]
        return max((int(epoch) for epoch in epochs if epoch is not None), default=None)

    @property
    def began(self) -> float:
        """Time when the run first started, in seconds since the Unix epoch."""
        return float(_number_in(self.status, "created") or self._modified)

    @property
    def seconds(self) -> float | None:
        """Total training time in seconds, across all resumes; None if unknown."""
        # the time of a killed run is counted up to its last logging point
        ended = self.status.get("ended")
        elapsed: float | None = _number_in(self.status, "elapsed")
        if ended is not None or not self.status:
            return elapsed
        now = time.time() if self.state == RUNNING else float(_number_in(self.last_point, "time") or self._modified)
        return float(elapsed or 0) + max(0.0, now - float(_number_in(self.status, "began") or now))

    @property
    def error(self) -> str:
        """Error or signal that ended the run; "" if the run did not fail and was not preempted."""
        if self.state == FAILED and self.status.get("state") in (STARTING, RUNNING):
            hang = " Its hang reports are in hang/." if (self.path / "hang").is_dir() else ""
            return KILLED + hang
        return str(self.status.get("error", ""))

    @property
    def traceback(self) -> str:
        """Traceback of the error; "" if there is none."""
        return str(self.status.get("traceback", ""))

    @property
    def is_empty(self) -> bool:
        """True if the run has no steps, checkpoints or logged values, but only the files that every launch writes."""
        if self.step or self.checkpoints or self.last_point:
            return False
        try:
            names = [path.name for path in self.path.iterdir()]
            folder = self.path / CHECKPOINTS
            if folder.is_symlink() or (folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir())):
                return False
        except OSError:
            return False
        return all(name in AT_START or name.startswith((".", EVENT_FILES)) or name.endswith(".diff") for name in names)

    @property
    def _modified(self) -> float:
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    # --- contents ---------------------------------------------------------------------------------------------------
    @cached_property
    def config(self) -> dict[str, Any]:
        """Config used to train the latest weights, with dotted keys; {} for a run started by a script."""
        values = self.status.get("config")
        return values if isinstance(values, dict) else {}

    @cached_property
    def given_keys(self) -> frozenset[str] | None:
        """Dotted keys that were set by config files or on the command line; None if unknown."""
        keys = self.status.get("set")
        return frozenset(keys) if isinstance(keys, list) else None

    @cached_property
    def checkpoints(self) -> list[CheckpointEntry]:
        """Checkpoints, oldest step first."""
        folder = checkpoints_of(self.path)
        paths: list[Location] = []
        if isinstance(folder, Address):
            paths += find.checkpoints_in(folder)
        else:
            with suppress(OSError):
                paths += [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
        return sorted(map(_checkpoint, paths), key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))

    @cached_property
    def evaluations(self) -> "list[RunDirectory]":
        """Evaluations of the run's checkpoints, oldest first, with names such as `test/version_0`."""
        folder = self.path / EVALUATIONS
        runs = [RunDirectory(path, folder) for path in folder.glob("*/version_*") if path.is_dir()]
        return sorted(runs, key=_age)

    @cached_property
    def last_point(self) -> dict[str, Any]:
        """The last logged step, with its time and values; {} if nothing was logged."""
        try:
            # only the tail: a long run's file may have hundreds of megabytes
            size = regular_file_size(self.path / POINTS_FILE)
            with (self.path / POINTS_FILE).open("rb") as file:
                file.seek(max(0, size - _TAIL))
                lines = file.read().splitlines()
        except OSError:
            return {}
        return next((point for line in reversed(lines) if (point := parse_point(line)) is not None), {})

    @cached_property
    def metrics(self) -> "dict[str, Any]":
        """Logged values as NumPy arrays, keyed by name: "step", "time" (Unix time in seconds) and each metric.

        Each array has one entry for each logged step. An entry is NaN if the metric was not logged at that step. The
        dict is empty if nothing was logged.
        """
        import numpy

        path = self.path / POINTS_FILE
        try:
            regular_file_size(path)  # raises OSError for a device or a FIFO
            points = [point for line in path.read_bytes().splitlines() if (point := parse_point(line)) is not None]
        except OSError:
            points = []
        if not points:
            return {}
        names = dict.fromkeys(name for point in points for name in point)
        arrays = {name: numpy.array([_as_float(point.get(name)) for point in points]) for name in names}
        return {"step": arrays.pop("step").astype("int64"), **arrays}

    def frame(self) -> Any:
        """Return `metrics` as a pandas DataFrame indexed by step. Raises ConfigError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("frame() needs pandas: pip install pandas. `metrics` contains the same values.") from None
        return pandas.DataFrame(self.metrics or {"step": []}).set_index("step")

    @property
    def best_checkpoint(self) -> CheckpointEntry | None:
        """The complete checkpoint with the best value; None if none is complete or the best value is unknown."""
        best = find.best_checkpoints(checkpoints_of(self.path), identity_of(self.path))
        return _checkpoint(best[0]) if best else None

    @cached_property
    def best(self) -> BestValue | None:
        """Best value of the metric used to rank checkpoints or, if there is none, of a loss; None if unknown."""
        metric, mode = self.status.get("monitor"), str(self.status.get("mode", "min"))
        value = _number_in(self.status, "best")
        if metric and value is not None and "ended" in self.status:
            return BestValue(str(metric), mode, value)
        # during the run, the value is known only at logging points
        if metric not in self.metrics:
            metric, mode = loss_among(self.metrics), "min"
        # min and max may return NaN, because comparisons with NaN are False
        values = [value for value in self.metrics.get(metric, ()) if math.isfinite(value)]
        return BestValue(str(metric), mode, float((min if mode == "min" else max)(values))) if values else None


# --- search -----------------------------------------------------------------------------------------------------------
def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory."""
    return bool(read(path))


def find_runs(root: "str | os.PathLike[str]" = ROOT) -> list[RunDirectory]:
    """Return the run directories at or under a folder or address, oldest first.

    Links to folders are not followed, and unreadable folders are skipped. Raises ConfigError if the folder is missing.
    """
    asked, root = root, _readable(root)
    if not root.is_dir():
        names = sorted(path.name for path in root.parent.glob("*/")) if root.parent.is_dir() else []
        hint = did_you_mean(root.name, names)
        raise ConfigError(f"{str(asked)!r} is not a folder.{hint} Expected a folder that contains runs.")
    return sorted((RunDirectory(path, root) for path in _walk(str(root))), key=_age)


def _age(run: RunDirectory) -> tuple[float, list[tuple[int, str]]]:
    return run.began, _natural(run.name)


def _walk(folder: str) -> Iterator[Path]:
    pending = [folder]
    while pending:
        current = pending.pop()
        try:
            entries = list(os.scandir(current))  # one system call per folder: a sweep may have a thousand runs
        except OSError:
            continue
        if any(entry.name == RUN_FILE for entry in entries) and is_run(Path(current)):
            # a run directory is not searched: it may contain many files, but no runs
            yield Path(current)
            continue
        # a replay is beside its run, but is not a run
        candidates = (entry for entry in entries if not entry.name.startswith(".") and REPLAY not in entry.name)
        pending += [entry.path for entry in candidates if entry.is_dir(follow_symlinks=False)]


def find_run(run: "str | os.PathLike[str]", root: "str | os.PathLike[str]" = ROOT) -> RunDirectory:
    """Find a run by its path, its address, the path of a file in it, or its name under `root`.

    If multiple runs have that name, return the newest. If there is no such run, raises a ConfigError that suggests
    the most similar name.
    """
    word, named, root = os.fspath(run), _readable(run), _readable(root)
    for path in (named, root / word):
        if path.is_dir():
            require_readable(path)
            base = root if root in path.parents else path
            runs = find_runs(path)
            # runs with the given name come before runs in deeper folders, such as the trials of a sweep
            runs = [run for run in runs if run.path.parent == path] or runs
            if runs:
                # a run that was passed by its own path gets the name name/version_N
                return RunDirectory(runs[-1].path, base if base != runs[-1].path else runs[-1].path.parent.parent)
    if Path(word).exists():  # a file or a checkpoint of a run
        # RUN/checkpoints/NAME/FILE is the deepest file of a run
        for folder in Path(word).absolute().parents[:3]:
            if is_run(folder):
                return RunDirectory(folder)
    runs_below = [run.name for run in find_runs(root)] if root.is_dir() else []
    names = [*runs_below, *{os.path.dirname(name) for name in runs_below}]
    hint = did_you_mean(word, names) or (f" The newest is {runs_below[-1]!r}." if runs_below else "")
    raise ConfigError(f"There is no run {word!r}, either as a path or in '{location_of(root)}'.{hint}")


def _readable(place: "str | os.PathLike[str]") -> Path:
    """Return the folder to read. For an address, this is a local folder with copies of the runs stored there."""
    where = to_location(place)
    return remote.copy_of(where) if isinstance(where, Address) else Path(where)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts version_9 before version_10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _checkpoint(path: Location) -> CheckpointEntry:
    if isinstance(path, Address):
        files = find.load_manifest(path).files.values()
        return CheckpointEntry(path, find.checkpoint_step(path), sum(file.size for file in files), complete=True)
    sizes = {file.name: file.stat().st_size for file in os.scandir(path) if file.is_file(follow_symlinks=False)}
    return CheckpointEntry(path, find.checkpoint_step(path), sum(sizes.values()), MANIFEST in sizes)


# --- reading ----------------------------------------------------------------------------------------------------------
def loss_among(metrics: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the name of a loss, preferably a validation loss; "" if no name contains "loss"."""
    losses = [name for name in metrics if "loss" in name.lower()]
    return next((name for name in losses if "val" in name.lower()), next(iter(losses), ""))


def _as_float(value: Any) -> float:
    try:
        return float(value)  # also for "NaN" and "Infinity"
    except (TypeError, ValueError):
        return math.nan


def _number_in(status: Mapping[str, Any], name: str) -> Any:
    number = status.get(name)
    # a damaged file may contain any JSON value; a bool is an int in Python
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    return number if math.isfinite(number) else None
