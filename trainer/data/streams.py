"""Streams: iterables that are no plain DataLoader, dealt out by whole batches, or each process's own share."""

import logging
from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from typing import Any

import torch

from ..errors import ConfigError, DataError
from ..processes.collectives import Collectives
from .combined import CombinedLoader, loaders_in, sample_counter
from .loaders import iterate_loader, length_of, seed_samplers, set_epoch
from .randomness import seed_generators
from .sampling import Layout, mix
from .steps import Dealing, ReplicaBatch, StepInput, limited
from .workers import shielded

log = logging.getLogger("legato")

_END = object()
UNKNOWN = 2**62
"""The length of a share that does not say how long it is."""


class StreamData:
    """Any other iterable, passed through and dealt out by whole batches: batch k goes to replica k modulo replicas.

    Every process reads the whole stream and keeps what is its own.
    """

    def __init__(self, loader: Any, dealing: Dealing, limit: int | float = 1.0) -> None:
        self.loader, self.dealing, self.limit = loader, dealing, limit
        self.count_samples = sample_counter(loader)
        self.restored: dict[str, Any] = {}
        self.opened, self.ended = -1, False
        """The epoch that was opened last, and whether it was read to its end."""
        self.length = ""
        """How much was read, once an epoch is over."""

    @property
    def rounds(self) -> int | None:
        """Batches that each replica has in an epoch; None where the stream does not say."""
        length = length_of(self.loader)
        if length is None:
            return self.limit if isinstance(self.limit, int) else None
        return limited(self.limit, -(-length // self.dealing.layout.replicas))

    @property
    def is_whole(self) -> bool | None:
        """None: what a stream says of its length does not tell whether every replica has a batch in each round."""
        return None

    @property
    def forward_is_keyed(self) -> bool:
        """Whether each step finds the generators where the loading of its only batch left them.

        Then its forward goes on with numbers that follow from its position already; to seed again would cost 10 us.
        """
        return self.dealing.keyed and self.dealing.accumulate == self.dealing.layout.replicas == 1

    def epoch(self, epoch: int, start_step: int = 0, batches_at_most: int | None = None) -> Iterator[StepInput]:
        """Yield the steps of an epoch from `start_step` on; the stream's own state, or reading on, leads there.

        Of all replicas' batches take `batches_at_most`.
        """
        dealing, end = self.dealing, batches_at_most
        replicas, own, keyed = dealing.layout.replicas, dealing.replicas, dealing.keyed
        arranged = by_replica if dealing.accumulate > 1 else list
        if isinstance(self.limit, int) or self.limit != 1.0:
            limit = (self.rounds or 0) * replicas
            end = limit if end is None else min(limit, end)
        batches, key = self.open(epoch, start_step), self.key(epoch)
        batches_of_step, leaders = dealing.accumulate * replicas, dealing.leaders or range(0)
        position, turns, theirs, samples, read, self.length = start_step * batches_of_step, [], [], 0, 0, ""
        while end is None or position < end:
            if keyed:
                seed_generators(key + position)
            batch = next(batches, _END)
            if batch is _END:
                self.ended = True
                break
            round, replica = divmod(position, replicas)
            size = self.count_samples(batch)
            samples += size
            read += size
            if replica in own:
                turns.append(ReplicaBatch(replica, round, batch, size))
            elif replica in leaders:
                theirs.append(ReplicaBatch(replica, round, batch, size, masked=True))
            position += 1
            if position % batches_of_step == 0:
                masked = theirs[: max(0, len(theirs) - len(turns))]
                yield StepInput(arranged(turns), samples, dealing.accumulate, masked=masked)
                turns, theirs, samples = [], [], 0
        self.length = f"{position} batches, {read} samples read"
        rest = position % batches_of_step
        if rest and not (dealing.whole_rounds and rest % replicas):
            masked = theirs[: max(0, len(theirs) - len(turns))]
            yield StepInput(arranged(turns), samples, -(-rest // replicas), rest % replicas == 0, masked)

    def key(self, epoch: int) -> int:
        """Return the key of the generators for the first batch of an epoch; the next ones' count on from it."""
        return mix(self.dealing.seed, epoch) >> 1

    def open(self, epoch: int, start_step: int) -> Iterator[Any]:
        """Return an iterator over the stream that stands where `start_step` begins."""
        skipped = start_step * self.dealing.accumulate * self.dealing.layout.replicas
        restored, self.restored = self.restored, {}
        if restored.get("epoch") != epoch:
            restored = {}
        # What a loader says of its length does not tell: with workers an iterable dataset gives more batches.
        self.opened, self.ended = epoch, restored.get("ended", False)
        if self.ended:  # a loader of torchdata that was read to its end would begin anew
            return iter(())
        if self.dealing.keyed:
            seed_generators(mix(self.dealing.seed, epoch))
        for number, part in enumerate(loaders_in(self.loader)):
            set_epoch(part, epoch)
            key = mix(self.dealing.seed, epoch, *[number] * (number > 0))
            seed_samplers(key, getattr(part, "sampler", None), getattr(part, "batch_sampler", None))
        if "loader" in restored and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(restored["loader"])
            skipped = 0
        with shielded(self.loader):
            combined = isinstance(self.loader, CombinedLoader)
            batches = self.loader.batches() if combined else iterate_loader(iter(self.loader))
        if skipped:
            log.warning(
                "%s has no state_dict: reading %d batches again to get back to step %d of epoch %d.",
                type(self.loader).__name__, skipped, start_step, epoch,
            )  # fmt: skip
        for position in range(skipped):
            if self.dealing.keyed:
                seed_generators(self.key(epoch) + position)
            next(batches, None)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return whether the stream has ended, and its own state where it has one (torchdata's protocol)."""
        if self.opened < 0:
            return {}
        own = {"loader": self.loader.state_dict()} if hasattr(self.loader, "state_dict") else {}
        return {"epoch": self.opened, "ended": self.ended, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, if it is that epoch which is opened next."""
        self.restored = state


class OwnShares(StreamData):
    """A loader that yields this process's own share already (`use_distributed_sampler=False`); shares may be uneven.

    The processes agree before each step on its samples, and go on until the last of them is done.
    """

    forward_is_keyed = False

    def __init__(self, loader: Any, dealing: Dealing, limit: int | float, ranks: Collectives) -> None:
        super().__init__(loader, dealing, limit)
        self.ranks = ranks
        alone = Dealing(Layout(1, 1), 0, dealing.accumulate, mix(dealing.seed, dealing.process), keyed=dealing.keyed)
        self.own = StreamData(loader, alone, limit)
        if dealing.layout.replicas != dealing.layout.processes:
            raise ConfigError(
                f"use_distributed_sampler=False: each process's loader is the share of one replica, but there are "
                f"{dealing.layout.replicas} replicas on {dealing.layout.processes} processes; set trainer.replicas="
                f"{dealing.layout.processes}, or let Legato deal the samples out."
            )
        length = length_of(loader)
        self.share = (limit if isinstance(limit, int) else None) if length is None else limited(limit, length)
        longest = int(ranks.all_reduce(torch.tensor(UNKNOWN if self.share is None else self.share), "max"))
        self.longest = None if longest == UNKNOWN else longest

    @property
    def rounds(self) -> int | None:
        """Batches of the process that has most; None where some loader does not say."""
        return self.longest

    def epoch(self, epoch: int, start_step: int = 0, batches_at_most: int | None = None) -> Iterator[StepInput]:
        """Yield the steps of an epoch until every process is at the end of its share; some may have no turns.

        Raises DataError where some have none although every replica needs a batch in each round.
        """
        dealing, process = self.dealing, self.dealing.process
        batches, key = self.own.open(epoch, start_step), self.own.key(epoch)
        limit = self.share if isinstance(self.limit, int) or self.limit != 1.0 else None
        for step in count(start_step):
            turns: list[ReplicaBatch] = []
            for round in range(step * dealing.accumulate, (step + 1) * dealing.accumulate):
                if dealing.keyed:
                    seed_generators(key + round)
                batch = next(batches, _END) if limit is None or round < limit else None
                if batch is _END:
                    self.own.ended = True
                elif limit is None or round < limit:
                    turns.append(ReplicaBatch(process, round, batch, self.count_samples(batch)))
            own = torch.tensor(
                [sum(turn.samples for turn in turns), bool(turns), len(turns) == dealing.accumulate, len(turns)]
            )
            samples, present, full, batches_of_all = self.ranks.all_reduce(own, "sum").tolist()
            if present == 0:
                return
            if dealing.whole_rounds and present < dealing.layout.processes:
                raise DataError(
                    f"Manual optimization and sync_batchnorm take a batch of every process; in step {step + 1} of "
                    f"epoch {epoch} {present} of {dealing.layout.processes} processes had one left. Give all the same "
                    f"number of batches (limit_train_batches does), or let Legato deal the samples out."
                )
            rest = dealing.accumulate if self.longest is None else self.longest - step * dealing.accumulate
            rounds, whole = min(rest, dealing.accumulate), batches_of_all == dealing.layout.processes * len(turns)
            yield StepInput(turns, samples, dealing.accumulate if full else rounds, whole)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes' loaders; every process calls it."""
        states = self.ranks.gather_objects(self.own.state_dict())
        return {"shares": states} if all(states) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, if it is that epoch which is opened next."""
        if "shares" in state:
            self.own.load_state_dict(state["shares"][self.dealing.process])


def by_replica(turns: list[ReplicaBatch]) -> list[ReplicaBatch]:
    """Return the turns of a step replica by replica; those of one replica stay in the order of the data."""
    return sorted(turns, key=attrgetter("replica"))
