"""RunHistory: the settings and the place of every step of a run, from its run directory; no tensor is read."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.errors import CheckpointError, ConfigError
from ..base.run_names import CHECKPOINTS, CONFIG, identity_of
from ..cli.config.check import Config, load_config
from ..loggers.json_lines import POINTS_FILE
from ..trainer.checkpoints import find
from ..trainer.checkpoints.codec import unflatten
from ..trainer.checkpoints.manifest import STATE_FILE, load_manifest, parse_json
from ..trainer.runs.directory import find_run
from ..trainer.runs.record import read_starts, start_before, start_config
from ..trainer.state import State

log = logging.getLogger("legato")

KEPT = ("state", "fingerprint", "numerics", "versions", "config")


@dataclass(frozen=True)
class CheckpointRecord:
    """Contents of a checkpoint but for its tensors."""

    path: Path
    state: State
    samples: Mapping[str, Any]
    """The settings that decide which samples make up a step, see `checkpoints.fingerprint`."""
    numerics: Mapping[str, Any]
    versions: Mapping[str, Any]
    config: str | None

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
        found = unflatten({name: tree.get(name) for name in KEPT}, {})
        samples = (found["fingerprint"] or {}).get("samples", {})
        state = State.from_dict(found["state"])
        return cls(path, state, samples, found["numerics"] or {}, found["versions"] or {}, found["config"])


class RunHistory:
    """A run as its directory tells it. Steps count from 1: step N takes `global_step` from N - 1 to N.

    A resume may have had other settings than the start of the run, so the config of a step is that of the start which
    did it. In a run without configs of its starts it is that in the oldest checkpoint after the step, else the run's.
    """

    def __init__(self, directory: Path, folders: Sequence[Path] | None = None) -> None:
        """`folders` with checkpoints besides the run directory's own; None: the run has a config, which names them."""
        self.directory, self.folders = directory, folders
        self.config_file = directory / CONFIG
        if folders is None and not self.config_file.is_file():
            raise ConfigError(
                f"{directory} has no {CONFIG}: expected the directory of a run that `legato fit` has begun, such as "
                f"runs/NAME/version_0. A run of a script of one's own has no config to build it from again: let the "
                f"script define a function that makes trainer, task and loader, and call legato.replay(run, make, "
                f"step=N)."
            )

    @classmethod
    def at(cls, path: str) -> "RunHistory":
        """Return the history of a run: its directory, a file or checkpoint in it, or a name below runs/, the newest."""
        found = Path(path)
        if found.absolute().parent.name == CHECKPOINTS:
            return cls(found.parent.parent)
        return cls(found if (found / CONFIG).is_file() else find_run(path).path)

    @cached_property
    def checkpoints(self) -> list[CheckpointRecord]:
        """The complete checkpoints of the run from which it could resume, oldest first."""
        identity, folders = identity_of(self.directory), [self.directory / CHECKPOINTS, *self._elsewhere]
        found: dict[int, CheckpointRecord] = {}
        for folder in folders:
            for path in find.checkpoints_in(folder):
                try:
                    find.check_sizes(path)
                    own = folder == folders[0] or (identity and load_manifest(path).run == identity)
                    record = CheckpointRecord.read(path) if own else None
                except (CheckpointError, OSError, KeyError) as error:
                    log.warning("The checkpoint %s is passed over, it is not whole. %s", path.name, error)
                    continue
                if record is not None:
                    found.setdefault(record.step, record)
        return [found[step] for step in sorted(found)]

    @cached_property
    def _elsewhere(self) -> list[Path]:
        """The folders of Checkpoint callbacks outside of the run directory."""
        if self.folders is not None:
            return list(self.folders)
        sections = load_config([str(self.config_file)]).values.get("callbacks") or {}
        given = (one.get("dirpath") for one in sections.values())
        return [Path(one) for one in given if isinstance(one, str)]

    def before(self, step: int) -> CheckpointRecord | None:
        """Return the newest checkpoint of a moment before a step; None: it is that of the start, or there is none."""
        return next((one for one in reversed(self.checkpoints) if one.step < step), None)

    def after(self, step: int) -> CheckpointRecord | None:
        """Return the oldest checkpoint of a moment after a step."""
        return next((one for one in self.checkpoints if one.step >= step), None)

    @cached_property
    def points(self) -> dict[int, dict[str, Any]]:
        """The points of metrics.jsonl, by step."""
        path = self.directory / POINTS_FILE
        if not path.exists():
            return {}
        found = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                found[int(record["step"])] = record
            except (ValueError, KeyError, TypeError):
                continue
        return found

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The record of each start of the run, oldest first."""
        return [one for one in read_starts(self.directory) if one.get("stage", "fit") == "fit"]

    @property
    def last_step(self) -> int:
        """The newest step that a checkpoint or a logged point knows of; 0: none."""
        return max([one.step for one in self.checkpoints[-1:]] + list(self.points), default=0)

    def require_step(self, step: int) -> None:
        """Raise ConfigError for a step before the first."""
        if step < 1:
            raise ConfigError(f"step={step}: steps count from 1, which is the one that takes global_step from 0 to 1.")

    def config_text(self, step: int) -> str | None:
        """Return the text of the config that a step was done with; None where a script did it."""
        number, _ = start_before(self.directory, step)
        path = start_config(self.directory, number)
        if path.is_file():
            return path.read_text(encoding="utf-8")
        after = self.after(step)
        return self.config_file.read_text(encoding="utf-8") if after is None else after.config

    def config_of(self, step: int, overrides: Sequence[str] = ()) -> Config:
        """Return the config that a step was done with, with overrides on top."""
        text = self.config_text(step)
        if text is None:
            raise ConfigError(f"{self.directory} has no config of step {step}: a script ran it.")
        with TemporaryDirectory() as folder:
            path = Path(folder) / CONFIG
            path.write_text(text, encoding="utf-8")
            return replace(load_config([str(path), *overrides]), directory=None)

    def epochs_begun(self) -> list[tuple[int, int]]:
        """Return (epoch, steps done before it) of each epoch whose beginning is known, in order."""
        found = {0: 0}
        for one in self.checkpoints:
            state = one.state
            found[state.epoch] = state.global_step - state.epoch_steps
            if state.epoch_ended:
                found[state.epoch + 1] = state.global_step
        return sorted(found.items())
