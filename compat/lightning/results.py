"""Results of a validation or a test: what is returned, and the table that is printed."""

from collections.abc import Container, Sequence
from importlib.util import find_spec
from shutil import get_terminal_size
from typing import Any

from torch import Tensor

from ...trainer.metrics.reduce import LOADER_MARK

NARROWEST = 25
"""Characters of a column, at least."""


def logged_alone(results: Sequence[dict[str, float]], logged: Container[str]) -> list[dict[str, float]]:
    """Return what loggers are given too; of a value that was also logged in steps, the one named NAME_epoch."""
    return [{name: value for name, value in one.items() if name in logged} for one in results]


def print_results(results: Sequence[dict[str, Tensor]], stage: str) -> None:
    """Print a row for each metric and a column for each loader, by rich where it is installed."""
    columns = [{name.partition(LOADER_MARK)[0]: _shown(value) for name, value in one.items()} for one in results]
    names = sorted({name for column in columns for name in column})
    if not names:
        return
    heads = [f"DataLoader {index}" for index in range(len(columns))]
    terminal = get_terminal_size(fallback=(120, 30)).columns or 120
    width = min(max(NARROWEST, *map(len, names), *map(len, heads)), terminal // 2)
    at_once = max(1, (terminal - width) // width)
    for start in range(0, len(columns), at_once):
        part = columns[start : start + at_once]
        rows = [[name, *(column.get(name, " ") for column in part)] for name in names]
        _print_table([f"{stage} metric".capitalize(), *heads[start : start + at_once]], rows, width)


def _shown(value: Tensor) -> str:
    return str(value.item() if value.numel() == 1 else value.tolist())


def _print_table(heads: list[str], rows: list[list[str]], width: int) -> None:
    if find_spec("rich") is not None:
        from rich import get_console
        from rich.table import Column, Table

        styles = ["cyan", *["magenta"] * (len(heads) - 1)]
        columns: list[Any] = [
            Column(head, justify="center", style=style, width=width) for head, style in zip(heads, styles, strict=True)
        ]
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        get_console().print(table)
        return
    line = "-" * width * len(heads)
    for shown in (None, heads, None, *rows, None):
        print(line if shown is None else "".join(f"{text:^{width}}" for text in shown))
