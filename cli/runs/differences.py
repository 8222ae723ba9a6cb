"""Differences of stored configs: between runs."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ...base.targets import TARGET
from ...trainer.runs.directory import RunDirectory

NOT_COMPARED = ("run.name", "run.root", "resume", "checkpoint")
"""Keys that say where a run is, not what it does."""
TASK = f"task.{TARGET}"


def config_of(run: RunDirectory) -> dict[str, str]:
    """Return the config of a run, its values as text."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in run.config.items()}


def differing_values(runs: Sequence[RunDirectory]) -> list[dict[str, str]]:
    """Return for each run the values that are not those of all runs of its task, under short keys.

    A default that the run has not set is left out.
    """
    configs = [config_of(run) for run in runs]
    # runs of different tasks differ in everything
    tasks = {config.get(TASK) for config in configs}
    names = {task: short_names(varying_keys([one for one in configs if one.get(TASK) == task])) for task in tasks}
    return [
        {
            name: config[key]
            for key, name in names[config.get(TASK)].items()
            if key in config and (run.given_keys is None or key in run.given_keys)
        }
        for run, config in zip(runs, configs, strict=True)
    ]


def varying_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values are not the same in all of the configs; runs without a config do not count."""
    whole = [config for config in configs if config]
    keys = dict.fromkeys(key for config in whole for key in config if key not in NOT_COMPARED)
    return [key for key in keys if len({config.get(key) for config in whole}) > 1]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key where another one ends likewise."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last.values())
    return {key: name if counts[name] == 1 else key for key, name in last.items()}
