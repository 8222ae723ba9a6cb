"""Legato's own messages: seen on stderr where nobody has set up logging."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

making_room: Callable[[], AbstractContextManager[Any]] = nullcontext
"""What a message is written in: a progress bar gives up its line, and comes again below."""


class Output:
    """Stdout or stderr as it is at that moment, for what a run can do without: where nobody reads it, it falls silent.

    `legato fit ... 2>&1 | head -1` closes both after a line; a terminal may go away. Then the stream leads nowhere from
    there on, also for the rest of the program: else whoever writes next, or the interpreter when it ends, would fail.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> int:
        """Write, or drop the text; a line that does not fit on the disk is dropped too."""
        try:
            return int(self._stream.write(text))
        except (OSError, ValueError) as error:
            self._fall_silent(error)
            return len(text)

    def flush(self) -> None:
        """Hand over what was written."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fall_silent(error)

    @property
    def _stream(self) -> TextIO:
        found: TextIO = getattr(sys, self.name)
        return found

    def _fall_silent(self, error: Exception) -> None:
        if isinstance(error, ValueError) and not self._stream.closed:
            raise error  # it cannot be encoded, for one
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._stream  # tqdm asks whether a bar is where a message goes

    def __hash__(self) -> int:
        return hash(self.name)


STDOUT, STDERR = Output("stdout"), Output("stderr")


def let_be_seen() -> None:
    """Show what Legato logs from INFO on, unless the program has chosen itself what it wants to see and where."""
    log = logging.getLogger("legato")
    if not (logging.getLogger().handlers or log.handlers or log.level):
        log.addHandler(_ToStderr())
        log.setLevel(logging.INFO)


class _ToStderr(logging.StreamHandler[Any]):
    """Writes to what stderr is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Output:
        return STDERR

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message on a line of its own."""
        with making_room():
            super().emit(record)
