"""ConfigHistory: a run of `legato fit`, with the config for each step. A replay builds its objects from that config."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.run_names import CONFIG
from ..lab.history import StudiedRun
from ..lab.replay_steps import on_processes
from ..trainer.runs.record import start_config
from .config.build import build_config
from .config.check import Config, load_config
from .unstarted import UnstartedRun

REPLACED = (
    *("devices", "num_nodes", "strategy", "cluster", "replicas", "requeue", "max_restarts"),
    *("min_steps", "min_epochs", "max_time"),
)
"""Trainer arguments that a replay replaces, because its number of processes and last step may differ from the run's."""


class ConfigHistory(StudiedRun):
    """A run of `legato fit`. Each step uses the config in effect at that step, because resuming may change the config.

    Args:
        overrides: Overrides applied to every step's config.
    """

    def __init__(self, directory: Path, overrides: Sequence[str] = ()) -> None:
        super().__init__(directory)
        self.overrides = overrides
        self._configs: dict[int, Config] = {}

    def config_of(self, step: int) -> Config:
        """Return the config of a step."""
        number = self.start_of(step)[0]
        if number not in self._configs:
            path = start_config(self.directory, number)
            config = load_config([str(path if path.is_file() else self.directory / CONFIG), *self.overrides])
            # without the file's run directory, since a replay does not continue that run
            self._configs[number] = replace(config, directory=None)
        return self._configs[number]

    def make_unstarted(self, step: int) -> UnstartedRun:
        """Return the run with the config for a step, without starting any processes."""
        return UnstartedRun(self.config_of(step))

    def make(self, first: int, last: int, processes: int = 1) -> partial[list[Any]]:
        """Return a function that builds the trainer, task and data for replaying steps `first` to `last`.

        Raises ConfigError if resuming changed the config between those steps.
        """
        record, config = self.before(first), self.config_of(first)
        begun = record.step if record else 0
        for changed in (int(start.get("step", 0)) for _, start in self.starts):
            if begun < changed < last and self._deciding(changed) != self._deciding(changed + 1):
                raise ConfigError(
                    f"The config changed after step {changed}. Replay up to that step (until={changed}). "
                    f"Replay later steps separately, from a checkpoint at or after that step."
                )
        trainer = dict(config.values["trainer"])
        # sync_batchnorm needs one process per replica; without it, the number of processes does not change the result
        settings = {} if trainer["sync_batchnorm"] else on_processes(processes, trainer)
        # overrides of the replay command take precedence, even if they change bits
        overridden = {key[1:2] for key, origin in config.origins.items() if origin.startswith("override")}
        trainer |= {name: value for name, value in settings.items() if (name,) not in overridden}
        # a replay runs on this machine and writes to a separate folder
        return partial(_make, config.changed(trainer, loggers=None, launcher=None))

    def _deciding(self, step: int) -> dict[str, Any]:
        """Return the values in a step's config that affect the result, excluding locations and process counts."""
        values = self.config_of(step).values
        names = () if values["trainer"]["sync_batchnorm"] else REPLACED
        trainer = {name: value for name, value in values["trainer"].items() if name not in names}
        return {name: values.get(name) for name in ("seed", "task", "data", "callbacks")} | {"trainer": trainer}


def _make(config: Config) -> list[Any]:
    run = build_config(config)
    resume = config.values["resume"]
    return [run.trainer, run.task, None, None, run.data, None if resume == "auto" else resume]
