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
    """Return for each run the values by which it differs from others of the same task, under short keys.

    A value that more than half of these runs have is left out, and so is a default that the run has not set.
    """
    groups: dict[str | None, list[Mapping[str, str]]] = {}
    texts = [config_of(run) for run in runs]
    for config in texts:
        groups.setdefault(config.get(TASK), []).append(config)
    known = {task: [config for config in configs if config] for task, configs in groups.items()}
    counts = {
        task: {key: Counter(config.get(key) for config in configs) for key in varying_keys(configs)}
        for task, configs in known.items()
    }
    found = []
    for run, config in zip(runs, texts, strict=True):
        task = config.get(TASK)
        short = short_names(list(counts[task]))
        found.append(
            {
                short[key]: config[key]
                for key, values in counts[task].items()
                if key in config
                and 2 * values[config[key]] <= len(known[task])
                and (run.given_keys is None or key in run.given_keys)
            }
        )
    return found


def varying_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values are not the same in all of the configs; runs without a config do not count."""
    whole = [config for config in configs if config]
    keys = dict.fromkeys(key for config in whole for key in config if key not in NOT_COMPARED)
    return [key for key in keys if len({config.get(key) for config in whole}) > 1]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, with as many parts before it as tell it from the others."""
    found = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(other == name or other.endswith(f".{name}") for other in keys) == 1:
                break
        found[key] = name
    return found
