"""Tracks the progress of this process's saves, so that the signal watch can tell a slow save from a stuck one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class SaveProgress:
    """Number of saves in progress in this process, and the time when one of them last made progress."""

    def __init__(self) -> None:
        self.under_way = 0
        """Number of saves in progress."""
        self.progressed_at = float("-inf")
        """`time.monotonic()` at the latest progress: the start of a save, a written block, or the end of a save."""
        self._lock = threading.Lock()

    @contextmanager
    def save(self) -> Iterator[None]:
        """Count a save as in progress for the duration of this context."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, count: int) -> None:
        # a background save and a save in the main thread may start at the same time
        with self._lock:
            self.under_way += count
        self.record()

    def record(self) -> None:
        """Record progress of a save."""
        self.progressed_at = time.monotonic()

    def has_progressed(self, seconds: float) -> bool:
        """Return whether an ongoing save has made progress within the last `seconds`."""
        return self.under_way > 0 and time.monotonic() < self.progressed_at + seconds


SAVES = SaveProgress()
"""Saves of this process."""
