"""Displays: where progress is drawn. In a terminal by rich or tqdm, in a notebook by tqdm, elsewhere in plain lines."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

DEFAULT_WIDTH = 80


class Display:
    """Draws nothing: base class, and the display of ranks other than 0.

    `lines` may be drawn again and again in one place; what `write` writes stays above them.
    """

    seconds_between = float("inf")
    """Least seconds between two drawings."""
    blocks: str | None = None
    """Characters of a bar, from empty to full; None: no bars."""

    @property
    def width(self) -> int:
        """Columns of a line: as many as a log file or a notebook has."""
        return 200

    def draw(self, lines: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Show these lines in place of those before; `done` of `total` for displays with bars of their own."""

    def write(self, text: str) -> None:
        """Write a line that stays."""

    def clear(self) -> None:
        """Remove the lines that were drawn."""


class PlainLines(Display):
    """Writes each drawing as a line, once a minute: for log files."""

    seconds_between = 60.0

    def draw(self, lines: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Write the lines as one."""
        self.write("  ".join(lines))

    def write(self, text: str) -> None:
        """Write a line."""
        print(text, file=_output("STDERR"), flush=True)


class Terminal(Display):
    """Base of the displays of a terminal: knows its width, and puts what the program prints above its own lines."""

    seconds_between = 0.1

    def __init__(self) -> None:
        encoding = getattr(sys.stderr, "encoding", None) or "ascii"
        self.blocks = " ▏▎▍▌▋▊▉█" if encoding.lower().replace("-", "").startswith("utf") else " #"
        self._shown: list[str] = []
        """Lines that stand on the terminal now."""
        self._in_line = False
        """Whether the program has printed a part of a line, below which to draw."""
        self._end_printing = _print_above(self._make_room)
        _write_messages_within(self.hidden)

    @property
    def width(self) -> int:
        """Columns of the terminal but one: in the last one some terminals wrap."""
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return (columns or DEFAULT_WIDTH) - 1

    def draw(self, lines: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Draw the lines."""
        if self._in_line:
            print(file=_output("STDERR"))
        self._in_line = False
        self._draw(lines)
        self._shown = list(lines)

    def write(self, text: str) -> None:
        """Write a line above."""
        with self.hidden():
            print(self._styled(text), file=_output("STDERR"), flush=True)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which the lines are not shown, so that other text can be written."""
        shown = self._shown
        self._erase()
        try:
            yield
        finally:
            if shown:
                self.draw(shown)

    def clear(self) -> None:
        """Remove the lines, and let everything be written as before."""
        self._erase()
        self._end_printing()
        _write_messages_within(nullcontext)

    def _make_room(self, text: str) -> None:
        """Remove the lines for what the program prints, until the next drawing: it may be a debugger's prompt."""
        self._erase()
        self._in_line = not text.endswith("\n") and "\r" not in text

    def _erase(self) -> None:
        if self._shown:
            self._shown = []
            print(_output("ERASE"), end="", file=_output("STDERR"), flush=True)

    def _draw(self, lines: Sequence[str]) -> None:
        """Draw the lines over those that stand there; leave the cursor in the first one."""

    def _styled(self, text: str) -> str:
        return text


class TqdmLines(Terminal):
    """Lines drawn by tqdm: each is a bar without a bar, at its own position."""

    def __init__(self) -> None:
        from tqdm import tqdm

        class Line(tqdm):  # type: ignore[type-arg]
            monitor_interval = 0
            """0: do not start tqdm's monitor thread, which would outlive the run."""

        # tqdm's default lock is shared between processes, which costs a semaphore and, under some start methods, a
        # process
        Line.set_lock(threading.RLock())
        self._kind = Line
        self._bars: list[Any] = []
        super().__init__()

    def _draw(self, lines: Sequence[str]) -> None:
        while len(self._bars) > len(lines):
            self._bars.pop().close()
        for index, text in enumerate(lines):
            if index == len(self._bars):
                options: dict[str, Any] = {"ncols": self.width, "mininterval": 0.0, "miniters": 0, "leave": False}
                made = self._kind(file=_output("STDERR"), bar_format="{desc}", position=index, desc=text, **options)
                self._bars.append(made)
            else:
                self._bars[index].ncols = self.width
                self._bars[index].set_description_str(text)

    def clear(self) -> None:
        """Remove the lines."""
        super().clear()
        while self._bars:
            self._bars.pop().close()


class RichLines(Terminal):
    """Lines coloured by rich, unless NO_COLOR is set."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.text import Text

        self._text = Text
        self._console = Console(file=_output("STDERR"), force_terminal=True, highlight=False, soft_wrap=True)
        super().__init__()

    def _draw(self, lines: Sequence[str]) -> None:
        text = self._text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        text.highlight_regex(r"\|[^|]*\|", "cyan")
        # after several lines the cursor goes back to the end of the first
        back = f"\x1b[{len(lines) - 1}A\x1b[{len(lines[0]) + 1}G" if len(lines) > 1 else ""
        print(_output("ERASE"), self._rendered(text), back, sep="", end="", file=_output("STDERR"), flush=True)

    def _styled(self, text: str) -> str:
        styled = self._text(text)
        styled.highlight_regex(r" \*$", "bold green")
        return self._rendered(styled)

    def _rendered(self, text: Any) -> str:
        with self._console.capture() as capture:
            self._console.print(text, end="")
        return capture.get()


class NotebookBar(Display):
    """A bar of tqdm's in the output of a notebook's cell."""

    seconds_between = 0.2
    width = 110  # what a cell shows of a line without scrolling

    def __init__(self) -> None:
        self._bar: Any = None

    def draw(self, lines: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Move the bar, with the lines as its text."""
        from tqdm.auto import tqdm

        text = "  ".join(lines)
        if self._bar is None:
            self._bar = tqdm(desc=text, total=total, bar_format="{bar} {desc}", mininterval=0.0, leave=False)
        elif self._bar.total != total:
            self._bar.reset(total)
        self._bar.n = done
        self._bar.set_description_str(text, refresh=False)
        self._bar.refresh()

    def write(self, text: str) -> None:
        """Write a line to the cell's output."""
        print(text, file=_output("STDOUT"), flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.total = self._bar.n  # else tqdm leaves it standing, in red
            self._bar.close()
        self._bar = None


def find_display(style: str) -> Display:
    """Return the display for where this process writes; `style`: "auto", "rich", "tqdm" or "lines"."""
    if style == "lines":
        return PlainLines()
    if in_notebook():
        return NotebookBar()
    if not sys.stderr.isatty():
        return PlainLines()
    if style != "tqdm":
        try:
            return RichLines()
        except ImportError:
            if style == "rich":
                raise
    return TqdmLines()


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    shell = sys.modules.get("IPython")
    kernel = None if shell is None else shell.get_ipython()
    return kernel is not None and type(kernel).__name__ == "ZMQInteractiveShell"


def _output(name: str) -> Any:
    """Return "STDOUT" or "STDERR", which ignores writes after its reader has gone, or ERASE."""
    from ..base import messages

    return getattr(messages, name)


def _write_messages_within(by: Any) -> None:
    """Set the context in which Legato's log messages are written, so that they do not break what is drawn."""
    from ..base import messages

    messages.making_room = by


def _print_above(make_room: Callable[[str], None]) -> Callable[[], None]:
    """Have what is printed on this terminal announced to `make_room`; return the function that ends it."""
    from ..base.messages import AboveLines, is_terminal, replace_streams

    return replace_streams(lambda stream: AboveLines(stream, make_room) if is_terminal(stream) else None)
