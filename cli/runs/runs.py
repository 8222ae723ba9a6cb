"""`legato runs`: lists the runs below a folder."""

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
"""Number of newest runs to show without --all."""
PAIRS_SHOWN = 6
"""Maximum number of keys in the column "differs by"; `legato compare` shows all."""


def run_runs(arguments: Namespace) -> None:
    """Print the table of runs. Raises ConfigError if the folder does not exist."""
    root = arguments.dir
    # the default folder may not exist before the first run
    runs = find_runs(root) if Path(root).is_dir() or root != ROOT else []
    if arguments.state:
        runs = [run for run in runs if run.state == arguments.state]
    shown = runs if arguments.all else runs[-MOST_ROWS:]
    shown = sorted(shown, key=ORDERS[arguments.sort])
    if not shown:
        print(f"There are no {f'{arguments.state} ' if arguments.state else ''}runs in {root}.")
        return
    print(fitting(table(table_rows(shown))))
    if len(shown) < len(runs):
        print(f"{counted(len(runs) - len(shown), 'older run')} not shown; --all shows them.")


def table_rows(runs: Sequence[RunDirectory]) -> list[list[str]]:
    """Return the rows of the table of runs, heading first."""
    rows = [["name", "state", "step", "best", "duration", "differs by"]]
    for run, values in zip(runs, differing_values(runs), strict=True):
        best = "-" if run.best is None else f"{run.best.metric} {number(run.best.value)}"
        pairs = [f"{key}={value}" for key, value in values.items()]
        more = f" and {len(pairs) - PAIRS_SHOWN} more" if len(pairs) > PAIRS_SHOWN else ""
        differs = " ".join(pairs[:PAIRS_SHOWN]) + more
        rows.append([run.name, run.state, str(run.step), best, time_taken(run.seconds), differs])
        rows += [[f"  {e.name}", "", str(e.step), "", "", evaluated_values(e)] for e in run.evaluations]
    return rows


def signed_best(run: RunDirectory) -> float:
    """Return the best value, negated if smaller is better, or -inf if there is no value."""
    if run.best is None:
        return -math.inf
    return run.best.value if run.best.mode == "max" else -run.best.value


ORDERS: dict[str, Callable[[RunDirectory], Any]] = {
    "time": lambda run: 0,  # find_runs sorts by time
    "name": lambda run: run.name,
    "best": signed_best,
    "step": lambda run: run.step,
    "duration": lambda run: run.seconds or 0,
}
