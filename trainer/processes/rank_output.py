"""RankOutput: lines that ranks other than 0 print begin with `[rank N]`."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from ...base.messages import is_terminal

ERASE = "\x1b[1G\x1b[J"
"""Erases the bar that rank 0 has drawn on a terminal, and draws again below. Without "\\r", at which stdout is flushed:
a line must come in one piece."""


class RankOutput:
    """Stream of a rank other than 0: begins each line with `[rank N]`.

    Whole lines are passed on, each in one piece, so that lines of several processes do not mix, and a part of one when
    it is flushed.
    """

    def __init__(self, stream: TextIO, rank: int) -> None:
        self.stream, self.prefix, self._rest = stream, f"[rank {rank}] ", ""
        self._in_line = False
        """Whether the newest text did not end a line."""

    def write(self, text: str) -> int:
        """Pass on what ends with a line."""
        lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._put(lines + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on the rest, too."""
        rest, self._rest = self._rest, ""
        if rest:
            self._put(rest)
        self.stream.flush()

    def _put(self, text: str) -> None:
        lines = text.splitlines(keepends=True)
        marked = [line if index == 0 and self._in_line else self.prefix + line for index, line in enumerate(lines)]
        if not self._in_line and is_terminal(self.stream):
            marked.insert(0, ERASE)
        self._in_line = not text.endswith("\n")
        self.stream.write("".join(marked))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stream"], name)


def mark_output(rank: int) -> Callable[[], None]:
    """Begin each line that this process prints with its rank; return the function that ends it."""
    outputs = {name: RankOutput(getattr(sys, name), rank) for name in ("stdout", "stderr") if getattr(sys, name)}
    for name, output in outputs.items():
        setattr(sys, name, output)

    def undo() -> None:
        for name, output in outputs.items():
            output.flush()
            if getattr(sys, name) is output:  # else somebody has replaced it since
                setattr(sys, name, output.stream)

    return undo
