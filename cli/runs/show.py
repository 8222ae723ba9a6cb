"""`legato show`: shows a run's state, config, metrics, last error and checkpoints."""

import math
import shlex
from argparse import Namespace
from pathlib import Path

from ...base.quantities import counted, format_bytes, time_taken
from ...trainer.runs.directory import RunDirectory, find_run
from ...trainer.runs.record import read_starts
from ...trainer.runs.run_file import FAILED
from .differences import config_of
from .text import (
    evaluated_values,
    fitting,
    metric_names,
    number,
    table,
    when,
)

LAST_LINES = 12
"""Number of lines of a traceback to show."""


def run_show(arguments: Namespace) -> None:
    """Print the contents of a run directory. Raises ConfigError if the run does not exist."""
    run = find_run(arguments.run)
    sections = [
        heading(run),
        error_text(run),
        config_text(run),
        metrics_text(run),
        evaluations_text(run),
        checkpoints_text(run),
    ]
    print(fitting("\n\n".join(section for section in sections if section)))


def heading(run: RunDirectory) -> str:
    """Return the heading, which shows the run's state, step, time and best value."""
    status = run.status
    steps, epochs = status.get("max_steps"), status.get("max_epochs")
    step = f"step {run.step}" + (f" of {steps}" if isinstance(steps, int) and steps > 0 else "")
    epoch = f", epoch {run.epoch}" if run.epoch is not None else ""
    epoch += f" of {epochs}" if epoch and isinstance(epochs, int) and epochs > 0 else ""
    rows = [["run", f"{run.name}  ({run.location})"], ["state", f"{run.state}, {step}{epoch}"]]
    rows.append(["start", f"{when(run.began)}, trained for {time_taken(run.seconds)}"])
    if run.best is not None:
        rows.append(["best", f"{run.best.metric} {number(run.best.value)} ({run.best.mode})"])
    rows += start_rows(run)
    return "\n".join(f"{name:<7}{text}" for name, text in rows)


def start_rows(run: RunDirectory) -> list[list[str]]:
    """Return rows with the command, machine and commit recorded when the run last started."""
    try:
        start = read_starts(run.path)[-1]
        program, *words = map(str, start["arguments"])
        where = f"{start['processes']} x {start['device']} on {start['host']['name']}, strategy {start['strategy']}"
        code = start["git"] or {}
        commit = f", commit {str(code['commit'])[:10]}" if code.get("commit") else ""
        changed = f" and {code['diff_file']}" if code.get("diff_file") else ""
    except (IndexError, KeyError, TypeError, AttributeError, ValueError):  # the file may be missing or edited
        return []
    return [["by", shlex.join([Path(program).name, *words])], ["on", where + commit + changed]]


def error_text(run: RunDirectory) -> str:
    """Return the last error with the end of its traceback, or "" if there is no error."""
    if not run.error:
        return ""
    # the end of a traceback shows the line that failed
    lines = run.traceback.rstrip().splitlines()[-LAST_LINES:] if run.state == FAILED and run.traceback else [run.error]
    return "\n".join(["last error:", *(f"  {line}" for line in lines)])


def config_text(run: RunDirectory) -> str:
    """Return the config's values without defaults."""
    if not run.config:
        return "config: not stored, since a script started the run."
    keys = run.given_keys
    lines = (f"  {key}: {value}" for key, value in config_of(run).items() if keys is None or key in keys)
    return "\n".join(["config, without defaults:" if keys is not None else "config:", *lines])


def metrics_text(run: RunDirectory) -> str:
    """Return the first, last, smallest and largest value of each metric."""
    rows = [["metric", "first", "last", "min", "max"]]
    for name in metric_names(run.metrics):
        if values := [value for value in run.metrics[name].tolist() if math.isfinite(value)]:
            rows.append([name, *map(number, (values[0], values[-1], min(values), max(values)))])
    return "\n".join(["metrics:", *indented(table(rows))]) if len(rows) > 1 else "metrics: none"


def evaluations_text(run: RunDirectory) -> str:
    """Return the evaluations of the run's checkpoints with their values, or "" if there are none."""
    rows = [
        [evaluation.name, when(evaluation.began), f"step {evaluation.step}", evaluated_values(evaluation)]
        for evaluation in run.evaluations
    ]
    return "\n".join(["evaluations:", *indented(table(rows))]) if rows else ""


def checkpoints_text(run: RunDirectory) -> str:
    """Return the number, size and steps of the checkpoints."""
    steps = [str(entry.step) for entry in run.checkpoints if entry.complete]
    size = format_bytes(sum(entry.size for entry in run.checkpoints))
    return f"{counted(len(run.checkpoints), 'checkpoint')}, {size}; complete: {', '.join(steps) or 'none'}"


def indented(text: str) -> list[str]:
    """Return the lines of a text, each indented by two spaces."""
    return [f"  {line}" for line in text.splitlines()]
