"""Text of progress displays: numbers, one or two lines of status that fit a width, and the table of epochs."""

from collections.abc import Mapping, Sequence

LEAST_BAR, MOST_BAR = 8, 30
"""Columns of a bar; where there is room for fewer than the first, there is none."""
GAP = "  "
NARROW = {"epoch": 5, "lr": 8, "time": 7}
"""Columns of the table with less than the nine characters that a metric may need."""
BLOCKS = " ▏▎▍▌▋▊▉█"


def amount(value: float) -> str:
    """Return a count with three digits: "7", "940", "12.3k", "1.25M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time as h:mm:ss, with days before it where there are some."""
    days, rest = divmod(max(0, round(seconds)), 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text


def value_text(value: float) -> str:
    """Return the value of a metric with four digits."""
    return f"{value:.4g}"


def bar(share: float, width: int, blocks: str = BLOCKS) -> str:
    """Return a bar of which a share is filled; `blocks`: from empty to full."""
    eighths = round(max(0.0, min(1.0, share)) * width * (len(blocks) - 1))
    full, part = divmod(eighths, len(blocks) - 1)
    return (blocks[-1] * full + (blocks[part] if part else "")).ljust(width)


def status_lines(
    parts: Sequence[str],
    metrics: Mapping[str, float],
    share: float | None,
    width: int,
    blocks: str = BLOCKS,
) -> list[str]:
    """Return one or two lines of at most `width` columns: the parts, a bar, the metrics.

    share: how much is done, for the bar; None: that is not known, and there is no bar.

    The bar gives way first. Metrics that do not fit beside the parts have a second line, the last of them left out
    where that is too short. Where even the parts do not fit, the last ones are left out.
    """
    shown = [f"{name} {value_text(value)}" for name, value in metrics.items()]
    head, tail = _fitting(parts, width), GAP.join(shown)
    apart = len(head) + len(GAP) + len(tail) > width
    line = head if apart or not tail else f"{head}{GAP}{tail}"
    room = width - len(line) - len(GAP) - 2
    if share is not None and room >= LEAST_BAR:
        drawn = f"{GAP}|{bar(share, min(room, MOST_BAR), blocks)}|"
        line = head + drawn + line[len(head) :]
    return [line, _fitting(shown, width)] if apart and tail else [line]


def _fitting(texts: Sequence[str], width: int) -> str:
    """Join as many of the first texts as fit; of a first one that does not, the beginning."""
    line = ""
    for text in texts:
        longer = f"{line}{GAP}{text}" if line else text
        if len(longer) > width:
            break
        line = longer
    return line or "".join(texts[:1])[:width]


class EpochTable:
    """A table that grows by a row an epoch; its columns are those of the first row, and new ones begin a new head.

    Columns that do not fit the width are left out, from the right.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.columns: list[str] = []

    def row(self, values: Mapping[str, str], mark: str = "") -> list[str]:
        """Return the lines of one more row: the row alone, or with the head before it. `mark` is put at its end."""
        lines = []
        if not values.keys() <= set(self.columns):
            self.columns = list(dict.fromkeys((*values, *self.columns)))
            lines = ["", self._line({name: name for name in self.columns})]
        return [*lines, self._line(values) + mark]

    def _line(self, cells: Mapping[str, str]) -> str:
        line = ""
        for name in self.columns:
            cell = f"{cells.get(name, ''):>{max(len(name), NARROW.get(name, 9))}}"
            longer = f"{line}{GAP}{cell}" if line else cell
            if len(longer) + 2 > self.width:  # two for the mark
                break
            line = longer
        return line
