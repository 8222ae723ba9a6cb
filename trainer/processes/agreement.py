"""Agreement between ranks on when to stop and when to collect Python's garbage."""

import gc
import time
from collections.abc import Callable, Sequence

import torch

from .ranks import Ranks

Read = Callable[[], Sequence[float]]
Tell = Callable[[list[float]], object]

SECONDS_BETWEEN = 1.0
"""Approximate maximum number of seconds until all processes (up to 100) see a request to stop."""


class Agreement:
    """Lets a run's ranks agree, about once a second, on whether to stop.

    At each agreement, the ranks also choose the step at which they will next agree, and do not communicate in between.
    During an evaluation, the ranks agree after a round of batches. Ranks without batches in the last rounds keep taking
    part until all ranks are done.
    """

    def __init__(self, ranks: Ranks, step: int, elapsed: float) -> None:
        self.contributions: list[tuple[Read, Tell]] = []
        self.join(ranks, step, elapsed)

    def add(self, read: Read, tell: Tell) -> None:
        """Exchange additional numbers in each agreement.

        Args:
            read: returns a list of this rank's numbers; its length must be the same on all ranks.
            tell: called after each agreement, with the maximum of each number over ranks. If it returns true, the ranks
                agree again after the next step. All ranks must return the same value.
        """
        self.contributions.append((read, tell))

    def join(self, ranks: Ranks, step: int, elapsed: float) -> None:
        """Start agreements with these ranks, beginning at `step`."""
        self.ranks = ranks
        self.stop = False
        """True if the ranks have agreed to stop the run."""
        self.signal = 0
        """Signal that asks the run to end, as agreed by all ranks; 0 if there is none."""
        self.elapsed = elapsed
        """Elapsed time of the run in seconds at the last agreement: the maximum over ranks."""
        self.next_step, self.next_round = step + 1, 1
        self._started = time.monotonic() - elapsed
        self._met_at, self._met_step = time.monotonic(), step
        self._steps_between = self._rounds_between = 1
        self._round_met = 0
        self._round_met_at = self._met_at

    def agree(self, step: int, wants_stop: bool, signal: int = 0) -> None:
        """Agree after `step`. All ranks must call this after the same step.

        Args:
            wants_stop: whether this rank requests a stop.
            signal: the signal this rank received, or 0.

        After a signal, the ranks agree again after the next step.
        """
        self.apply(step, self._highest(*self.contribution(step, wants_stop, signal)))

    def contribution(self, step: int, wants_stop: bool, signal: int = 0) -> list[float]:
        """Return this rank's numbers for an agreement. `apply` receives the maximum of each number over ranks."""
        now = time.monotonic()
        # the maximum over ranks is used, so the fastest rank determines the interval
        pace = (step - self._met_step) / max(now - self._met_at, 1e-6)
        numbers = [float(wants_stop), float(signal), now - self._started, pace]
        for read, _ in self.contributions:
            values = read()
            numbers += [float(len(values)), *values]
        return numbers

    def apply(self, step: int, highest: Sequence[float]) -> None:
        """Apply the result of the agreement after `step`: the maximum of each number over ranks."""
        stop, highest_signal, self.elapsed, pace, *values = highest
        self.stop, self.signal = bool(stop), int(highest_signal)
        self._steps_between = self._interval(pace, self._steps_between)
        self._met_at, self._met_step = time.monotonic(), step
        is_urgent = self.signal > 0
        for _, tell in self.contributions:
            count, *values = values  # each contribution is preceded by its length
            is_urgent |= bool(tell(values[: int(count)]))
            values = values[int(count) :]
        # 0 is before every step, so the ranks agree after the next step
        self.next_step = 0 if is_urgent else step + self._steps_between

    def now(self) -> float:
        """Return the elapsed time of the run in seconds, according to this rank's clock."""
        return time.monotonic() - self._started

    def agree_next(self) -> None:
        """If the run has a single process, schedule the next agreement right after the current step or round."""
        if self.ranks.size == 1:
            self.next_step = self.next_round = 0

    def begin_evaluation(self) -> None:
        """Restart the round count for a new evaluation. The previous evaluation's interval is reused."""
        self.next_round = self._rounds_between
        self._round_met_at, self._round_met = time.monotonic(), 0

    def agree_in_evaluation(self, rounds: int, done: bool, signal: int) -> bool:
        """Agree after `rounds` evaluation rounds, or when this rank is `done`. Return whether all ranks are done."""
        now = time.monotonic()
        pace = (rounds - self._round_met) / max(now - self._round_met_at, 1e-6)
        progress = (0.0, 0.0) if done else (pace, float(rounds))
        highest_signal, continues, pace, highest_rounds = self._highest(float(signal), float(not done), *progress)
        self.signal = int(highest_signal)
        if continues:
            self._rounds_between = self._interval(pace, self._rounds_between)
            self.next_round = int(highest_rounds) + self._rounds_between
            self._round_met_at, self._round_met = time.monotonic(), int(highest_rounds)
        return not continues

    def _highest(self, *numbers: float) -> list[float]:
        if self.ranks.size == 1:
            return list(numbers)
        # float64, so that counts of steps and seconds stay exact beyond 2^24
        highest: list[float] = self.ranks.all_reduce(torch.tensor(numbers, dtype=torch.float64), "max").tolist()
        return highest

    def _interval(self, pace: float, previous: int) -> int:
        """Return the number of steps (or rounds) until the next agreement, for a `pace` in steps per second.

        The result is at most twice `previous`, because a rank may have measured its first pace over only a millisecond.
        """
        # gloo's ring sends 2 (n - 1) messages in sequence, each about 50 us on a network: with 1,024 processes an
        # agreement takes 0.1 s, which would be a tenth of the run at one agreement per second
        seconds = max(SECONDS_BETWEEN, self.ranks.size / 100)
        return max(1, min(int(pace * seconds), 2 * previous))


FIRST_COLLECTION, COLLECTION_SECONDS = 10.0, 600.0
"""Seconds from the start of the run to its first full garbage collection, and seconds between collections."""


class GarbageCollector:
    """Collects garbage on all ranks at the same time and freezes the remaining objects (`gc.freeze`), as in nanochat.

    A full collection visits every object, and torch alone creates about 300,000. A collection in the middle of one
    rank's step takes 0.1 s or more, during which the other ranks wait. Once the objects are frozen, Python's
    automatic collections take milliseconds. Does nothing if the user has disabled garbage collection, or if the user
    or an enclosing run has already frozen objects.
    """

    def __init__(self) -> None:
        self.period: int | None = None
        self.has_frozen = False

    def collect(self, elapsed: float) -> None:
        """Collect garbage if enough time has passed.

        Args:
            elapsed: elapsed time of the run in seconds, the same on every rank.
        """
        # The times depend only on `elapsed`, so that a rank that joins later collects at the same time as the others.
        # The first collection is delayed because it would slow down short runs and would freeze tensors of a notebook's
        # previous run that are not garbage yet.
        previous, self.period = self.period, int((elapsed - FIRST_COLLECTION) // COLLECTION_SECONDS)
        if previous is None or previous == self.period:
            return
        # here, not at the start: counting frozen objects takes 30 ms per million
        if self.has_frozen or (gc.isenabled() and gc.get_freeze_count() == 0):
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self.has_frozen = True

    def close(self) -> None:
        """Return control of garbage collection to Python."""
        if self.has_frozen:
            gc.unfreeze()
