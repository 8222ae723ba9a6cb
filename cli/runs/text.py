"""Tables, numbers and charts as text, cut to the terminal; as wide as they get where the output is none."""

import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...trainer.runs.directory import RunDirectory

BARS = "▁▂▃▄▅▆▇█"
"""Heights of a chart, from low to high."""


def width() -> int | None:
    """Return the columns of the terminal; None if the output is none, and lines need no cutting."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, the first of which is the heading."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def shortened(line: str, limit: int | None) -> str:
    """Return a line of at most `limit` columns, the last of which say so where something was left out."""
    return line if limit is None or len(line) <= limit else line[: max(0, limit - 3)] + "..."


def fitting(text: str) -> str:
    """Return a text whose lines are cut to the terminal."""
    limit = width()
    return "\n".join(shortened(line, limit) for line in text.splitlines())


def number(value: float) -> str:
    """Return a number in four digits."""
    return f"{value:.4g}"


def sparkline(values: Sequence[float], columns: int = 24) -> str:
    """Return a chart of one line: means of equal parts of the values; a space for a part without a finite one."""
    count = min(columns, len(values))
    parts = (values[part * len(values) // count : (part + 1) * len(values) // count] for part in range(count))
    finite = [[value for value in part if math.isfinite(value)] for part in parts]
    means = [sum(part) / len(part) if part else math.nan for part in finite]
    drawn = [mean for mean in means if math.isfinite(mean)]
    low, spread = min(drawn, default=0.0), max(drawn, default=0.0) - min(drawn, default=0.0)
    levels = (round((mean - low) / (spread or 1.0) * (len(BARS) - 1)) if math.isfinite(mean) else -1 for mean in means)
    return "".join(" " if level < 0 else BARS[level] for level in levels)


def when(seconds: float) -> str:
    """Return a time in seconds since 1970 as local date and time; "-" for one that no calendar has."""
    import time

    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"


def evaluated_values(evaluation: "RunDirectory") -> str:
    """Return the values that an evaluation has logged."""
    point = evaluation.last_point
    return "  ".join(f"{name} {number(float(point[name]))}" for name in metric_names(point)) or "logged nothing"


def plural(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def step_range(steps: Sequence[Any]) -> str:
    """Return the first and the last of some steps."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def metric_names(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, Legato's own last; without the x-axes."""
    shown = (name for name in names if name not in ("step", "time", "epoch"))
    return sorted(shown, key=lambda name: name.startswith(("lr-", "throughput/", "device/")))


def folder_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(one.lstat().st_size for one in path.rglob("*") if one.is_symlink() or not one.is_dir())
