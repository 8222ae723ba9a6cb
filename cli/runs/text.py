"""Tables, numbers and charts as text, cut to the terminal; as wide as they get where the output is none."""

import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...trainer.runs.directory import RunDirectory

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=*#%@"
"""Heights of a chart from low to high; the second where the output cannot show the first."""


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
    parts = min(columns, len(values))
    return "".join(row[0] for row in zip(*_heights(values, parts, 1), strict=True))


def chart(values: Sequence[float], first: int, last: int, columns: int = 60, rows: int = 8) -> str:
    """Return a chart of several lines with its range on the left, over the steps `first` to `last`."""
    finite = [one for one in values if math.isfinite(one)]
    if not finite:
        return ""
    lines = ["".join(line) for line in _heights(values, min(columns, len(values)), rows)]
    labels = [number(max(finite)), *[""] * (rows - 2), number(min(finite))]
    margin = max(map(len, labels))
    drawn = [f"{label:>{margin}} |{line}".rstrip() for label, line in zip(labels, lines, strict=True)]
    foot = f"{first:<{max(len(str(first)) + 1, len(lines[0]) - len(str(last)))}}{last}"
    return "\n".join([*drawn, f"{'':>{margin}}  {foot}"])


def _heights(values: Sequence[float], parts: int, rows: int) -> list[list[str]]:
    """Return rows of characters, top first: bars of the means of equal parts of the values."""
    means = []
    for part in range(parts):
        inside = values[part * len(values) // parts : (part + 1) * len(values) // parts]
        finite = [float(one) for one in inside if math.isfinite(one)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [one for one in means if math.isfinite(one)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    bars = BARS if _can_show(BARS) else PLAIN_BARS
    drawn = [[" "] * parts for _ in range(rows)]
    for column, mean in enumerate(means):
        if math.isfinite(mean):
            level = round((mean - low) / (high - low) * (rows * len(bars) - 1)) if high > low else 0
            for row in range(level // len(bars)):
                drawn[rows - 1 - row][column] = bars[-1]
            drawn[rows - 1 - level // len(bars)][column] = bars[level % len(bars)]
    return drawn


def _can_show(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


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
