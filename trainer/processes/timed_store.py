"""TimedStore: the ranks' store, for those who must not wait for it: a rank that has lost its network waits for ever."""

import threading
import time
from typing import Any

from torch.distributed import DistNetworkError

STORE_SECONDS = 10.0
"""Seconds in which the store must answer."""


class TimedStore:
    """A store whose calls raise DistNetworkError if it does not answer; for several threads, one call at a time."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = store
        self._idle = threading.Lock()
        self._called = float("-inf")
        """Time of the newest call."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._call("check", keys))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        value: bytes = self._call("get", key)
        return value

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call("set", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._call("add", key, amount))

    def _call(self, method: str, *arguments: Any) -> Any:
        # torch waits for the answer without a limit, so this has to happen in a thread that may be left behind
        if not self._idle.acquire(timeout=max(0.0, self._called + STORE_SECONDS - time.monotonic())):
            raise _no_answer()
        self._called = time.monotonic()
        answer, answered = list[Any](), threading.Event()

        def ask() -> None:
            try:
                answer.append(getattr(self.underlying_store, method)(*arguments))
            except RuntimeError as error:
                answer.append(error)
            finally:
                self._idle.release()
                answered.set()

        threading.Thread(target=ask, name="legato-store", daemon=True).start()
        if not answered.wait(STORE_SECONDS):
            raise _no_answer()
        if isinstance(answer[0], RuntimeError):
            raise answer[0]
        return answer[0]


def _no_answer() -> DistNetworkError:
    return DistNetworkError(f"The ranks' store has not answered for {STORE_SECONDS:g} s.")
