"""Legato's messages, which are shown on stderr unless the program has configured logging."""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Output:
    """The current stdout or stderr. Text is dropped if the stream is closed, so training can outlive its terminal."""

    nowhere = io.TextIOBase()  # used if the program was started without the stream (`>&-`, pythonw)

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> int:
        """Write the text, or drop it if the stream is closed."""
        self._try(lambda stream: stream.write(text))
        return len(text)  # some packages install a stream whose `write` returns None

    def flush(self) -> None:
        """Flush the stream."""
        self._try(lambda stream: stream.flush())

    def _try(self, action: Callable[[Any], object]) -> None:
        # looked up on each call, because notebooks, tests and redirect_stdout replace the stream
        stream = getattr(sys, self.name) or self.nowhere
        try:
            action(stream)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
                # The reader (`legato fit ... | head -1`) or the terminal is gone. Redirect the descriptor for the whole
                # program: otherwise a task's `print` or the interpreter's flush at exit would fail next.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except ValueError:
            if not stream.closed:
                raise  # such as a UnicodeEncodeError

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self.name) or self.nowhere, name)

    def __eq__(self, other: object) -> bool:
        # tqdm compares streams to find the bars that share a message's stream
        return other is self or other is getattr(sys, self.name)

    def __hash__(self) -> int:
        return hash(self.name)


STDOUT, STDERR = Output("stdout"), Output("stderr")


def let_be_seen() -> None:
    """Log to stderr, unless the program has set up handlers. If the program has not set a log level, set it to INFO."""
    log = logging.getLogger("legato")
    if not (logging.getLogger().handlers or log.handlers):
        log.addHandler(_ToStderr())
        log.setLevel(log.level or logging.INFO)


class _ToStderr(logging.Handler):
    """Handler that writes to the current stderr, above tqdm's bars."""

    def emit(self, record: logging.LogRecord) -> None:
        text, tqdm = self.format(record), sys.modules.get("tqdm")  # a program with bars has imported it
        if tqdm is None:
            print(text, file=STDERR, flush=True)
        else:
            tqdm.tqdm.write(text, file=STDERR, nolock=True)  # tqdm's lock would be shared between processes
            STDERR.flush()


LEVELS = {"--quiet": logging.WARNING, "--verbose": logging.DEBUG}
"""Log level for each command-line option."""


@contextmanager
def shown_from(option: str | None) -> Iterator[None]:
    """Within this context and in workers started in it, use the log level of a command-line option (see LEVELS)."""
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
    """Return the command-line option for the current log level (see LEVELS); () if there is none."""
    level = logging.getLogger("legato").level
    return tuple(option for option, option_level in LEVELS.items() if option_level == level)


def is_quiet() -> bool:
    """Return whether to show only warnings and hide the layout, progress bars and tables."""
    return logging.getLogger("legato").level > logging.INFO


def tell(text: str) -> None:
    """Print a line about a command's progress unless only warnings are shown."""
    if not is_quiet():
        print(text, file=STDOUT, flush=True)
