"""Formats tables and numbers as text, truncated to the terminal's width if there is a terminal."""

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...trainer.runs.directory import RunDirectory


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def shortened(line: str, limit: int | None) -> str:
    """Return a line truncated to at most `limit` characters. A truncated line ends in "..."."""
    return line if limit is None or len(line) <= limit else line[: max(0, limit - 3)] + "..."


def fitting(text: str) -> str:
    """Truncate the lines of a text to the terminal's width. If stdout is not a terminal, return the text unchanged."""
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(shortened(line, limit) for line in text.splitlines())


def number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}"


def when(seconds: float) -> str:
    """Return a Unix time in seconds as a local date and time, or "-" if it is out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"


def evaluated_values(evaluation: "RunDirectory") -> str:
    """Return the values that an evaluation logged."""
    point = evaluation.last_point
    return "  ".join(f"{name} {number(float(point[name]))}" for name in metric_names(point)) or "logged nothing"


def metric_names(names: Iterable[str]) -> list[str]:
    """Return the metric names, excluding x-axes such as the step. Metrics from Legato's callbacks come last."""
    shown = (name for name in names if name not in ("step", "time", "epoch"))
    return sorted(shown, key=lambda name: name.startswith(("lr-", "throughput/", "device/")))


def folder_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder."""
    # does not follow links, whose targets are not deleted
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
