"""RunHistory: the starts, checkpoints and logged points of a run, from its run directory; no tensor is read."""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, ConfigError, DataError
from ..base.run_names import CHECKPOINTS
from ..loggers.json_lines import POINTS_FILE
from ..trainer.checkpoints import find
from ..trainer.checkpoints.codec import unflatten
from ..trainer.checkpoints.manifest import STATE_FILE, load_manifest, parse_json
from ..trainer.runs.record import epochs_begun, start_before
from ..trainer.runs.run_file import identity_of
from ..trainer.state import State

log = logging.getLogger("legato")


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint from which a run could resume, without its tensors."""

    path: Path
    state: State
    threads: int | None
    """Threads of torch in the run, which some sums depend on."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.global_step

    @classmethod
    def read(cls, path: Path) -> "CheckpointRecord | None":
        """Read a checkpoint; None for one that holds weights only."""
        tree = parse_json((path / STATE_FILE).read_bytes(), STATE_FILE)
        if "state" not in tree:
            return None
        kept = unflatten({name: tree.get(name) for name in ("state", "fingerprint")}, {})
        threads = (kept["fingerprint"] or {}).get("numerics.threads")
        return cls(path, State.from_dict(kept["state"]), threads)


class RunHistory:
    """A run as its directory tells it. Steps count from 1: step N takes `global_step` from N - 1 to N."""

    def __init__(self, directory: Path, folders: Sequence[Path] = ()) -> None:
        """`folders`: those with checkpoints of the run besides the directory's own."""
        self.directory, self.folders = directory, folders

    @cached_property
    def checkpoints(self) -> list[CheckpointRecord]:
        """The complete checkpoints of the run from which it could resume, oldest first."""
        identity, records = identity_of(self.directory), dict[int, CheckpointRecord]()
        for folder in (self.directory / CHECKPOINTS, *self.folders):
            for path in find.checkpoints_in(folder):
                try:
                    find.check_sizes(path)
                    # a folder elsewhere may hold checkpoints of several runs
                    is_own = folder not in self.folders or (identity and load_manifest(path).run == identity)
                    record = CheckpointRecord.read(path) if is_own else None
                except (CheckpointError, OSError, KeyError) as error:
                    log.warning("The checkpoint %s is passed over, it is not whole. %s", path.name, error)
                    continue
                if record is not None:
                    records.setdefault(record.step, record)
        return [records[step] for step in sorted(records)]

    def before(self, step: int) -> CheckpointRecord | None:
        """Return the newest checkpoint of a moment before a step; None: it is that of the start, or there is none."""
        return next((record for record in reversed(self.checkpoints) if record.step < step), None)

    def near(self, step: int) -> CheckpointRecord | None:
        """Return the oldest checkpoint after a step, or else the newest before it."""
        return next((record for record in self.checkpoints if record.step >= step), self.before(step))

    @cached_property
    def points(self) -> dict[int, dict[str, Any]]:
        """The points of metrics.jsonl, by step."""
        path, points = self.directory / POINTS_FILE, dict[int, dict[str, Any]]()
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a kill may have torn the last line
                    point = json.loads(line)
                    points[int(point["step"])] = point
        return points

    @property
    def last_step(self) -> int:
        """The newest step that a checkpoint or a logged point knows of; 0: none."""
        return max([record.step for record in self.checkpoints[-1:]] + list(self.points), default=0)

    def start_of(self, step: int) -> dict[str, Any]:
        """Return the record of the start of the run that did a step; {} where there is none."""
        return start_before(self.directory, step)[1]

    def replicas_in(self, step: int) -> int:
        """Return the replicas of the run in a step."""
        return int(self.start_of(step)["replicas"])

    def epoch_of(self, step: int) -> tuple[int, int, int | None]:
        """Return the epoch of a step, the steps done before it, and its number of steps where a later one has begun.

        Raises ConfigError for a step before the first, and DataError where the epochs are not recorded.
        """
        if step < 1:
            raise ConfigError(f"step={step}: steps count from 1, which is the one that takes global_step from 0 to 1.")
        begun = epochs_begun(self.directory)
        past = [epoch for epoch in begun if begun[epoch] < step]
        if not past:
            raise DataError(f"{self.directory} does not tell in which epoch step {step} was: the run has not begun it.")
        epoch = max(past)
        following = min((steps for steps in begun.values() if steps >= step), default=None)
        return epoch, begun[epoch], None if following is None else following - begun[epoch]
