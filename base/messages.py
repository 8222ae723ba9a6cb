"""Legato's own messages, shown on stderr unless the program has set up logging."""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO


class Nowhere(io.TextIOBase):
    """Stream that drops what is written: for a program that was started without stdout or stderr (`>&-`, pythonw)."""

    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)


class Output:
    """Current stdout or stderr; writes are dropped where there is none, and once nothing reads the stream.

    `legato fit ... 2>&1 | head -1` closes both after a line, and a terminal may close. The stream is then redirected to
    /dev/null for the whole program: else the next writer, or the interpreter at exit, would fail.
    """

    nowhere: TextIO = Nowhere()  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> int:
        """Write the text, or drop it; a line is also dropped if the disk is full."""
        try:
            self._stream.write(text)  # some packages put a stream there whose `write` returns nothing
        except (OSError, ValueError) as error:
            self._fall_silent(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fall_silent(error)

    @property
    def _stream(self) -> TextIO:
        return getattr(sys, self.name) or self.nowhere

    def _fall_silent(self, error: Exception) -> None:
        if isinstance(error, ValueError) and not self._stream.closed:
            raise error  # UnicodeEncodeError, for example
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        # tqdm compares streams to see whether a bar shares one with a message.
        return other is self or other is self._stream

    def __hash__(self) -> int:
        return hash(self.name)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; one of the user's own may not be able to say, or be closed."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


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


ERASE = "\x1b[1G\x1b[J"
"""Erases the bar that rank 0 has drawn on a terminal, and draws again below. Without "\\r", at which stdout is flushed:
a line must come in one piece."""


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


STDOUT, STDERR = Output("stdout"), Output("stderr")


def let_be_seen() -> None:
    """Log to stderr, from INFO on or the level that the program has set, unless it has handlers of its own."""
    log = logging.getLogger("legato")
    if not (logging.getLogger().handlers or log.handlers):
        log.addHandler(_ToStderr())
        log.setLevel(log.level or logging.INFO)


LEVELS = {"--quiet": logging.WARNING, "--verbose": logging.DEBUG}
"""Options of a command, and the level from which its messages are shown."""


@contextmanager
def shown_from(option: str | None) -> Iterator[None]:
    """Show the messages that an option of LEVELS asks for, here and in the workers that are started in this context."""
    log = logging.getLogger("legato")
    before = log.level
    try:
        if option is not None:
            let_be_seen()
            log.setLevel(LEVELS[option])
        yield
    finally:
        log.setLevel(before)


def shown_options() -> tuple[str, ...]:
    """Return the option of LEVELS that is in force, as a command line would have it; () for neither."""
    level = logging.getLogger("legato").level
    return tuple(option for option, wanted in LEVELS.items() if wanted == level)


def is_quiet() -> bool:
    """Return whether only warnings are to be shown, and so no layout, bar or table either."""
    return logging.getLogger("legato").level > logging.INFO


def tell(text: str) -> None:
    """Print a line that tells how far a command is, unless only its result is to be shown."""
    if not is_quiet():
        print(text, file=STDOUT, flush=True)


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg] # Python 3.10 refuses StreamHandler[Any]
    """Handler that writes to the current stderr."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Output:
        return STDERR

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message on a line of its own, above the bars that tqdm has drawn."""
        tqdm = sys.modules.get("tqdm")
        # without tqdm's lock, which would be one of processes
        with nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(STDERR, nolock=True):
            super().emit(record)
