"""`legato show`: one run: its state, config, metrics, last error and files."""

import shlex
from argparse import Namespace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, did_you_mean
from ...base.quantities import format_bytes, time_taken
from ...base.run_names import EVENT_FILES
from ...trainer.runs.directory import RunDirectory, find_run
from ...trainer.runs.record import FILES, read_starts
from ...trainer.runs.run_file import FAILED
from .differences import config_of
from .text import (
    chart,
    evaluated_values,
    fitting,
    folder_size,
    metric_names,
    number,
    plural,
    sparkline,
    step_range,
    table,
    when,
)

LAST_LINES = 12
"""Lines of a traceback that are shown."""


def run_show(arguments: Namespace) -> None:
    """Print what a run directory tells. Raises ConfigError if there is no such run."""
    run = find_run(arguments.run)
    if arguments.metric is not None and arguments.metric not in run.metrics:
        names = metric_names(run.metrics)
        hint = did_you_mean(arguments.metric, names) or f" It has logged {', '.join(names) or 'nothing'}."
        raise ConfigError(f"{run.name} has not logged {arguments.metric!r}.{hint}")
    parts = [heading(run), error_text(run), config_text(run), metrics_text(run, arguments.metric)]
    parts += [evaluations_text(run), files_text(run)]
    print(fitting("\n\n".join(part for part in parts if part)))


def heading(run: RunDirectory) -> str:
    """Return the first lines: state, step, time, best value."""
    status = run.status
    steps, epochs = status.get("max_steps"), status.get("max_epochs")
    step = f"step {run.step}" + (f" of {steps}" if isinstance(steps, int) and steps > 0 else "")
    epoch = f", epoch {run.epoch}" if run.epoch is not None else ""
    epoch += f" of {epochs}" if epoch and isinstance(epochs, int) and epochs > 0 else ""
    rows = [["run", f"{run.name}  ({run.path})"], ["state", f"{run.state}, {step}{epoch}"]]
    rows.append(["begun", f"{when(run.began)}, trained for {time_taken(run.seconds)}"])
    if run.best is not None:
        rows.append(["best", f"{run.best.metric} {number(run.best.value)} ({run.best.mode})"])
    rows += start_rows(run)
    return "\n".join(f"{name:<7}{text}" for name, text in rows)


def start_rows(run: RunDirectory) -> list[list[str]]:
    """Return how the run was started the last time: the command, where, and the commit of the code."""
    try:
        found = read_starts(run.path)[-1]
        program, *words = map(str, found["arguments"])
        where = [
            f"{found['processes']} x {found['device']} on {found['host']['name']}",
            f"strategy {found['strategy']}",
        ]
        code = found["git"] or {}
        if code.get("commit"):
            changed = f" and {code['diff_file']}" if code.get("diff_file") else ""
            where.append(f"commit {str(code['commit'])[:10]}{changed}")
    except (IndexError, KeyError, TypeError, AttributeError, ValueError):  # there is none, or somebody has edited it
        return []
    return [["by", shlex.join([Path(program).name, *words])], ["on", ", ".join(where)]]


def error_text(run: RunDirectory) -> str:
    """Return the last error, with the end of its traceback; "" if there is none."""
    if not run.error:
        return ""
    lines = run.traceback.rstrip().splitlines()[-LAST_LINES:] if run.state == FAILED and run.traceback else [run.error]
    return "\n".join(["last error:", *(f"  {line}" for line in lines)])


def config_text(run: RunDirectory) -> str:
    """Return the values of the config that the run has set."""
    if not run.config:
        return "config: none is stored; the run is a script's."
    keys = run.given_keys
    lines = (f"  {key}: {value}" for key, value in config_of(run).items() if keys is None or key in keys)
    return "\n".join(["config, without defaults:" if keys is not None else "config:", *lines])


def metrics_text(run: RunDirectory, wanted: str | None = None) -> str:
    """Return each metric with its first, last and extreme values and a chart, and one of them larger."""
    metrics = {name: known for name in metric_names(run.metrics) if (known := finite_points(run, name))}
    if not metrics:
        return "metrics: none"
    rows = [["metric", "first", "last", "min", "max", ""]]
    for name, points in metrics.items():
        values = [value for _, value in points]
        rows.append([name, *map(number, (values[0], values[-1], min(values), max(values))), sparkline(values)])
    chosen = wanted if wanted in metrics else run.best.metric if run.best is not None else None
    lines = ["metrics:", *(f"  {line}" for line in table(rows).splitlines())]
    if chosen in metrics and len(metrics[chosen]) > 1:
        points = metrics[chosen]
        drawn = chart([value for _, value in points], points[0][0], points[-1][0])
        lines += ["", f"{chosen} over steps:", *(f"  {line}" for line in drawn.splitlines())]
    return "\n".join(lines)


def evaluations_text(run: RunDirectory) -> str:
    """Return the evaluations of the run's checkpoints with their values; "" if there are none."""
    rows = [[one.name, when(one.began), f"step {one.step}", evaluated_values(one)] for one in run.evaluations]
    return "\n".join(["evaluations:", *(f"  {line}" for line in table(rows).splitlines())]) if rows else ""


def finite_points(run: RunDirectory, name: str) -> list[tuple[int, float]]:
    """Return the steps and values at which a metric was logged."""
    pairs: Any = zip(run.metrics["step"].tolist(), run.metrics[name].tolist(), strict=True)
    return [(step, value) for step, value in pairs if value == value and abs(value) != float("inf")]


def files_text(run: RunDirectory) -> str:
    """Return what the directory holds, a line each."""
    rows, events = [], list(run.path.glob(f"{EVENT_FILES}*"))
    for path in sorted(run.path.iterdir()):
        if path.name.startswith(".") or path in events[1:]:
            continue
        if path in events:
            rows.append([f"{EVENT_FILES}*", format_bytes(sum(map(folder_size, events))), file_text(path)])
            continue
        held = run.checkpoints if path.name == "checkpoints" else []
        text = file_text(path)
        if held:
            steps = [one.step for one in held if one.complete]
            text = f"{plural(len(held), 'checkpoint')}, {step_range(steps)}" if steps else "no complete checkpoint"
        rows.append([path.name + "/" * path.is_dir(), format_bytes(folder_size(path)), text])
    lines = table(rows).splitlines() if rows else ["nothing"]
    return "\n".join(["files:", *(f"  {line}" for line in lines)])


def file_text(path: Path) -> str:
    """Return the line that says what a file of a run directory is; "" for one that Legato does not write."""
    name = path.name + "/" * path.is_dir()
    return next((text for pattern, text in FILES.items() if fnmatch(name, pattern)), "")
