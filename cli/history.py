"""ConfigHistory: a run as its directory tells it, with the config of each step, from which its objects are built."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.errors import ConfigError
from ..base.run_names import CHECKPOINTS, CONFIG
from ..lab.history import RunHistory
from ..trainer.runs.directory import find_run
from ..trainer.runs.record import read_starts, start_before, start_config
from .config.build import build_config
from .config.check import Config, load_config
from .config.read import read_strategy
from .unstarted import UnstartedRun

REPLACED = (
    *("devices", "num_nodes", "strategy", "cluster", "replicas", "requeue", "max_restarts"),
    *("min_steps", "min_epochs", "max_time"),
)
"""Arguments of Trainer that a replay, on one process and with an end of its own, replaces."""


class ConfigHistory(RunHistory):
    """A run of `legato fit`. A resume may have had another config, so that of a step is its start's.

    overrides: set in the config of every step.
    """

    def __init__(self, directory: Path, overrides: Sequence[str] = ()) -> None:
        """Raises ConfigError for a run of a script."""
        if not (directory / CONFIG).is_file():
            raise ConfigError(
                f"{directory} has no {CONFIG}: expected the directory of a run that `legato fit` has begun, such as "
                f"runs/NAME/version_0. A run of a script of one's own has no config to build it from again: let the "
                f"script define a function that makes trainer, task and loader, and call legato.replay(run, make, "
                f"step=N)."
            )
        sections = load_config([str(directory / CONFIG)]).values.get("callbacks") or {}
        folders = [section.get("dirpath") for section in sections.values()]
        super().__init__(directory, [Path(folder) for folder in folders if isinstance(folder, str)])
        self.overrides = overrides
        self._configs: dict[int, Config] = {}
        self._unstarted: dict[int, UnstartedRun] = {}

    @classmethod
    def at(cls, path: str, overrides: Sequence[str] = ()) -> "ConfigHistory":
        """Return the history of a run: its directory, a file or checkpoint in it, or a name below runs/, the newest."""
        place = Path(path)
        if place.absolute().parent.name == CHECKPOINTS:
            return cls(place.parent.parent, overrides)
        return cls(place if (place / CONFIG).is_file() else find_run(path).path, overrides)

    def config_of(self, step: int) -> Config:
        """Return the config that a step was done with."""
        number = start_before(self.directory, step)[0]
        if number not in self._configs:
            path = start_config(self.directory, number)
            with TemporaryDirectory() as folder:  # a copy, since a config in a run directory means that run
                copy = Path(folder) / CONFIG
                copy.write_bytes((path if path.is_file() else self.directory / CONFIG).read_bytes())
                self._configs[number] = replace(load_config([str(copy), *self.overrides]), directory=None)
        return self._configs[number]

    def unstarted(self, step: int) -> UnstartedRun:
        """Return the run as it was configured in a step, without its processes."""
        config = self.config_of(step)
        if id(config) not in self._unstarted:
            self._unstarted[id(config)] = UnstartedRun(config)
        return self._unstarted[id(config)]

    def make(self, first: int, last: int) -> partial[list[Any]]:
        """Return what makes trainer, task and data for a replay of some steps.

        Raises ConfigError where the run was resumed with another config between them.
        """
        record = self.before(first)
        self._require_same_config(record.step if record else 0, last)
        config = self.config_of(first)
        trainer, near = dict(config.values["trainer"]), self.near(first)
        settings: dict[str, Any] = {}
        if not trainer["sync_batchnorm"]:  # takes a process for each replica, as manual optimization does
            settings |= one_process(trainer)
        if trainer["threads"] is None and near is not None:
            settings["threads"] = near.threads
        # of the run's own replicas, which a checkpoint knows, or else its first start
        settings["replicas"] = None if record else self.replicas_in(first)
        overridden = {key[1] for key in config.origins if key[:1] == ("trainer",) and len(key) > 1
                      and config.origin(key).startswith("override")}  # fmt: skip
        trainer |= {name: value for name, value in settings.items() if name not in overridden}
        values = {name: value for name, value in config.values.items() if name not in ("loggers", "launcher")}
        return partial(_make, replace(config, values={**values, "trainer": trainer}))

    def _require_same_config(self, begun: int, last: int) -> None:
        starts = sorted(int(start.get("step", 0)) for start in read_starts(self.directory))
        for changed in (step for step in starts if begun < step < last):
            if self._deciding(changed) != self._deciding(changed + 1):
                kept = next((record.step for record in self.checkpoints if record.step >= changed), None)
                onwards = "" if kept is None else f", and step={kept + 1}"
                raise ConfigError(
                    f"The run was resumed with another config after step {changed}. Replay up to there, and from there "
                    f"on: until={changed}{onwards}."
                )

    def _deciding(self, step: int) -> dict[str, Any]:
        """Return what decides in the config of a step: not where the run is, nor on how many processes."""
        values = self.config_of(step).values
        trainer = values["trainer"]
        names = () if trainer["sync_batchnorm"] else REPLACED
        kept = {name: value for name, value in trainer.items() if name not in names}
        return {name: values.get(name) for name in ("seed", "task", "data", "callbacks")} | {"trainer": kept}


def _make(config: Config) -> list[Any]:
    run = build_config(config)
    resume = config.values["resume"]
    return [run.trainer, run.task, None, None, run.data, None if resume == "auto" else resume]


def one_process(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Trainer for one process that computes what those of the run have computed."""
    name, options = read_strategy(trainer)
    settings = {"devices": 1, "num_nodes": 1, "strategy": "single", "cluster": "off"}
    if name != "ddp_model_parallel" or options.get("micro_batches", 1) == 1:
        return settings
    # pieces of a batch have other bits than the batch: one process cuts it as each process of the run did
    count, devices = options.get("devices_per_replica"), options.get("part_devices")
    if devices:
        options["part_devices"] = devices[:count]
    return {**settings, "devices": count or 2, "strategy": {"name": name, **options}}
