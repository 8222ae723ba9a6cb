"""`legato runs`: a table of the runs below a folder."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...base.quantities import counted, time_taken
from ...trainer.runs.directory import ROOT, RunDirectory, find_runs
from .differences import differing_values
from .text import evaluated_values, fitting, number, table

MOST_ROWS = 50
"""The newest runs that are shown, unless all are asked for."""
PAIRS_SHOWN = 6
"""Keys at most in the column "differs by"; `legato compare` shows all."""


def run_runs(arguments: Namespace) -> None:
    """Print the table. Raises ConfigError if the folder is none."""
    root = arguments.dir
    # before the first run there is no folder, which is no mistake unless it was named
    found = find_runs(root) if Path(root).is_dir() or root != ROOT else []
    if arguments.state:
        found = [run for run in found if run.state == arguments.state]
    shown = found if arguments.all else found[-MOST_ROWS:]
    shown = sorted(shown, key=ORDERS[arguments.sort])
    if not shown:
        print(f"There are no runs{f' that are {arguments.state}' if arguments.state else ''} in {root}.")
        return
    print(fitting(table(table_rows(shown))))
    if len(shown) < len(found):
        print(f"{counted(len(found) - len(shown), 'older run')} not shown; --all shows them.")


def table_rows(runs: Sequence[RunDirectory]) -> list[list[str]]:
    """Return the table's rows, the heading first."""
    rows = [["name", "state", "step", "best", "duration", "differs by"]]
    for run, own in zip(runs, differing_values(runs), strict=True):
        best = "-" if run.best is None else f"{run.best.metric} {number(run.best.value)}"
        pairs = [f"{key}={value}" for key, value in own.items()]
        more = f" and {len(pairs) - PAIRS_SHOWN} more" if len(pairs) > PAIRS_SHOWN else ""
        differs = " ".join(pairs[:PAIRS_SHOWN]) + more
        rows.append([run.name, run.state, str(run.step), best, time_taken(run.seconds), differs])
        rows += [[f"  {one.name}", "", str(one.step), "", "", evaluated_values(one)] for one in run.evaluations]
    return rows


def signed_best(run: RunDirectory) -> float:
    """Return the best value, so that more is better; less than any other where there is none."""
    if run.best is None:
        return -math.inf
    return run.best.value if run.best.mode == "max" else -run.best.value


ORDERS: dict[str, Callable[[RunDirectory], Any]] = {
    "time": lambda run: 0,  # as they were found: by time
    "name": lambda run: run.name,
    "best": signed_best,
    "step": lambda run: run.step,
    "duration": lambda run: run.seconds or 0,
}
