"""`legato runs`: a table of the runs below a folder."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ...base.quantities import time_taken
from ...trainer.runs.directory import ROOT, RunDirectory, find_runs
from .differences import differing_values
from .text import evaluated_values, fitting, metric_names, number, plural, table

MOST_ROWS = 50
"""The newest runs that are shown, unless all are asked for."""
SORT_KEYS = ("time", "name", "best", "step", "duration")


def run_runs(arguments: Namespace) -> None:
    """Print the table. Raises ConfigError if the folder is none."""
    root = Path(arguments.dir)
    found = find_runs(root) if root.is_dir() or arguments.dir != ROOT else []
    if arguments.state:
        found = [run for run in found if run.state == arguments.state]
    shown = found if arguments.all or arguments.json else found[-MOST_ROWS:]
    shown = ordered(shown, arguments.sort)
    if arguments.json:
        print(json.dumps([as_json(run) for run in shown], indent=1))
        return
    if not shown:
        print(f"There are no runs{f' that are {arguments.state}' if arguments.state else ''} in {root}.")
        return
    print(fitting(table(table_rows(shown))))
    if len(shown) < len(found):
        print(f"{plural(len(found) - len(shown), 'older run')} not shown; --all shows them.")


PAIRS_SHOWN = 6
"""Keys at most in the column "differs by"; `legato compare` shows all."""


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


def ordered(runs: Sequence[RunDirectory], key: str) -> list[RunDirectory]:
    """Return runs by one of SORT_KEYS, the best last; runs without a value come first."""
    if key == "best":
        return sorted(runs, key=lambda run: (run.best is not None, _rank(run)))
    if key in ("step", "duration"):
        return sorted(runs, key=lambda run: (run.step if key == "step" else run.seconds) or 0)
    return sorted(runs, key=lambda run: run.name) if key == "name" else list(runs)


def _rank(run: RunDirectory) -> float:
    if run.best is None:
        return 0.0
    return run.best.value if run.best.mode == "max" else -run.best.value


def as_json(run: RunDirectory) -> dict[str, object]:
    """Return a row for programs."""
    best = None if run.best is None else vars(run.best)
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "step": run.step,
        "best": best,
        "seconds": run.seconds,
        "began": run.began,
        "error": run.error,
        "evaluations": [
            {
                "name": one.name,
                "path": str(one.path),
                "step": one.step,
                "values": {name: one.last_point[name] for name in metric_names(one.last_point)},
            }
            for one in run.evaluations
        ],
    }
