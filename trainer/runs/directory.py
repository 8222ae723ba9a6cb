"""RunDirectory: what a run directory tells of its run; finds those below a folder, and reads their metrics.

Only reads, and without torch: for the commands that look at runs, and for Python as `legato.runs`.
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
"""The folder of the runs where nothing else is said: the default of `run.root`."""
AT_START = {
    *(CONFIG, RUN_FILE, POINTS_FILE, CHECKPOINTS, STARTS, EPOCHS, "config_given.yaml", "environment.json"),
    *("metrics.csv", "hparams.yaml"),
}
"""Files that a run without any result may leave, besides names that begin with a dot."""
KILLED = "It ended without a word: killed, out of memory, or its machine went down."
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl in which its last line is looked for


@dataclass(frozen=True)
class CheckpointEntry:
    """Checkpoint of a run."""

    path: Location
    step: int
    """-1 if its name does not tell."""
    size: int
    """Bytes."""
    complete: bool


@dataclass(frozen=True)
class BestValue:
    """The best value of the metric that a run goes by."""

    metric: str
    mode: str
    value: float


class RunDirectory:
    """What a run directory tells of its run; each property is read when it is first asked for.

    Nothing raises for a file that is missing or damaged: what it would have told is unknown, or empty.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        """The folder; of a run in a store one with copies of its files, for as long as this process lives."""
        self.location = location_of(path)
        """Where the run is: that folder, or an address."""
        self.name = path.name if root is None or path == root else os.path.relpath(path, root)
        """Path below the folder of the search."""

    # --- its state --------------------------------------------------------------------------------------------------
    @cached_property
    def status(self) -> dict[str, Any]:
        """The contents of `run.json`; see `run_file.py`."""
        return read(self.path)

    @cached_property
    def state(self) -> str:
        """One of "running", "done", "failed" and "preempted"; "unknown" of a folder that is no run directory."""
        state = str(self.status.get("state", "unknown"))
        if state not in (STARTING, RUNNING):
            return state
        # written once, at the start: a process that was killed took nothing back, but no longer holds the lock
        held = is_held(self.path) and holder_of(self.path).get("stage") == self.status.get("stage")
        return RUNNING if held else FAILED

    @property
    def step(self) -> int:
        """The newest step that it is known to have done; of an evaluation that of its checkpoint."""
        # the status is written at the start and the end only; in between the log knows better
        ended = _number_in(self.status, "step") or 0
        return max(ended, int(self.last_point.get("step", 0))) if "ended" not in self.status else ended

    @property
    def epoch(self) -> int | None:
        """The newest epoch that is known to have begun, counted from 1; 0 before the first."""
        at_start_or_end = _number_in(self.status, "epoch")
        logged = None if "ended" in self.status else _number_in(self.last_point, "epoch")
        epochs = [at_start_or_end, None if logged is None else logged + 1]
        return max((int(epoch) for epoch in epochs if epoch is not None), default=None)

    @property
    def began(self) -> float:
        """Time of the first start, in seconds since 1970."""
        return float(_number_in(self.status, "created") or self._modified)

    @property
    def seconds(self) -> float | None:
        """Seconds of training, over all resumes; None if unknown."""
        # of a run that was killed the last point is the last sign of life
        ended = self.status.get("ended")
        elapsed: float | None = _number_in(self.status, "elapsed")
        if ended is not None or not self.status:
            return elapsed
        now = time.time() if self.state == RUNNING else float(_number_in(self.last_point, "time") or self._modified)
        return float(elapsed or 0) + max(0.0, now - float(_number_in(self.status, "began") or now))

    @property
    def error(self) -> str:
        """Error or signal that ended it, if it failed or was preempted; else ""."""
        if self.state == FAILED and self.status.get("state") in (STARTING, RUNNING):
            hang = " It left reports of where it hung in hang/." if (self.path / "hang").is_dir() else ""
            return KILLED + hang
        return str(self.status.get("error", ""))

    @property
    def traceback(self) -> str:
        """The traceback of that error; "" if there is none."""
        return str(self.status.get("traceback", ""))

    @property
    def is_empty(self) -> bool:
        """Whether it holds no step, checkpoint or logged value, nor a file that is not written at each start."""
        if self.step or self.checkpoints or self.last_point:
            return False
        try:
            names = [path.name for path in self.path.iterdir()]
            inside = self.path / CHECKPOINTS
            if inside.is_symlink() or (inside.is_dir() and any(path.name[0] != "." for path in inside.iterdir())):
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

    # --- what it holds ----------------------------------------------------------------------------------------------
    @cached_property
    def config(self) -> dict[str, Any]:
        """The config that trained the newest weights, each value under its dotted key; {} for a run of a script."""
        values = self.status.get("config")
        return values if isinstance(values, dict) else {}

    @cached_property
    def given_keys(self) -> frozenset[str] | None:
        """The dotted keys that config files and the command line have set; None where that is not known."""
        keys = self.status.get("set")
        return frozenset(keys) if isinstance(keys, list) else None

    @cached_property
    def checkpoints(self) -> list[CheckpointEntry]:
        """Checkpoints, oldest step first."""
        folder = checkpoints_of(self.path)
        found: list[Location] = []
        if isinstance(folder, Address):
            found += find.checkpoints_in(folder)
        else:
            with suppress(OSError):
                found += [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
        return sorted(map(_checkpoint, found), key=lambda one: (one.step, one.path.name))

    @cached_property
    def evaluations(self) -> "list[RunDirectory]":
        """The evaluations of its checkpoints, oldest first, each named as `test/version_0`."""
        folder = self.path / EVALUATIONS
        found = [RunDirectory(path, folder) for path in folder.glob("*/version_*") if path.is_dir()]
        return sorted(found, key=lambda one: (one.began, _natural(one.name)))

    @cached_property
    def last_point(self) -> dict[str, Any]:
        """The newest logged step, its time, and its values; {} if nothing was logged."""
        try:
            # the tail only: the file of a long run has hundreds of megabytes
            size = regular_file_size(self.path / POINTS_FILE)
            with (self.path / POINTS_FILE).open("rb") as file:
                file.seek(max(0, size - _TAIL))
                lines = file.read().splitlines()
        except OSError:
            return {}
        return next((point for line in reversed(lines) if (point := parse_point(line)) is not None), {})

    @cached_property
    def metrics(self) -> "dict[str, Any]":
        """All that it has logged, as arrays: "step", "time" in seconds since 1970, and one for each metric.

        All have one entry for each logged step, NaN where a metric was not logged; {} if nothing was.
        """
        import numpy

        path = self.path / POINTS_FILE
        try:
            regular_file_size(path)  # no link to a device, no FIFO
            points = [point for line in path.read_bytes().splitlines() if (point := parse_point(line)) is not None]
        except OSError:
            points = []
        if not points:
            return {}
        names = dict.fromkeys(name for point in points for name in point)
        arrays = {name: numpy.array([_as_float(point.get(name)) for point in points]) for name in names}
        return {"step": arrays.pop("step").astype("int64"), **arrays}

    def frame(self) -> Any:
        """Return `metrics` as a pandas DataFrame whose index is the step; raises ConfigError without pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("frame() needs pandas, which is not installed; `metrics` has the same arrays.") from None
        return pandas.DataFrame(self.metrics or {"step": []}).set_index("step")

    @property
    def best_checkpoint(self) -> CheckpointEntry | None:
        """The complete checkpoint with the best value; None if there is none, or if it is not known."""
        best = find.best_checkpoints(checkpoints_of(self.path), identity_of(self.path))
        return _checkpoint(best[0]) if best else None

    @cached_property
    def best(self) -> BestValue | None:
        """The best value of the metric by which its checkpoints are chosen, or of a loss; None if there is none."""
        metric, mode = self.status.get("monitor"), str(self.status.get("mode", "min"))
        value = _number_in(self.status, "best")
        if metric and value is not None and "ended" in self.status:
            return BestValue(str(metric), mode, value)
        # while a run is under way nothing is written but points
        if metric not in self.metrics:
            metric, mode = loss_among(self.metrics), "min"
        values = [one for one in self.metrics.get(metric, ()) if math.isfinite(one)]
        return BestValue(str(metric), mode, float((min if mode == "min" else max)(values))) if values else None


# --- finding ----------------------------------------------------------------------------------------------------------
def is_run(path: Path) -> bool:
    """Return whether a folder is the directory of a run."""
    return bool(read(path))


def find_runs(root: "str | os.PathLike[str]" = ROOT) -> list[RunDirectory]:
    """Return the run directories at and below a folder or address, oldest first. Raises ConfigError if it is no folder.

    Links to folders are not followed, and folders that cannot be read are passed over.
    """
    where, root = root, _readable(root)
    if not root.is_dir():
        near = sorted(one.name for one in root.parent.glob("*/")) if root.parent.is_dir() else []
        raise ConfigError(f"{str(where)!r} is no folder.{did_you_mean(root.name, near)} Name one with runs below it.")
    return sorted(
        (RunDirectory(path, root) for path in _walk(str(root))), key=lambda one: (one.began, _natural(one.name))
    )


def _walk(folder: str) -> Iterator[Path]:
    ahead = [folder]
    while ahead:
        here = ahead.pop()
        try:
            entries = list(os.scandir(here))  # one call for a folder: a sweep may have a thousand runs
        except OSError:
            continue
        if any(entry.name == RUN_FILE for entry in entries) and is_run(Path(here)):
            # a run's own folder is not searched: it may hold very many files, and no runs
            yield Path(here)
            continue
        below = (entry for entry in entries if not entry.name.startswith(".") and REPLAY not in entry.name)
        ahead += [entry.path for entry in below if entry.is_dir(follow_symlinks=False)]


def find_run(run: "str | os.PathLike[str]", root: "str | os.PathLike[str]" = ROOT) -> RunDirectory:
    """Return a run by its path, address or a file within it, or by its name below `root`; of several there, the newest.

    Raises ConfigError, with the nearest name, if there is none.
    """
    word, within, root = os.fspath(run), _readable(run), _readable(root)
    for path in (within, root / word):
        if path.is_dir():
            require_readable(path)
            base = root if root in path.parents else path
            below = find_runs(path)
            # the runs of this name before those deeper down, such as the trials of a sweep
            found = [run for run in below if run.path.parent == path] or below
            if found:
                # a run that was named itself is shown as name/version_N, by the folder two above it
                return RunDirectory(found[-1].path, base if base != found[-1].path else found[-1].path.parent.parent)
    if Path(word).exists():  # a file or a checkpoint of it
        inside = Path(word).absolute()
        for folder in inside.parents[:3]:
            if is_run(folder):
                return RunDirectory(folder)
    known = [one.name for one in find_runs(root)] if root.is_dir() else []
    names = [*known, *{os.path.dirname(name) for name in known}]
    hint = did_you_mean(word, names) or (f" The newest is {known[-1]!r}." if known else "")
    raise ConfigError(f"There is no run {word!r}, neither as a path nor below '{location_of(root)}'.{hint}")


def _readable(place: "str | os.PathLike[str]") -> Path:
    """Return a folder to read: of an address one with copies of its runs."""
    where = to_location(place)
    return remote.copy_of(where) if isinstance(where, Address) else Path(where)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which version_9 comes before version_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _checkpoint(path: Location) -> CheckpointEntry:
    if isinstance(path, Address):
        files = find.load_manifest(path).files.values()
        return CheckpointEntry(path, find.checkpoint_step(path), sum(file.size for file in files), complete=True)
    sizes = {file.name: file.stat().st_size for file in os.scandir(path) if file.is_file(follow_symlinks=False)}
    return CheckpointEntry(path, find.checkpoint_step(path), sum(sizes.values()), MANIFEST in sizes)


# --- reading ----------------------------------------------------------------------------------------------------------
def loss_among(metrics: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the name of a loss, of validation rather than training; "" if no name is like one."""
    losses = [name for name in metrics if "loss" in name.lower()]
    return next((name for name in losses if "val" in name.lower()), next(iter(losses), ""))


def _as_float(value: Any) -> float:
    try:
        return float(value)  # also of "NaN" and "Infinity"
    except (TypeError, ValueError):
        return math.nan


def _number_in(status: Mapping[str, Any], name: str) -> Any:
    found = status.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    return found if math.isfinite(found) else None
