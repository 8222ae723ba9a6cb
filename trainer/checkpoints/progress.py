"""Progress of this process's saves, by which a watching thread tells a slow save from one that is stuck."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class SaveProgress:
    """Counts the saves that are under way in this process, and knows when one of them last moved."""

    def __init__(self) -> None:
        self.under_way = 0
        self.moved_at = float("-inf")
        """`time.monotonic` of the newest sign of a save: its beginning, a written block, its end."""
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
        with self._lock:
            self.under_way += count
        self.move()

    def move(self) -> None:
        """Note that a save goes on."""
        self.moved_at = time.monotonic()

    def moves(self, seconds: float) -> bool:
        """Return whether a save is under way that has moved within so many seconds."""
        return self.under_way > 0 and time.monotonic() < self.moved_at + seconds


SAVES = SaveProgress()
"""The saves of this process."""
