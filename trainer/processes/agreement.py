"""Agreement between ranks: when to stop, and when to collect Python's garbage."""

import gc
import time
from collections.abc import Callable, Sequence

import torch

from .ranks import Ranks

Read = Callable[[], Sequence[float]]
Tell = Callable[[list[float]], object]

SECONDS_BETWEEN = 1.0
"""About the longest time in seconds until a request to stop is seen, by up to a hundred processes."""


class Agreement:
    """Agreement on stopping, about once a second, at a step that all ranks derive from the agreement before.

    Nothing is communicated in between. During an evaluation ranks agree at a round of batches; a rank without batches
    in the last rounds continues to take part until all are done.
    """

    def __init__(self, ranks: Ranks, step: int, elapsed: float) -> None:
        self.contributions: list[tuple[Read, Tell]] = []
        self.join(ranks, step, elapsed)

    def add(self, read: Read, tell: Tell) -> None:
        """Carry more numbers with each agreement.

        Args:
            read: returns the numbers of this rank, equally many on every rank.
            tell: called with the maximum of each over the ranks, each time that they have agreed. Where it returns
                true, on all ranks alike, they agree again after the next step.
        """
        self.contributions.append((read, tell))

    def join(self, ranks: Ranks, step: int, elapsed: float) -> None:
        """Agree with these ranks from `step` on."""
        self.ranks = ranks
        self.stop = False
        """Whether the run stops, as agreed."""
        self.signal = 0
        """Signal by which the run was asked to end, as agreed; 0: none."""
        self.elapsed = elapsed
        """Seconds of the run so far, as agreed: the maximum over ranks."""
        self.next_step, self.next_round = step + 1, 1
        self._started = time.monotonic() - elapsed
        self._met_at, self._met_step = time.monotonic(), step
        self._steps_between = self._rounds_between = 1
        self._round_met = 0
        self._round_met_at = self._met_at

    def agree(self, step: int, wants_stop: bool, signal: int = 0) -> None:
        """Agree after `step`; every rank calls it after the same one.

        `wants_stop`, `signal`: what this rank wants and has received. After a signal the next agreement follows at
        once.
        """
        self.apply(step, self._highest(*self.contribution(step, wants_stop, signal)))

    def contribution(self, step: int, wants_stop: bool, signal: int = 0) -> list[float]:
        """Return the numbers of this rank; `apply` takes their maxima over ranks."""
        now = time.monotonic()
        # of which the maximum counts: the fastest rank's steps fill the second
        pace = (step - self._met_step) / max(now - self._met_at, 1e-6)
        numbers = [float(wants_stop), float(signal), now - self._started, pace]
        for read, _ in self.contributions:
            said = read()
            numbers += [float(len(said)), *said]
        return numbers

    def apply(self, step: int, highest: Sequence[float]) -> None:
        """Apply the maxima over ranks, agreed after `step`."""
        stop, signal_of_any, self.elapsed, pace, *said = highest
        self.stop, self.signal = bool(stop), int(signal_of_any)
        self._steps_between = self._interval(pace, self._steps_between)
        self._met_at, self._met_step = time.monotonic(), step
        is_urgent = self.signal > 0
        for _, tell in self.contributions:
            count, *said = said  # each part is sent with its length before it
            is_urgent |= bool(tell(said[: int(count)]))
            said = said[int(count) :]
        # 0 comes before every step: at the next one, as what is urgent is acted on between two steps
        self.next_step = 0 if is_urgent else step + self._steps_between

    def now(self) -> float:
        """Return the seconds of the run so far by this rank's clock."""
        return time.monotonic() - self._started

    def agree_next(self) -> None:
        """Agree after this step or round; only for a single process."""
        if self.ranks.size == 1:
            self.next_step = self.next_round = 0

    def begin_evaluation(self) -> None:
        """Count rounds from 0; the interval comes from the evaluation before."""
        self.next_round = self._rounds_between
        self._round_met_at, self._round_met = time.monotonic(), 0

    def agree_in_evaluation(self, rounds: int, done: bool, signal: int) -> bool:
        """Agree after `rounds` rounds of an evaluation, or when `done`; return whether all ranks are done."""
        now = time.monotonic()
        pace = (rounds - self._round_met) / max(now - self._round_met_at, 1e-6)
        progress = (0.0, 0.0) if done else (pace, float(rounds))
        signal_of_any, going_on, pace, rounds_of_any = self._highest(float(signal), float(not done), *progress)
        self.signal = int(signal_of_any)
        if going_on:
            self._rounds_between = self._interval(pace, self._rounds_between)
            self.next_round = int(rounds_of_any) + self._rounds_between
            self._round_met_at, self._round_met = time.monotonic(), int(rounds_of_any)
        return not going_on

    def _highest(self, *numbers: float) -> list[float]:
        if self.ranks.size == 1:
            return list(numbers)
        # float64: the numbers of steps and seconds stay exact beyond 2^24
        highest: list[float] = self.ranks.all_reduce(torch.tensor(numbers, dtype=torch.float64), "max").tolist()
        return highest

    def _interval(self, pace: float, before: int) -> int:
        """Return the number of steps (or rounds) until the next agreement, for a `pace` in steps a second.

        At most twice `before`: at the beginning a rank may have measured its pace over a millisecond.
        """
        # gloo's ring passes 2 (n - 1) messages one after the other, each about 50 us on a network: at 1,024 processes
        # an agreement takes 0.1 s, and each second would be a tenth of the run
        seconds = max(SECONDS_BETWEEN, self.ranks.size / 100)
        return max(1, min(int(pace * seconds), 2 * before))


FIRST_COLLECTION, COLLECTION_SECONDS = 10.0, 600.0
"""Seconds of the run at its first full garbage collection, and between two of them."""


class GarbageCollector:
    """Collects all garbage where the ranks agree, and freezes what is left (`gc.freeze`), as nanochat does.

    A full collection looks at every object, of which torch alone has some 300,000: 0.1 s and more, in the middle of a
    step of one rank, while the others wait. With those frozen Python's own collections take milliseconds, and all ranks
    pause together. What a user has chosen, or a run within which this one is, stays.
    """

    def __init__(self) -> None:
        self.period: int | None = None
        self.has_frozen = False

    def collect(self, elapsed: float) -> None:
        """Collect if it is due; `elapsed`: the seconds of the run so far, the same on every rank."""
        # of `elapsed` alone, so that a rank which joins later pauses with the others; not at once, as short runs would
        # pay for it, and the tensors of a notebook's earlier run, which are garbage by then, would stay for ten minutes
        before, self.period = self.period, int((elapsed - FIRST_COLLECTION) // COLLECTION_SECONDS)
        if before is None or before == self.period:
            return
        # asked here and not at the start: to count frozen objects takes 30 ms a million
        if self.has_frozen or (gc.isenabled() and gc.get_freeze_count() == 0):
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self.has_frozen = True

    def close(self) -> None:
        """Leave all collections to Python again."""
        if self.has_frozen:
            gc.unfreeze()
