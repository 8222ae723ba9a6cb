"""Legato's own messages: seen on stderr where nobody has set up logging."""

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

making_room: Callable[[], AbstractContextManager[Any]] = nullcontext
"""What a message is written in: a progress bar gives up its line, and comes again below."""


def let_be_seen() -> None:
    """Show what Legato logs from INFO on, unless the program has chosen itself what it wants to see and where."""
    log = logging.getLogger("legato")
    if not (logging.getLogger().handlers or log.handlers or log.level):
        log.addHandler(_ToStderr())
        log.setLevel(logging.INFO)


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message on a line of its own."""
        with making_room():
            super().emit(record)
