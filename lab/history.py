"""RunHistory: reads the launches, checkpoints and logged points from a run directory, without loading tensors."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, ConfigError, DataError
from ..base.location import Location, checkpoints_of, to_location
from ..loggers.json_lines import POINTS_FILE, parse_point
from ..trainer.checkpoints import find
from ..trainer.checkpoints.codec import unflatten
from ..trainer.checkpoints.manifest import STATE_FILE, parse_json
from ..trainer.checkpoints.storage import folder_at
from ..trainer.resume.fingerprint import CONTENT, is_elsewhere
from ..trainer.runs.record import epochs_begun, read_starts
from ..trainer.runs.run_file import identity_of
from ..trainer.state import State

log = logging.getLogger("legato")


@dataclass(frozen=True)
class CheckpointRecord:
    """The metadata, but not the tensors, of a checkpoint that a run can resume from."""

    path: Location
    state: State
    fingerprint: dict[str, Any]
    """Settings of the run; see trainer/resume/fingerprint.py."""

    @property
    def threads(self) -> int | None:
        """Number of torch threads in the run, which affects the low-order bits of some sums."""
        return self.fingerprint.get("numerics.threads")

    @property
    def content(self) -> dict[str, Any]:
        """Hashes and counts that identify the run's data."""
        return {} if is_elsewhere(self.fingerprint) else self.fingerprint.get(CONTENT) or {}

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.state.global_step


class RunHistory:
    """History of a run, read from its directory. Step N, counted from 1, increments `global_step` from N - 1 to N."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: list[str] = []
        """An error message for each skipped checkpoint."""

    @cached_property
    def folders(self) -> list[Location]:
        """Folders with the run's checkpoints. The run directory comes first and takes precedence over copies."""
        elsewhere = (name for _, start in self.starts for name in start.get("checkpoint_folders", ()))
        return list(dict.fromkeys([checkpoints_of(self.directory), *map(to_location, elsewhere)]))

    @cached_property
    def checkpoints(self) -> list[CheckpointRecord]:
        """Complete checkpoints that the run can resume from, oldest first."""
        identity, records = identity_of(self.directory), dict[int, CheckpointRecord]()
        for number, folder in enumerate(self.folders):
            stored = folder_at(folder)
            for path in find.checkpoints_in(folder):
                try:
                    # compare sizes only: hashing gigabytes takes minutes, and loading verifies the hashes anyway
                    content = find.check_sizes(path)
                    # a folder elsewhere may hold checkpoints from several runs
                    if number and (not identity or content.run != identity):
                        continue
                    state = stored.fetch(path.name, content, [STATE_FILE]) / STATE_FILE
                    tree = parse_json(state.read_bytes(), STATE_FILE)
                    if "state" in tree:  # otherwise the checkpoint holds weights only
                        kept = unflatten({name: tree.get(name) for name in ("state", "fingerprint")}, {})
                        record = CheckpointRecord(path, State.from_dict(kept["state"]), kept["fingerprint"] or {})
                        records.setdefault(record.step, record)
                except (CheckpointError, OSError, KeyError) as error:
                    self.damaged.append(f"{path.name}: {error}")
                    log.warning("Skipping the incomplete checkpoint %s. %s", path.name, error)
        return [records[step] for step in sorted(records)]

    def before(self, step: int) -> CheckpointRecord | None:
        """Return the latest checkpoint saved before a step, or None."""
        return next((record for record in reversed(self.checkpoints) if record.step < step), None)

    def near(self, step: int) -> CheckpointRecord | None:
        """Return the earliest checkpoint at or after a step or, if there is none, the latest one before it."""
        return next((record for record in self.checkpoints if record.step >= step), self.before(step))

    @cached_property
    def points(self) -> dict[int, dict[str, Any]]:
        """Points in metrics.jsonl, keyed by step. If a resumed run logged a step again, the later point is used."""
        path = self.directory / POINTS_FILE
        lines = path.read_bytes().splitlines() if path.exists() else []
        return {point["step"]: point for line in lines if (point := parse_point(line)) is not None}

    @property
    def last_step(self) -> int:
        """The latest step with a checkpoint or a logged point, or 0 if there is no such step."""
        return max([record.step for record in self.checkpoints[-1:]] + list(self.points), default=0)

    @cached_property
    def starts(self) -> list[tuple[int, dict[str, Any]]]:
        """Number and record of each training launch, oldest first. Evaluations also have numbers but are omitted."""
        records = enumerate(read_starts(self.directory))
        return [(number, record) for number, record in records if record.get("stage", "fit") == "fit"]

    def start_of(self, step: int) -> tuple[int, dict[str, Any]]:
        """Return (number, record) of the launch that computed a step, or (-1, {}) if that launch is not recorded."""
        return next((start for start in reversed(self.starts) if start[1].get("step", 0) < step), (-1, {}))

    @cached_property
    def epochs(self) -> dict[int, int]:
        """Number of steps before each epoch."""
        return epochs_begun(self.directory)

    def epoch_of(self, step: int) -> tuple[int, int, int | None]:
        """Return a step's epoch, the number of steps before that epoch, and the epoch's length in steps.

        The length is None if no later epoch has started. Raises ConfigError if the step is less than 1, and DataError
        if the run has no record of the step's epoch.
        """
        if step < 1:
            raise ConfigError(f"step={step}: steps are counted from 1. Step 1 increases global_step from 0 to 1.")
        begun = self.epochs
        # epochs.jsonl holds the step after which each epoch started, including epochs that resuming cut short
        past = [epoch for epoch in begun if begun[epoch] < step]
        if not past:
            raise DataError(f"{self.directory} does not record the epoch of step {step}: the run has not reached it.")
        epoch = max(past)
        following = min((steps for steps in begun.values() if steps >= step), default=None)
        return epoch, begun[epoch], None if following is None else following - begun[epoch]


class StudiedRun(RunHistory):
    """A run whose objects can be rebuilt from its config or script. `study.history_of` returns it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._unstarted: dict[int, Any] = {}

    @abstractmethod
    def make(self, first: int, last: int, processes: int = 1) -> Callable[[], Sequence[Any]]:
        """Return a function that creates the trainer, task and data to replay steps on `processes` processes."""

    def unstarted(self, step: int) -> Any:
        """Return the unstarted run as configured at a step. It has `task`, `seed` and `load_loader(epoch)`."""
        number = self.start_of(step)[0]
        if number not in self._unstarted:
            self._unstarted[number] = self.make_unstarted(step)
        return self._unstarted[number]

    @abstractmethod
    def make_unstarted(self, step: int) -> Any:
        """Create the object that `unstarted` caches for each launch."""
