"""Agreement between ranks on when to stop and when to collect Python's garbage."""

import gc
import time
from collections.abc import Callable, Sequence

import torch

from .ranks import Ranks

Read = Callable[[], Sequence[float]]
Tell = Callable[[list[float]], object]

SECONDS_BETWEEN = 1.0
"""Approximate maximum time in seconds until all processes, up to a hundred, see a request to stop."""


class Agreement:
    """Agreement on stopping, about once a second, at a step that all ranks derive from the previous agreement.

    Ranks do not communicate in between. During an evaluation, the ranks agree after a round of batches. A rank without
    batches in the last rounds takes part until all ranks are done.
    """

    def __init__(self, ranks: Ranks, step: int, elapsed: float) -> None:
        self.contributions: list[tuple[Read, Tell]] = []
        self.join(ranks, step, elapsed)

    def add(self, read: Read, tell: Tell) -> None:
        """Exchange additional numbers in each agreement.

        Args:
            read: returns a list of this rank's numbers; its length must be equal on all ranks.
            tell: called after each agreement with the maximum of each number over ranks. If it returns true, which it
                must do on all ranks or on none, the ranks agree again after the next step.
        """
        self.contributions.append((read, tell))

    def join(self, ranks: Ranks, step: int, elapsed: float) -> None:
        """Start making agreements with these ranks at `step`."""
        self.ranks = ranks
        self.stop = False
        """True if the ranks have agreed to stop the run."""
        self.signal = 0
        """Agreed signal that asked the run to end; 0 if none has."""
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
            wants_stop: whether this rank asks to stop.
            signal: the signal that this rank has received.

        After a signal, the ranks agree again immediately.
        """
        self.apply(step, self._highest(*self.contribution(step, wants_stop, signal)))

    def contribution(self, step: int, wants_stop: bool, signal: int = 0) -> list[float]:
        """Return this rank's numbers; `apply` takes their maxima over ranks."""
        now = time.monotonic()
        # the maximum over ranks counts: the fastest rank sets the interval
        pace = (step - self._met_step) / max(now - self._met_at, 1e-6)
        numbers = [float(wants_stop), float(signal), now - self._started, pace]
        for read, _ in self.contributions:
            values = read()
            numbers += [float(len(values)), *values]
        return numbers

    def apply(self, step: int, highest: Sequence[float]) -> None:
        """Apply the maxima over ranks, agreed after `step`."""
        stop, highest_signal, self.elapsed, pace, *values = highest
        self.stop, self.signal = bool(stop), int(highest_signal)
        self._steps_between = self._interval(pace, self._steps_between)
        self._met_at, self._met_step = time.monotonic(), step
        is_urgent = self.signal > 0
        for _, tell in self.contributions:
            count, *values = values  # the length of each contribution precedes it
            is_urgent |= bool(tell(values[: int(count)]))
            values = values[int(count) :]
        # 0 is before every step, so the ranks agree after the next one
        self.next_step = 0 if is_urgent else step + self._steps_between

    def now(self) -> float:
        """Return the elapsed time of the run in seconds, by this rank's clock."""
        return time.monotonic() - self._started

    def agree_next(self) -> None:
        """Make the next agreement after this step or round. Has an effect only in a single-process run."""
        if self.ranks.size == 1:
            self.next_step = self.next_round = 0

    def begin_evaluation(self) -> None:
        """Count rounds from 0; the interval comes from the previous evaluation."""
        self.next_round = self._rounds_between
        self._round_met_at, self._round_met = time.monotonic(), 0

    def agree_in_evaluation(self, rounds: int, done: bool, signal: int) -> bool:
        """Agree after `rounds` rounds of an evaluation, or when this rank is `done`; return whether all are done."""
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

        The result is at most twice `previous`, because a rank may have measured its first pace over a millisecond.
        """
        # gloo's ring sends 2 (n - 1) messages in sequence, each about 50 us on a network: with 1,024 processes an
        # agreement takes 0.1 s, which would be a tenth of the run at one agreement per second
        seconds = max(SECONDS_BETWEEN, self.ranks.size / 100)
        return max(1, min(int(pace * seconds), 2 * previous))


FIRST_COLLECTION, COLLECTION_SECONDS = 10.0, 600.0
"""Seconds from the start of the run to its first full garbage collection, and seconds between collections."""


class GarbageCollector:
    """Collects all garbage when the ranks agree and freezes the remaining objects (`gc.freeze`), as nanochat does.

    A full collection visits every object, and torch alone has some 300,000. It takes 0.1 s or more, in the middle of a
    rank's step, while the other ranks wait. With these objects frozen, Python's collections take milliseconds, and all
    ranks collect everything together. Settings of the user or of an enclosing run are kept.
    """

    def __init__(self) -> None:
        self.period: int | None = None
        self.has_frozen = False

    def collect(self, elapsed: float) -> None:
        """Collect garbage if enough time has passed.

        Args:
            elapsed: elapsed time of the run in seconds, equal on every rank.
        """
        # It depends only on `elapsed`, so that a rank which joins later pauses with the others. The first
        # one is delayed: short runs would pay for it, and it would freeze tensors of a notebook's previous run that are
        # not garbage yet.
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
        """Let Python control garbage collection again."""
        if self.has_frozen:
            gc.unfreeze()
