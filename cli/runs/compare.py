"""`legato compare`: the configs and metrics of several runs side by side."""

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
    """Print the comparison. Raises ConfigError if a run is missing."""
    if all(word.endswith(".jsonl") for word in arguments.runs):
        print(operations(arguments.runs))
        return
    runs = [find_run(word) for word in arguments.runs]
    if len(runs) < 2:
        raise ConfigError("legato compare needs two runs at least.")
    print(fitting("\n\n".join((states(runs), configs(runs), metrics(runs)))))
    if arguments.bits:
        print(f"\n{bits(runs)}")


def states(runs: Sequence[RunDirectory]) -> str:
    """Return state, step and duration of each run."""
    rows = [["", *(run.name for run in runs)], ["state", *(run.state for run in runs)]]
    rows += [["step", *(str(run.step) for run in runs)], ["duration", *(time_taken(run.seconds) for run in runs)]]
    return table(rows)


def configs(runs: Sequence[RunDirectory]) -> str:
    """Return the keys of the config that differ, with the value of each run."""
    texts = [config_of(run) for run in runs]
    if not any(texts):
        return "config: none is stored; the runs are a script's."
    # only what differs: two configs share a hundred values
    keys = varying_keys(texts)
    if not keys:
        scripts = [run.name for run, config in zip(runs, texts, strict=True) if not config]
        return (
            f"config: {'the same' if not scripts else 'none is stored of ' + ', '.join(scripts) + ', run by a script'}"
        )
    rows = [["config", *(run.name for run in runs)]]
    rows += [[key, *(config.get(key, "-") for config in texts)] for key in keys]
    return table(rows)


def metrics(runs: Sequence[RunDirectory]) -> str:
    """Return the last value of each metric, with its least and greatest, of each run."""
    names = metric_names(dict.fromkeys(name for run in runs for name in run.metrics))
    if not names:
        return "metrics: none"
    rows = [["last (min .. max)", *(run.name for run in runs)]]
    for name in names:
        logged = [[value for value in run.metrics.get(name, ()) if math.isfinite(value)] for run in runs]
        cells = (f"{number(one[-1])} ({number(min(one))} .. {number(max(one))})" if one else "-" for one in logged)
        rows.append([name, *cells])
    return table(rows)


def bits(runs: Sequence[RunDirectory]) -> str:
    """Return the first step and tensor at which two runs differ. Raises ConfigError for more than two."""
    from ...lab.bits import first_difference  # which loads torch
    from ...lab.study import history_of

    if len(runs) != 2:
        raise ConfigError(f"--bits compares two runs, got {len(runs)}.")
    return "\n".join(first_difference(*map(history_of, runs)))


def operations(files: Sequence[str]) -> str:
    """Return the first difference of two recordings of `legato replay --operations`. Raises ConfigError without two."""
    from ...lab.operations import different_operation  # which loads torch

    if len(files) != 2 or not all(Path(file).is_file() for file in files):
        raise ConfigError(f"Expected two files of `legato replay --operations FILE.jsonl`, got {' '.join(files)}.")
    return "\n".join(different_operation([Path(file).read_text(encoding="utf-8") for file in files]))
