"""Legato's own messages, shown on stderr unless the program has set up logging."""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Output:
    """Current stdout or stderr. A text is dropped where nothing takes it: training does not end with its terminal."""

    nowhere = io.TextIOBase()  # of a program that was started without the stream (`>&-`, pythonw): takes nothing

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        self._try(lambda stream: stream.write(text))
        return len(text)  # some packages put a stream there whose `write` returns nothing

    def flush(self) -> None:
        """Flush the stream."""
        self._try(lambda stream: stream.flush())

    def _try(self, action: Callable[[Any], object]) -> None:
        # looked up for each text: notebooks, tests and redirect_stdout replace the stream
        stream = getattr(sys, self.name) or self.nowhere
        try:
            action(stream)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
                # The reader has gone (`legato fit ... | head -1`), or the terminal. For the whole program, since a
                # `print` of a task, or the interpreter's flush at its exit, would fail next.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except ValueError:
            if not stream.closed:
                raise  # a UnicodeEncodeError, for example

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self.name) or self.nowhere, name)

    def __eq__(self, other: object) -> bool:
        # tqdm compares streams to see whether a bar shares one with a message
        return other is self or other is getattr(sys, self.name)

    def __hash__(self) -> int:
        return hash(self.name)


STDOUT, STDERR = Output("stdout"), Output("stderr")


def let_be_seen() -> None:
    """Log to stderr, from INFO on or the level that the program has set, unless it has handlers of its own."""
    log = logging.getLogger("legato")
    if not (logging.getLogger().handlers or log.handlers):
        log.addHandler(_ToStderr())
        log.setLevel(log.level or logging.INFO)


class _ToStderr(logging.Handler):
    """Handler that writes to the current stderr, above the bars that tqdm has drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        text, tqdm = self.format(record), sys.modules.get("tqdm")  # without an import: who draws a bar has it
        if tqdm is None:
            print(text, file=STDERR, flush=True)
        else:
            tqdm.tqdm.write(text, file=STDERR, nolock=True)  # its lock would be one of processes
            STDERR.flush()


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
