"""Results of a validation or test run: the return value and the printed table."""

from collections.abc import Container, Sequence
from shutil import get_terminal_size

from torch import Tensor

from ...trainer.metrics.reduce import LOADER_MARK

NARROWEST = 25
"""Minimum number of characters in a column."""


def only_logged(results: Sequence[dict[str, float]], logged: Container[str]) -> list[dict[str, float]]:
    """Return the results whose names are in `logged`. If a value is also logged per step, its name is NAME_epoch."""
    return [{name: value for name, value in metrics.items() if name in logged} for metrics in results]


def print_results(results: Sequence[dict[str, Tensor]], stage: str) -> None:
    """Print a table with a row for each metric and a column for each loader."""
    columns = [{name.partition(LOADER_MARK)[0]: _shown(value) for name, value in row.items()} for row in results]
    names = sorted({name for column in columns for name in column})
    if not names:
        return
    heads = [f"DataLoader {index}" for index in range(len(columns))]
    terminal = get_terminal_size(fallback=(120, 30)).columns or 120
    width = min(max(NARROWEST, *map(len, names), *map(len, heads)), terminal // 2)
    at_once = max(1, (terminal - width) // width)
    for start in range(0, len(columns), at_once):
        shown = [f"{stage} metric".capitalize(), *heads[start : start + at_once]]
        line = "-" * width * len(shown)
        rows = [[name, *(column.get(name, " ") for column in columns[start : start + at_once])] for name in names]
        texts = ["".join(f"{text:^{width}}" for text in row) for row in (shown, *rows)]
        print(line, texts[0], line, *texts[1:], line, sep="\n")


def _shown(value: Tensor) -> str:
    return str(value.item() if value.numel() == 1 else value.tolist())
