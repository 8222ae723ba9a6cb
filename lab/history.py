"""RunHistory: the starts, checkpoints and logged points of a run, from its run directory; no tensor is read."""

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
    """A checkpoint from which a run could resume, without its tensors."""

    path: Location
    state: State
    fingerprint: dict[str, Any]
    """Settings that the run had; see trainer/resume/fingerprint.py."""

    @property
    def threads(self) -> int | None:
        """Threads of torch in the run, which some sums depend on."""
        return self.fingerprint.get("numerics.threads")

    @property
    def content(self) -> dict[str, Any]:
        """What tells whether data is that of the run."""
        return {} if is_elsewhere(self.fingerprint) else self.fingerprint.get(CONTENT) or {}

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.global_step


class RunHistory:
    """A run as its directory tells it. Steps count from 1: step N takes `global_step` from N - 1 to N."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: list[str] = []
        """What is wrong with the checkpoints that are passed over."""

    @cached_property
    def folders(self) -> list[Location]:
        """The folders with checkpoints of the run, its own first: it wins over a copy elsewhere."""
        elsewhere = (name for _, start in self.starts for name in start.get("checkpoint_folders", ()))
        return list(dict.fromkeys([checkpoints_of(self.directory), *map(to_location, elsewhere)]))

    @cached_property
    def checkpoints(self) -> list[CheckpointRecord]:
        """The complete checkpoints of the run from which it could resume, oldest first."""
        identity, records = identity_of(self.directory), dict[int, CheckpointRecord]()
        for number, folder in enumerate(self.folders):
            stored = folder_at(folder)
            for path in find.checkpoints_in(folder):
                try:
                    # sizes alone: to hash gigabytes takes minutes, and who reads a checkpoint verifies it
                    content = find.check_sizes(path)
                    # a folder elsewhere may hold checkpoints of several runs
                    if number and (not identity or content.run != identity):
                        continue
                    state = stored.fetch(path.name, content, [STATE_FILE]) / STATE_FILE
                    tree = parse_json(state.read_bytes(), STATE_FILE)
                    if "state" in tree:  # else it holds weights only
                        kept = unflatten({name: tree.get(name) for name in ("state", "fingerprint")}, {})
                        record = CheckpointRecord(path, State.from_dict(kept["state"]), kept["fingerprint"] or {})
                        records.setdefault(record.step, record)
                except (CheckpointError, OSError, KeyError) as error:
                    self.damaged.append(f"{path.name}: {error}")
                    log.warning("Skipping the incomplete checkpoint %s. %s", path.name, error)
        return [records[step] for step in sorted(records)]

    def before(self, step: int) -> CheckpointRecord | None:
        """Return the newest checkpoint of a moment before a step; None: it is that of the start, or there is none."""
        return next((record for record in reversed(self.checkpoints) if record.step < step), None)

    def near(self, step: int) -> CheckpointRecord | None:
        """Return the oldest checkpoint after a step, or else the newest before it."""
        return next((record for record in self.checkpoints if record.step >= step), self.before(step))

    @cached_property
    def points(self) -> dict[int, dict[str, Any]]:
        """The points of metrics.jsonl, by step; of two for a step, as a resume leaves them, the later one."""
        path = self.directory / POINTS_FILE
        lines = path.read_bytes().splitlines() if path.exists() else []
        return {point["step"]: point for line in lines if (point := parse_point(line)) is not None}

    @property
    def last_step(self) -> int:
        """The newest step that a checkpoint or a logged point knows of; 0: none."""
        return max([record.step for record in self.checkpoints[-1:]] + list(self.points), default=0)

    @cached_property
    def starts(self) -> list[tuple[int, dict[str, Any]]]:
        """Number and record of each start of training, oldest first; evaluations are counted, and not among them."""
        records = enumerate(read_starts(self.directory))
        return [(number, record) for number, record in records if record.get("stage", "fit") == "fit"]

    def start_of(self, step: int) -> tuple[int, dict[str, Any]]:
        """Return number and record of the start of the run that did a step; (-1, {}) where that is not recorded."""
        return next((start for start in reversed(self.starts) if start[1].get("step", 0) < step), (-1, {}))

    @cached_property
    def epochs(self) -> dict[int, int]:
        """The steps done before each epoch."""
        return epochs_begun(self.directory)

    def epoch_of(self, step: int) -> tuple[int, int, int | None]:
        """Return the epoch of a step, the steps done before it, and its number of steps where a later one has begun.

        Raises ConfigError for a step before the first, and DataError where the epochs are not recorded.
        """
        if step < 1:
            raise ConfigError(f"step={step}: steps count from 1, which is the one that takes global_step from 0 to 1.")
        begun = self.epochs
        # epochs.jsonl has the step after which each epoch began, also of one that a resume has cut short
        past = [epoch for epoch in begun if begun[epoch] < step]
        if not past:
            raise DataError(f"{self.directory} does not tell in which epoch step {step} was: the run has not begun it.")
        epoch = max(past)
        following = min((steps for steps in begun.values() if steps >= step), default=None)
        return epoch, begun[epoch], None if following is None else following - begun[epoch]


class StudiedRun(RunHistory):
    """A run whose objects can be made again, by its config or by its script: `study.history_of` returns one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._unstarted: dict[int, Any] = {}

    @abstractmethod
    def make(self, first: int, last: int, processes: int = 1) -> Callable[[], Sequence[Any]]:
        """Return what makes trainer, task and data, not started, for a replay of some steps on some processes."""

    def unstarted(self, step: int) -> Any:
        """Return the run as it was made for a step, to look at: `task`, `seed`, `load_loader(epoch)`."""
        number = self.start_of(step)[0]
        if number not in self._unstarted:
            self._unstarted[number] = self.make_unstarted(step)
        return self._unstarted[number]

    @abstractmethod
    def make_unstarted(self, step: int) -> Any:
        """Make what `unstarted` keeps for each start."""
