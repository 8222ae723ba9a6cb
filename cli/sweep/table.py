"""The results of a sweep: a table for the terminal, and the same as summary.csv and summary.json."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runs.text import shortened, table
from .folder import write_json, write_text
from .trials import Trial

_WIDEST = 28


def ranked(trials: Sequence[Trial], mode: str) -> list[dict[str, Any]]:
    """Return a row for each trial: the done ones with the best first, then the failed, then the unfinished ones."""
    rows = []
    for trial in trials:
        result = trial.result or {"state": "unfinished"}
        rows.append(
            {
                "trial": trial.index,
                **trial.values,
                "value": result.get("value"),
                "step": result.get("step"),
                "seconds": result.get("seconds"),
                "state": result["state"],
                "run": str(trial.folder.name if "run" not in result else f"{trial.folder.name}/{result['run']}"),
                "error": result.get("error", ""),
            }
        )
    sign = 1 if mode == "min" else -1
    order = ("done", "failed", "unfinished")
    return sorted(rows, key=lambda row: (order.index(row["state"]), sign * (row["value"] or 0), row["trial"]))


def write_summary(directory: Path, trials: Sequence[Trial], mode: str) -> None:
    """Write summary.json and summary.csv into a sweep's directory."""
    rows = ranked(trials, mode)
    write_json(directory / "summary.json", rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(directory / "summary.csv", text.getvalue())


def results(trials: Sequence[Trial], metric: str, mode: str) -> str:
    """Return the results as text, best first."""
    keys = list(trials[0].values) if trials else []
    heads = ["trial", *keys, metric, "step", "seconds", "state"]
    names = ("trial", *keys, "value", "step", "seconds", "state")
    return table([heads, *([_cell(row[name]) for name in names] for row in ranked(trials, mode))])


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return shortened(text, _WIDEST)
