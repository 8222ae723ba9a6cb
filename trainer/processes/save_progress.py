"""Progress of this process's saves, by which the signal watch tells a slow save from a stuck one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class SaveProgress:
    """Number of saves under way in this process, and when one of them last made progress."""

    def __init__(self) -> None:
        self.under_way = 0
        self.progressed_at = float("-inf")
        """`time.monotonic` of the newest progress: the beginning of a save, a written block, or its end."""
        self._lock = threading.Lock()

    @contextmanager
    def save(self) -> Iterator[None]:
        """Count the save that is done in this context."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, count: int) -> None:
        # a save in the background and one of the main thread may begin at once
        with self._lock:
            self.under_way += count
        self.record()

    def record(self) -> None:
        """Record progress of a save."""
        self.progressed_at = time.monotonic()

    def has_progressed(self, seconds: float) -> bool:
        """Return whether a save is under way that made progress within `seconds`."""
        return self.under_way > 0 and time.monotonic() < self.progressed_at + seconds


SAVES = SaveProgress()
"""Saves of this process."""
