"""`legato compare`: the configs and metrics of several runs side by side, and a plot of them."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ...base.errors import ConfigError, did_you_mean
from ...base.quantities import time_taken
from ...base.run_names import require_local
from ...trainer.runs.directory import RunDirectory, find_run
from .differences import varying_keys
from .show import finite_points
from .text import fitting, metric_names, number, table


def run_compare(arguments: Namespace) -> None:
    """Print the comparison. Raises ConfigError if a run is missing, or matplotlib for the plot."""
    runs = [find_run(word) for word in arguments.runs]
    if len(runs) < 2:
        raise ConfigError("legato compare needs two runs at least.")
    print(fitting("\n\n".join((states(runs), configs(runs), metrics(runs)))))
    if arguments.bits:
        from ...lab.bits import show_bits  # which loads torch

        print(f"\n{show_bits([run.path for run in runs])}")
    if arguments.plot:
        print(f"\n{plot(runs, Path(arguments.plot), arguments.metric)}")


def states(runs: Sequence[RunDirectory]) -> str:
    """Return state, step and duration of each run."""
    rows = [["", *(run.name for run in runs)], ["state", *(run.state for run in runs)]]
    rows += [["step", *(str(run.step) for run in runs)], ["duration", *(time_taken(run.seconds) for run in runs)]]
    return table(rows)


def configs(runs: Sequence[RunDirectory]) -> str:
    """Return the keys of the config that differ, with the value of each run."""
    if not any(run.config for run in runs):
        return "config: none is stored; the runs are a script's."
    keys = varying_keys([run.config for run in runs])
    if not keys:
        return "config: the same"
    rows = [["config", *(run.name for run in runs)]]
    rows += [[key, *(run.config.get(key, "-") for run in runs)] for key in keys]
    return table(rows)


def metrics(runs: Sequence[RunDirectory]) -> str:
    """Return the last value of each metric, with its least and greatest, of each run."""
    names = metric_names(dict.fromkeys(name for run in runs for name in run.metrics))
    if not names:
        return "metrics: none"
    rows = [["last (min .. max)", *(run.name for run in runs)]]
    for name in names:
        cells = []
        for run in runs:
            values = [value for _, value in finite_points(run, name)] if name in run.metrics else []
            told = f"{number(values[-1])} ({number(min(values))} .. {number(max(values))})" if values else "-"
            cells.append(told)
        rows.append([name, *cells])
    return table(rows)


def plot(runs: Sequence[RunDirectory], path: Path, wanted: Sequence[str] | None = None) -> str:
    """Write a picture with one chart a metric and one line a run; return what was written."""
    require_local(path, "--plot")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    known = metric_names(dict.fromkeys(name for run in runs for name in run.metrics))
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"None of the runs has logged {name!r}.{did_you_mean(name, known)}")
    names = list(wanted or known)
    if not names:
        raise ConfigError("None of the runs has logged a metric to plot.")
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for run in runs:
            points = finite_points(run, name) if name in run.metrics else []
            marker = "o" if len(points) == 1 else None
            axes.plot([step for step, _ in points], [value for _, value in points], label=run.name, marker=marker)
        axes.set_title(name)
        axes.set_xlabel("step")
    figure.axes[0].legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} could not be written: {error}.") from error
    return f"Plot  {path}"
