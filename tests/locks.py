"""Locks that several threads want at the same moment."""

import threading
from typing import Any

from legato.base.errors import ConfigError


def holders_among(locks: list[Any]) -> list[Any]:
    """Return those of the locks that were taken, by one thread for each at the same time."""
    had = list[Any]()

    def take(lock: Any) -> None:
        try:
            lock.take()
        except ConfigError:
            return
        had.append(lock)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return had
