"""Finds differences between the stored configs of runs."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ...base.targets import TARGET
from ...trainer.runs.directory import RunDirectory

NOT_COMPARED = ("run.name", "run.root", "resume", "checkpoint")
"""Keys that specify a run's location. They do not affect its result."""
TASK = f"task.{TARGET}"


def config_of(run: RunDirectory) -> dict[str, str]:
    """Return a run's config with all values as text."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in run.config.items()}


def differing_values(runs: Sequence[RunDirectory]) -> list[dict[str, str]]:
    """Return each run's non-default values that differ among runs of the same task, keyed by short name."""
    configs = [config_of(run) for run in runs]
    # per task, since runs of different tasks differ in most keys
    tasks = {config.get(TASK) for config in configs}
    names = {task: short_names(varying_keys([c for c in configs if c.get(TASK) == task])) for task in tasks}
    return [
        {
            name: config[key]
            for key, name in names[config.get(TASK)].items()
            if key in config and (run.given_keys is None or key in run.given_keys)
        }
        for run, config in zip(runs, configs, strict=True)
    ]


def varying_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between configs. Runs without a config are ignored."""
    stored = [config for config in configs if config]
    keys = dict.fromkeys(key for config in stored for key in config if key not in NOT_COMPARED)
    return [key for key in keys if len({config.get(key) for config in stored}) > 1]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last component of each key, or the full key if another key has the same last component."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last.values())
    return {key: name if counts[name] == 1 else key for key, name in last.items()}
