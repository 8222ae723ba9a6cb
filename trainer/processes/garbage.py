"""Python's garbage collection at points that all ranks share, and not in the middle of a step."""

import gc
import time

WHOLE_SECONDS = 600.0
"""Seconds between two collections of everything; those between look only at what was made since."""
LONG = 0.01
"""Seconds that a collection may take before what it has looked at is left to the next one of everything."""
RARER = 100
"""Full collections in the middle of steps become this much rarer, and not impossible: steps may make a lot."""


class GarbageCollector:
    """Runs full collections about every `seconds`, when the ranks agree; `close` puts Python's own way back.

    A full collection looks at every object, of which torch alone has some 300,000: 0.1 s and more, in the middle of a
    step of one rank, while the others wait. Here those that were there at the first one are frozen (`gc.freeze`), as
    nanochat and torchtitan do, and all ranks pause together. Young objects are collected as ever. A run pays nothing
    in its first `seconds`. What a user has chosen, or a run within which this one is, stays: see `is_left_to_python`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.newest, self.begun = seconds, -1.0, False
        self.threshold = gc.get_threshold()

    def collect(self, elapsed: float) -> None:
        """Collect if it is due; `elapsed`: the seconds of the run so far, the same on every rank.

        Due is a matter of `elapsed` alone, so that a rank which joins later pauses with the others.
        """
        before, self.newest = self.newest, elapsed
        if before < 0 or elapsed // self.seconds == before // self.seconds:
            return
        if not self.begun and not is_left_to_python():  # asked here: to count frozen objects takes 30 ms a million
            return
        whole = not self.begun or elapsed // WHOLE_SECONDS > before // WHOLE_SECONDS
        if not self.begun:
            self.begun = True
            young, old, oldest = self.threshold
            gc.set_threshold(young, old, oldest * RARER)
        if whole:
            gc.unfreeze()
        began = time.perf_counter()
        gc.collect()
        if whole or time.perf_counter() - began > LONG:
            gc.freeze()

    def close(self) -> None:
        """Leave all collections to Python again."""
        if self.begun:
            gc.set_threshold(*self.threshold)
            gc.unfreeze()


def is_left_to_python() -> bool:
    """Return whether nobody else decides on collections: a user, or a run within which this one is."""
    return gc.isenabled() and gc.get_freeze_count() == 0
