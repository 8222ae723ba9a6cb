"""Streams: loaders that are read in order, rather than by position.

`StreamData` distributes whole batches of a stream. `OwnShares` reads a different shard of the data in each process.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count, islice
from math import inf
from operator import attrgetter
from typing import Any

import torch

from ...base.errors import DataError
from ...base.tensors import require_samples
from ..processes.ranks import SINGLE, Ranks
from .combined import CombinedLoader, loaders_in, most_batches, sample_counter
from .loaders import length_of, read_loader, seed_samplers, set_epoch
from .randomness import kept_generators, seed_generators
from .sampling import Layout, mix
from .shares import Sample, hashes_of, log_share, name_of, require_different, require_same
from .steps import Dealing, ReplicaBatch, StepInput, apply_limit
from .tracked import tracked

log = logging.getLogger("legato")

_END = object()
# Key that separates the random numbers of loader workers from all others
WORKER_STREAM = 0x776F726B657273
# Keys in the states of loaders that count epochs themselves: MosaicML's and litdata's
EPOCHS = {"epoch", "current_epoch"}
# Used as the length of a share whose loader has none; any real length is smaller
UNKNOWN = 2**62


class StreamData:
    """Any iterable of batches, distributed in whole batches.

    With n replicas, batch k is assigned to replica k modulo n. Every process reads the entire stream and keeps the
    batches of its replicas.
    """

    is_even = True
    """Always True: a stream's length does not determine whether every replica has a batch in each round."""

    content: dict[str, Any] | None = None

    def __init__(
        self,
        loader: Any,
        dealing: Dealing,
        limit: int | float = 1.0,
        ranks: Ranks = SINGLE,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        """Wrap a loader.

        Args:
            ranks: the ranks that compare the first batch of each epoch.
            count: function that counts the samples in a batch.
        """
        self.loader, self.dealing, self.limit, self.ranks = loader, dealing, limit, ranks
        self.tracked = tracked(loader)
        self.count_samples = sample_counter(loader, count)
        self.restored: dict[str, Any] = {}
        # `opened`: the epoch opened last; `ended`: whether it was read to its end
        self.opened, self.ended = -1, False
        # Whether the loader continued from a restored state in this epoch
        self.is_restored = False
        # Description of the batches read, set when an epoch is over; it must be equal on all ranks
        self.amount_read = ""
        # An epoch whose first batch was read early, that batch, and the iterator over the rest
        self.first_read: tuple[int, Any, Iterator[Any]] | None = None

    @property
    def rounds(self) -> int | None:
        """Number of batches per replica in an epoch, or None if the stream has no length."""
        return self.share

    @property
    def share(self) -> int | None:
        """Number of batches per replica in this process's loader, or None if it has no length."""
        length = length_of(self.loader)
        return apply_limit(self.limit, None if length is None else -(-length // self.dealing.layout.replicas))

    @property
    def forward_is_keyed(self) -> bool:
        """Whether the generators are still keyed for the forward pass after loading. This requires one batch per step.

        Otherwise, the generators must be reseeded before the forward pass, which costs 10 us.
        """
        alone = self.dealing.accumulate == self.dealing.layout.replicas == 1
        return self.dealing.keyed and alone

    def epoch(self, epoch: int, start_step: int = 0, batches_at_most: int | None = None) -> Iterator[StepInput]:
        """Yield an epoch's steps, starting at `start_step`, with a total of at most `batches_at_most` batches."""
        replicas, in_step = self.dealing.layout.replicas, self.dealing.accumulate * self.dealing.layout.replicas
        batches = self._read(epoch, start_step, batches_at_most)
        while items := list(islice(batches, in_step)):
            rounds, rest = divmod(len(items), replicas)
            if rest and self.dealing.full_rounds:
                return
            unmasked, masked, samples = list[ReplicaBatch](), list[ReplicaBatch](), 0
            for item in items:  # one loop without generators, since it runs in every step
                samples += item.samples
                if not item.masked:
                    unmasked.append(item)
                elif item.batch is not _END:
                    masked.append(item)
            # replica-major, as in DealtData: all batches of one replica, then of the next (docs/decisions.md)
            unmasked.sort(key=attrgetter("replica"))
            fill = masked[: max(0, len(masked) - len(unmasked))]
            yield StepInput(unmasked, samples, rounds + bool(rest), rest == 0, fill)

    def _read(self, epoch: int, start_step: int, batches_at_most: int | None) -> Iterator[ReplicaBatch]:
        """Yield the batches of all replicas; `_END` replaces the data of batches that this process does not run."""
        dealing, keyed, key, self.amount_read = self.dealing, self.dealing.keyed, self.key(epoch), ""
        tracked_loader, items = self.tracked, None
        replicas, local, leaders = dealing.layout.replicas, dealing.replicas, next(iter(dealing.leaders), range(0))
        is_limited = self._is_limited
        # a stream with a length ends there, as it may be endless
        limit = (self.share or 0) * replicas if is_limited else most_batches(self.loader)
        end = min(inf if most is None else most for most in (limit, batches_at_most))
        batches, first, samples = self.open(epoch, start_step), start_step * dealing.accumulate * replicas, 0
        position = first
        while position < end:
            # before the batch is read, since loading draws from these generators; workers are keyed when they start
            if keyed:
                seed_generators(key + position)
            batch: Any = _END if self.ended else next(batches, _END)
            if tracked_loader is not None and batch is not _END:
                if batch.state is not None:
                    tracked_loader.note(batch)
                batch, items, *_ = batch
            if position == first and self.ranks.size > 1:
                require_same(batch, self.ranks, f"epoch {epoch} of {type(self.loader).__name__}")
            if batch is _END:
                self.ended = True
                break
            size = require_samples(batch, items) if self.count_samples is require_samples else self.count_samples(batch)
            samples += size
            round, replica = divmod(position, replicas)
            is_run = replica in local or replica in leaders
            yield ReplicaBatch(replica, round, batch if is_run else _END, size, masked=replica not in local)
            position += 1
        if self.is_restored and not is_limited:
            next(batches, None)  # litdata's loader moves to its next epoch only if it was read to its end
        self.amount_read = f"{position} batches, {samples} samples read"
        self.ended |= batches_at_most is None and not is_limited

    def key(self, epoch: int) -> int:
        """Return the generator key for an epoch's first batch. Batch k uses key + k."""
        return mix(self.dealing.seed, epoch) >> 1

    def open(self, epoch: int, start_step: int) -> Iterator[Any]:
        """Return an iterator over the stream, positioned at `start_step` by a saved state or by skipping batches."""
        skipped = start_step * self.dealing.accumulate * self.dealing.layout.replicas
        # used for one epoch only: the next one starts from its beginning, with samplers seeded by epoch
        restored, self.restored, self.is_restored = self.restored, {}, False
        if restored.get("epoch") == epoch - 1 and start_step == 0 and EPOCHS & {*restored.get("loader", ())}:
            return self._next_epoch(epoch, restored["loader"])
        if restored.get("epoch") != epoch:
            restored = {}
        early, self.first_read = self.first_read, None
        # Don't compare with len(loader): with workers, an iterable dataset yields more batches.
        self.opened, self.ended = epoch, restored.get("ended", False)
        if self.ended:  # torchdata's loader, restored at its end, starts over
            return iter(())
        if self.dealing.keyed:
            seed_generators(mix(self.dealing.seed, epoch))
        for number, part in enumerate(loaders_in(self.loader)):
            set_epoch(part, epoch)
            key = mix(self.dealing.seed, epoch, *[number] * (number > 0))
            seed_samplers(key, getattr(part, "sampler", None), getattr(part, "batch_sampler", None))
        if "loader" in restored and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(restored["loader"])
            self.is_restored, skipped, early = True, 0, None
        if skipped and self.tracked is not None and "states" in restored:
            batch_key = self.key(epoch) + skipped - 1 if self.dealing.keyed else None
            batches = self.tracked.resume(self._worker_key(epoch), restored, batch_key)
            if batches is not None:
                return batches
            if self.dealing.keyed:  # the readers start over
                seed_generators(mix(self.dealing.seed, epoch))
        if early is not None and early[0] == epoch:
            batches = chain(() if early[1] is _END else early[1:2], early[2])
        else:
            batches = self._begin(epoch)
        if skipped:
            self._skip(batches, epoch, start_step, skipped, "states" in restored)
        return batches

    def _next_epoch(self, epoch: int, state: dict[str, Any]) -> Iterator[Any]:
        """Return an iterator over `epoch` of a loader that counts epochs itself; `state` is from the previous epoch."""
        self.opened, self.ended, self.is_restored = epoch, False, True
        self.loader.load_state_dict(state)
        batches: Iterator[Any] = read_loader(self.loader)
        if self.dealing.keyed:
            seed_generators(self.key(epoch))
        # restored at its end, MosaicML's loader yields nothing, and litdata's yields the next epoch
        first = _END if self._is_limited else next(batches, _END)
        if first is not _END:
            return chain([first], batches)
        for _ in batches:  # the batches of the previous epoch beyond the limit
            pass
        return read_loader(self.loader)

    @property
    def _is_limited(self) -> bool:
        return isinstance(self.limit, int) or self.limit != 1.0

    def _begin(self, epoch: int) -> Iterator[Any]:
        if isinstance(self.loader, CombinedLoader):
            return self.loader.batches()
        return read_loader(self.loader) if self.tracked is None else self.tracked.open(self._worker_key(epoch))

    def _worker_key(self, epoch: int) -> int | None:
        return mix(WORKER_STREAM, self.dealing.seed, epoch) if self.dealing.keyed else None

    def _skip(self, batches: Iterator[Any], epoch: int, step: int, count: int, has_state: bool) -> None:
        """Read and discard batches using their original keys, so that the loader draws the same random numbers."""
        reason = "a state that does not restore its position (a shuffle buffer?)" if has_state else "no state_dict"
        log.warning(
            "%s has %s, so %d batches are read again to return to step %d of epoch %d.",
            name_of(self.loader), reason, count, step, epoch,
        )  # fmt: skip
        for position in range(count):
            if self.dealing.keyed:
                seed_generators(self.key(epoch) + position)
            batch: Any = next(batches, _END)
            if self.tracked is not None and batch is not _END and batch.state is not None:
                self.tracked.note(batch)

    def read_samples(self, epoch: int) -> dict[str, list[Sample]]:
        """Return the hashes of an epoch's first batch, keyed by loader name. Store the batch until the epoch starts."""
        with kept_generators():
            batches = self.open(epoch, 0)
            if self.dealing.keyed:
                seed_generators(self.key(epoch))
            batch: Any = next(batches, _END)
        self.first_read = epoch, batch, batches
        if self.tracked is not None and batch is not _END:
            batch = batch.batch
        if not isinstance(self.loader, CombinedLoader) or self.loader.mode == "sequential":
            return {"": [hashes_of(batch)]}
        names = self.loader.names
        pieces = [_END] * len(names) if batch is _END else self.loader.pieces(batch)
        return {name: [hashes_of(piece)] for name, piece in zip(names, pieces, strict=True)}

    def changed_content(self, before: Mapping[str, Any]) -> list[str]:
        """Return an empty list, because a stream cannot be read from another position.

        A stream is checked only at the position where it resumes.
        """
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the current epoch, whether it has ended, and the state of the loader or its dataset, if any."""
        if self.opened < 0 or self.first_read is not None:
            return {}
        if hasattr(self.loader, "state_dict"):
            place = {"loader": self.loader.state_dict()}
        else:
            place = {} if self.tracked is None else self.tracked.state_dict()
        return {"epoch": self.opened, "ended": self.ended, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`. The state is used only if the same epoch is opened next."""
        self.restored = state


class OwnShares(StreamData):
    """A loader that yields this process's own share of the data. Shares may be uneven.

    Each process reads its share as in a single-process run. The processes agree on each step's samples in advance,
    and continue until all shares are exhausted.
    """

    forward_is_keyed = False

    def __init__(
        self,
        loader: Any,
        dealing: Dealing,
        limit: int | float,
        ranks: Ranks,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        """Wrap a loader. All ranks must call this.

        Args:
            dealing: the settings that determine how the run's batches are assigned to processes.
            ranks: the ranks that read shares.
            count: function that counts the samples in a batch.
        """
        # a seed per process: two shares of one dataset must not draw the same augmentations
        seed = mix(dealing.seed, dealing.process)
        super().__init__(
            loader, Dealing(Layout(1, 1), 0, dealing.accumulate, seed, keyed=dealing.keyed), limit, SINGLE, count
        )
        self.run_dealing, self.sharers = dealing, ranks
        share = self.share
        longest = int(ranks.all_reduce(torch.tensor(UNKNOWN if share is None else share), "max"))
        self.longest = None if longest == UNKNOWN else longest

    @property
    def rounds(self) -> int | None:
        """Number of batches in the largest share, or None if any loader has no length."""
        return self.longest

    def epoch(self, epoch: int, start_step: int = 0, batches_at_most: int | None = None) -> Iterator[StepInput]:
        """Yield the steps of an epoch until all processes' shares are exhausted. A step may have no local batches.

        Raises DataError if a process has no batch although every replica needs one in each round.
        """
        accumulate, steps, processes = self.dealing.accumulate, super().epoch(epoch, start_step), self.sharers.size
        for number in count(start_step):
            step = next(steps, None)
            self.amount_read = ""  # shares differ, so there is nothing to compare
            batches = step.batches if step is not None else []
            for item in batches:
                item.replica = self.run_dealing.process
            if number == start_step:
                first = batches[0].batch if batches else None
                require_different(first, self.sharers, f"epoch {epoch} of {type(self.loader).__name__}")
            # one collective per step exchanges the number of samples, and whether any process has batches left
            numbers = sum(item.samples for item in batches), bool(batches), len(batches) == accumulate, len(batches)
            samples, present, full, batches_of_all = self.sharers.all_reduce(torch.tensor(numbers), "sum").tolist()
            if present == 0:
                return
            if self.run_dealing.full_rounds and present < processes:
                raise DataError(
                    f"Manual optimization and sync_batchnorm need a batch on every process, but in step {number + 1} "
                    f"of epoch {epoch}, only {present} of {processes} processes had one left. Give all processes the "
                    f"same number of batches (limit_train_batches), or let Legato distribute the samples."
                )
            rest = accumulate if self.longest is None else self.longest - number * accumulate
            rounds = accumulate if full else min(rest, accumulate)
            yield StepInput(batches, samples, rounds, is_full=batches_of_all == processes * len(batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes' loaders. All ranks must call this."""
        states = self.sharers.gather_objects(super().state_dict())
        return {"shares": states} if all(states) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`. The state is used only if the same epoch is opened next."""
        if "shares" in state:
            super().load_state_dict(state["shares"][self.run_dealing.process])


def own_shares(data: Any, ranks: Ranks, count: Callable[[Any], int] | None = None) -> OwnShares:
    """Wrap the loader of `data` in `OwnShares`, which reads a different shard in each process."""
    shares = OwnShares(data.loader, data.dealing, data.limit, ranks, count)
    log_share("training", data.loader, ranks)
    if hasattr(data.loader, "__next__"):  # an iterator cannot start over with this process's random numbers
        shares.first_read = getattr(data, "first_read", None)
    return shares
