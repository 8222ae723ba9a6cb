"""`legato compare`: shows the configs and metrics of several runs side by side."""

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ...base.errors import ConfigError
from ...base.quantities import time_taken
from ...trainer.runs.directory import RunDirectory, find_run
from .differences import config_of, varying_keys
from .text import fitting, metric_names, number, table


def run_compare(arguments: Namespace) -> None:
    """Print a comparison of the runs. Raises ConfigError if a run is missing."""
    if all(word.endswith(".jsonl") for word in arguments.runs):
        print(operations(arguments.runs))
        return
    runs = [find_run(word) for word in arguments.runs]
    if len(runs) < 2:
        raise ConfigError("legato compare needs at least two runs.")
    print(fitting("\n\n".join((states(runs), configs(runs), metrics(runs)))))
    if arguments.bits:
        print(f"\n{bits(runs)}")


def states(runs: Sequence[RunDirectory]) -> str:
    """Return the state, step and duration of each run."""
    rows = [["", *(run.name for run in runs)], ["state", *(run.state for run in runs)]]
    rows += [["step", *(str(run.step) for run in runs)], ["duration", *(time_taken(run.seconds) for run in runs)]]
    return table(rows)


def configs(runs: Sequence[RunDirectory]) -> str:
    """Return the keys whose values differ, with each run's value."""
    texts = [config_of(run) for run in runs]
    if not any(texts):
        return "config: none stored, since a script started the runs."
    # shows only keys that differ, since two configs share about a hundred values
    keys = varying_keys(texts)
    if not keys:
        scripts = [run.name for run, config in zip(runs, texts, strict=True) if not config]
        missing = f"none stored for {', '.join(scripts)}, started by a script"
        return f"config: {missing if scripts else 'the same'}"
    rows = [["config", *(run.name for run in runs)]]
    rows += [[key, *(config.get(key, "-") for config in texts)] for key in keys]
    return table(rows)


def metrics(runs: Sequence[RunDirectory]) -> str:
    """Return the last, smallest and largest value of each metric for each run."""
    names = metric_names(dict.fromkeys(name for run in runs for name in run.metrics))
    if not names:
        return "metrics: none"
    rows = [["last (min .. max)", *(run.name for run in runs)]]
    for name in names:
        logged = [[value for value in run.metrics.get(name, ()) if math.isfinite(value)] for run in runs]
        cells = (f"{number(v[-1])} ({number(min(v))} .. {number(max(v))})" if v else "-" for v in logged)
        rows.append([name, *cells])
    return table(rows)


def bits(runs: Sequence[RunDirectory]) -> str:
    """Return the first step and tensor at which two runs differ. Raises ConfigError for more than two runs."""
    from ...lab.bits import first_difference  # imports torch
    from ...lab.study import history_of

    if len(runs) != 2:
        raise ConfigError(f"--bits compares two runs, got {len(runs)}.")
    return "\n".join(first_difference(*map(history_of, runs)))


def operations(files: Sequence[str]) -> str:
    """Return the first difference between two files that `legato replay --operations` wrote.

    Raises ConfigError for any other file.
    """
    from ...lab.operations import different_operation  # imports torch

    if len(files) != 2 or not all(Path(file).is_file() for file in files):
        raise ConfigError(f"Expected two files from `legato replay --operations FILE.jsonl`, got {' '.join(files)}.")
    return "\n".join(different_operation([Path(file).read_text(encoding="utf-8") for file in files]))
