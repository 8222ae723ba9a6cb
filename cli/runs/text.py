"""Tables and numbers as text, cut to the terminal; as wide as they get where the output is none."""

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...trainer.runs.directory import RunDirectory


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, the first of which is the heading."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def shortened(line: str, limit: int | None) -> str:
    """Return a line of at most `limit` columns, the last of which say so where something was left out."""
    return line if limit is None or len(line) <= limit else line[: max(0, limit - 3)] + "..."


def fitting(text: str) -> str:
    """Return a text whose lines are cut to the terminal; whole where the output is none."""
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(shortened(line, limit) for line in text.splitlines())


def number(value: float) -> str:
    """Return a number in four digits."""
    return f"{value:.4g}"


def when(seconds: float) -> str:
    """Return a time in seconds since 1970 as local date and time; "-" for one that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"


def evaluated_values(evaluation: "RunDirectory") -> str:
    """Return the values that an evaluation has logged."""
    point = evaluation.last_point
    return "  ".join(f"{name} {number(float(point[name]))}" for name in metric_names(point)) or "logged nothing"


def metric_names(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, Legato's own last; without the x-axes."""
    shown = (name for name in names if name not in ("step", "time", "epoch"))
    return sorted(shown, key=lambda name: name.startswith(("lr-", "throughput/", "device/")))


def folder_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    # what a link points to is not deleted with it, and not counted
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(one.lstat().st_size for one in path.rglob("*") if one.is_symlink() or not one.is_dir())
