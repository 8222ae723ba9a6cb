"""The pure order of samples: a function of seed, epoch and position, dealt out to replicas, which processes execute.

    seed, epoch -> epoch_key -> permutation(positions, length, key)     which sample stands at a position
    Deal.turns(step, replicas) -> Turn                                  which positions a replica's batch takes
    Layout.owned(process)                                               which replicas a process executes
    DealtBatches                                                        the three together, as a batch sampler

Nothing here knows a rank, keeps a list as long as the dataset or imports torch, so that any process can take over any
position, and a plan for 10^12 samples on 16,384 processes is a matter of milliseconds.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataError

Integers = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
EpochIndices = Callable[[Integers], "Sequence[Any] | npt.NDArray[Any]"]

MASK = (1 << 64) - 1
# The increment and the two multipliers of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators"; multipliers: Stafford's Mix13).
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ORDER_STREAM = 0x6F72646572  # keeps the keys of the order apart from those of the generators; any constant does
# With 4 rounds the distance between the images of two neighbours is visibly uneven (chi-square over 400,000 keys,
# p < 1e-6), with 5 it still is for positions one row apart, with 6 nothing shows. Two more are the margin.
ROUNDS = 8
TABLE_LENGTH = 1024  # up to here a sorted table, 8 KiB at most, is quicker than the rounds, and exactly uniform
CHUNK = 4096  # positions that DealtBatches evaluates in one call, to share the cost of calling NumPy


def mix(*numbers: int) -> int:
    """Hash a tuple of integers, each taken modulo 2^64, to 64 bits: stable everywhere, and their order counts."""
    state = GAMMA * len(numbers) & MASK
    for number in numbers:
        state = ((state ^ number) + GAMMA) * FIRST & MASK
        state = (state ^ state >> 32) * SECOND & MASK
        state ^= state >> 29
    state = (state ^ state >> 32) * FIRST & MASK
    return state ^ state >> 32


def epoch_key(seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch's permutation."""
    return mix(ORDER_STREAM, seed, epoch)


def permutation(positions: Integers, length: int, key: int) -> Integers:
    """Return the samples at `positions` of the permutation of range(length) that the 64-bit `key` picks.

    O(1) memory and start. Above 1024: a generalised Feistel network (Luby and Rackoff 1988) on the smallest rectangle
    of rows x columns that holds the length, walking the cycle of what falls outside until it is inside; up to 1024: the
    order of hashes ("prefix cipher"). Both after Black and Rogaway 2002, "Ciphers with arbitrary finite domains".

    Raises DataError for a position outside [0, length).
    """
    values = np.asarray(positions, dtype=np.int64).view(np.uint64)  # negative positions become huge
    if values.size and int(values.max()) >= length:
        raise DataError(
            f"expected positions in [0, {length}), got one in "
            f"[{int(np.min(positions))}, {int(np.max(positions))}]: ask only for positions of this epoch"
        )
    if length <= TABLE_LENGTH:
        return _table(length, key)[values]
    network = _network(length, key)
    values = _encrypt(values, network)
    limit = np.uint64(length)
    outside = np.flatnonzero(values >= limit)
    while outside.size:
        walked = _encrypt(values[outside], network)
        values[outside] = walked
        outside = outside[walked >= limit]
    return values.view(np.int64)


class _Network(NamedTuple):
    """A Feistel network's domain, rows x columns, and its round keys."""

    rows: np.uint64
    columns: np.uint64
    keys: tuple[np.uint64, ...]


@lru_cache(maxsize=16)
def _network(length: int, key: int) -> _Network:
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)  # rows x columns exceeds the length by less than rows: hardly ever a second walk
    return _Network(np.uint64(rows), np.uint64(columns), tuple(np.uint64(mix(key, turn)) for turn in range(ROUNDS)))


@lru_cache(maxsize=16)
def _table(length: int, key: int) -> Integers:
    hashes = _scramble(np.arange(length, dtype=np.uint64), np.uint64(mix(key)))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _encrypt(values: UInt64Array, network: _Network) -> UInt64Array:
    """Send each value of [0, rows x columns) through the network once."""
    row, column = np.divmod(values, network.columns)
    for turn, key in enumerate(network.keys):
        source, target, modulus = (row, column, network.columns) if turn % 2 else (column, row, network.rows)
        target += _scramble(source, key) % modulus
        target -= modulus * (target >= modulus)
    row *= network.columns
    row += column
    return row


def _scramble(words: UInt64Array, key: np.uint64) -> UInt64Array:
    """Hash words below 2^32 under a key; the multiplications wrap around at 2^64."""
    mixed = words ^ key
    mixed *= np.uint64(FIRST)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(SECOND)
    mixed ^= mixed >> np.uint64(29)
    return mixed


@dataclass(frozen=True)
class Layout:
    """Which replicas run in which process: contiguous blocks, the first ones longer by one where it does not divide."""

    replicas: int
    processes: int

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"expected at least one process, got {self.processes}: start one or more")
        if self.processes > self.replicas:
            raise ConfigError(
                f"more processes than replicas: expected at most {self.replicas} processes, one for each replica of "
                f"this run, got {self.processes}; start {self.replicas} or fewer, or begin a new run with "
                f"trainer.replicas={self.processes}"
            )

    def owned(self, process: int) -> range:
        """Return the replicas that a process executes, in their order."""
        assert 0 <= process < self.processes, (process, self)
        share, longer = divmod(self.replicas, self.processes)
        start = process * share + min(process, longer)
        return range(start, start + share + (process < longer))

    def owner(self, replica: int) -> int:
        """Return the process that executes a replica."""
        assert 0 <= replica < self.replicas, (replica, self)
        share, longer = divmod(self.replicas, self.processes)
        in_longer = longer * (share + 1)
        return replica // (share + 1) if replica < in_longer else longer + (replica - in_longer) // share


class BatchSpan(NamedTuple):
    """One batch of one replica: positions [start, stop) of the epoch's order, at least one."""

    replica: int
    round: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many samples the batch has."""
        return self.stop - self.start


@dataclass(frozen=True)
class Deal:
    """How an epoch of `length` positions is dealt out: one batch for each replica a round, `accumulate` rounds a step.

    `drop_last` drops the last round whole unless every replica has a full batch in it, so that all rounds are of one
    size. `limit_rounds` ends the epoch early. The last step takes the rounds that are left, and may be shorter.
    """

    length: int
    batch_size: int
    replicas: int
    accumulate: int
    drop_last: bool = False
    limit_rounds: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("batch_size", 1), ("replicas", 1), ("accumulate", 1), ("limit_rounds", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"expected {name} to be at least {least}, got {value}: set it to {least} or more")

    @cached_property
    def rounds(self) -> int:
        """Rounds in which at least one replica has a sample (with `drop_last`: every replica a full batch)."""
        in_round = self.replicas * self.batch_size
        rounds = self.length // in_round if self.drop_last else -(-self.length // in_round)
        return rounds if self.limit_rounds is None else min(rounds, self.limit_rounds)

    @cached_property
    def samples(self) -> int:
        """Samples that the epoch deals out: the positions [0, samples)."""
        return min(self.length, self.rounds * self.replicas * self.batch_size)

    @property
    def steps(self) -> int:
        """Optimizer steps of the epoch."""
        return -(-self.rounds // self.accumulate)

    def rounds_of(self, step: int) -> range:
        """Return the rounds of an optimizer step."""
        return range(min(step * self.accumulate, self.rounds), min((step + 1) * self.accumulate, self.rounds))

    def span(self, round: int, replica: int) -> range:
        """Return the positions of a replica's batch: short or empty for some replicas in the last round."""
        start = (round * self.replicas + replica) * self.batch_size
        return range(min(start, self.samples), min(start + self.batch_size, self.samples))

    def step_samples(self, step: int) -> int:
        """Return the number of samples of an optimizer step, over all replicas."""
        in_step = self.accumulate * self.replicas * self.batch_size
        return min((step + 1) * in_step, self.samples) - min(step * in_step, self.samples)

    def turns(self, step: int, replicas: range, leaders: range | None = None) -> list[BatchSpan]:
        """Return a step's batches for some replicas: all of the first replica, then all of the next; none empty.

        After them come some of `leaders`', until they are as many as theirs.
        """
        size, samples, found = self.batch_size, self.samples, []
        rounds = range(step * self.accumulate, min((step + 1) * self.accumulate, self.rounds))
        for replica in replicas:
            for round in rounds:
                start = (round * self.replicas + replica) * size
                if start < samples:
                    found.append(BatchSpan(replica, round, start, min(start + size, samples)))
        if leaders is not None:
            theirs = self.turns(step, leaders)
            found += theirs[: len(theirs) - len(found)]
        return found

    def turns_from(self, step: int, replicas: range) -> int:
        """Return how many batches some replicas have from a step to the end of the epoch, in O(1)."""
        rounds = range(min(step * self.accumulate, self.rounds), self.rounds)
        if not rounds:
            return 0
        # Only the last round can leave replicas without a batch: those that start at or after the last sample.
        last_start = rounds[-1] * self.replicas * self.batch_size
        served = -(-(self.samples - last_start) // self.batch_size)
        return (len(rounds) - 1) * len(replicas) + len(range(replicas.start, min(replicas.stop, served)))


class KeyedIndices(list[Any]):
    """The dataset indices of one batch, with the epoch and first position that key the random numbers of its loading.

    It stays a list for whoever fetches it, and keeps both numbers on the way to a loader's worker process.
    """

    __slots__ = ("epoch", "position")

    def __init__(self, indices: Iterable[Any], position: int, epoch: int = 0) -> None:
        super().__init__(indices)
        self.position = position
        self.epoch = epoch


class DealtBatches:
    """The batches of one process for one epoch, as a batch sampler for a DataLoader.

    Each step's batches come replica by replica, from `start_step` on; nothing before it is evaluated. A DataLoader that
    keeps its workers keeps its batch sampler too: set `order`, `start_step` and `epoch` anew before the next epoch.

    order: the dataset indices at some positions (int64): a permutation, the positions themselves, a SampledOrder.
    """

    def __init__(self, deal: Deal, replicas: range, order: EpochIndices, start_step: int = 0, epoch: int = 0) -> None:
        self.deal = deal
        self.replicas = replicas
        self.order = order
        self.start_step = start_step
        self.epoch = epoch
        self.leaders: range | None = None
        """The replicas whose process all others follow in lockstep."""

    def __len__(self) -> int:
        return self.deal.turns_from(self.start_step, self.replicas if self.leaders is None else self.leaders)

    def __iter__(self) -> Iterator[KeyedIndices]:
        for turns in self._chunks():
            found = self.order(np.concatenate([np.arange(turn.start, turn.stop, dtype=np.int64) for turn in turns]))
            indices = found.tolist() if isinstance(found, np.ndarray) else found
            offset = 0
            for turn in turns:
                end = offset + turn.stop - turn.start
                yield KeyedIndices(indices[offset:end], turn.start, self.epoch)
                offset = end

    def _chunks(self) -> Iterator[list[BatchSpan]]:
        chunk: list[BatchSpan] = []
        waiting = 0
        for step in range(self.start_step, self.deal.steps):
            for turn in self.deal.turns(step, self.replicas, self.leaders):
                chunk.append(turn)
                waiting += turn.stop - turn.start
                if waiting >= CHUNK:
                    yield chunk
                    chunk, waiting = [], 0
        if chunk:
            yield chunk


class SampledOrder:
    """The finite list of indices that a user's own sampler drew for one epoch, as an order to deal out.

    Integers take 8 bytes each; any other index (a string, a tuple) is kept as it is.
    """

    def __init__(self, indices: Iterable[Any]) -> None:
        numbers = array("q")
        iterator = iter(indices)
        for index in iterator:
            try:
                numbers.append(index)
            except (TypeError, OverflowError):
                self._indices: Integers | list[Any] = [*numbers, index, *iterator]
                return
        self._indices = np.frombuffer(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __call__(self, positions: Integers) -> Sequence[Any] | Integers:
        """Return the indices drawn at some positions."""
        if isinstance(self._indices, np.ndarray):
            return self._indices[positions]
        return [self._indices[position] for position in positions.tolist()]
