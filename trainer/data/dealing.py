"""Training and evaluation data: loaders distributed across replicas, one `StepInput` per optimizer step per process."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

import torch

from ...base.errors import ConfigError, DataError
from ..processes.ranks import SINGLE, Ranks
from .combined import CombinedSource, is_dealable_by_batch
from .loaders import MapLoader, is_dealable, length_of
from .randomness import KeyedDataset
from .sampling import Deal, EpochOrder, KeyedIndices, Layout, keyed_batches
from .shares import (
    LOCKSTEP,
    Sample,
    are_shares,
    differs,
    hashes_of,
    have_same,
    log_share,
    read_again,
    read_samples,
    require_same,
)
from .steps import Dealing, ReplicaBatch, StepInput, apply_limit
from .streams import StreamData

log = logging.getLogger("legato")

# Maximum number of positions per epoch at which processes compare the indices drawn by a sampler
COMPARED = 1024


class DealtData:
    """Map-style data distributed by position. A process reads only its own samples."""

    forward_is_keyed = False
    """False: a worker may have loaded the batch, or loaded it early, so the forward pass must be seeded."""
    amount_read = ""
    """Empty: the ranks compare lengths during setup, and the lengths determine the batches that each rank reads."""

    def __init__(
        self,
        loader: Any,
        dealing: Dealing,
        limit: int | float = 1.0,
        in_order: bool = False,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Wrap a loader that can be distributed by position; `ranks` compare the indices drawn by their samplers."""
        self.loader = loader
        self.source: MapLoader | CombinedSource
        if is_dealable(loader):
            self.source = MapLoader(loader, dealing.seed, in_order)
        else:  # padded for the replicas here, as each loader must repeat its own first samples
            self.source = CombinedSource(
                loader, dealing.seed, in_order, dealing.layout.replicas if dealing.padded else 1
            )
        self.dealing, self.limit, self.ranks = dealing, limit, ranks
        self.warned = False
        # Hashes that identify the data when a run resumes, see `_note_content`; None in an evaluation
        self.content: dict[str, Any] | None = None

    @property
    def rounds(self) -> int | None:
        """Number of batches per replica in an epoch, or None if unknown until the order is drawn."""
        positions = self.source.positions(0)
        return None if positions is None else self._deal(positions).rounds

    @property
    def is_even(self) -> bool:
        """Whether every replica has a batch in each round of an epoch; True if unknown until the order is drawn."""
        positions = self.source.positions(0)
        if positions is None:
            return True
        deal = self._deal(positions)
        return deal.is_full(deal.steps - 1) and not self.dealing.left_out

    def epoch(self, epoch: int, start_step: int = 0, batches_at_most: int | None = None) -> Iterator[StepInput]:
        """Return an epoch's steps, starting at `start_step`, with a total of at most `batches_at_most` batches."""
        order, deal = self.order_and_deal(epoch, batches_at_most)
        if self.ranks.size > 1 and any(part.shuffled is None for part in self.source.map_loaders().values()):
            # a sampler may draw from a generator that ranks seed differently
            drawn = {name: part.indices(0, min(order.length, COMPARED)) for name, part in order.by_loader().items()}
            require_same([order.length, drawn], self.ranks, f"the order that a sampler drew for epoch {epoch}")
        batches = self.source.batches_of(order, deal, self.dealing, start_step, epoch)
        if self.content == {} and self.dealing.keyed and self.dealing.process == 0:
            batches = self._note_content(order, deal, start_step, epoch, batches)
        return self.steps(order, deal, start_step, batches)

    def _note_content(
        self, order: EpochOrder, deal: Deal, step: int, epoch: int, batches: Iterator[Any]
    ) -> Iterator[Any]:
        """Record the position and the hashes of the epoch's first batch, without reading it twice."""
        spans = deal.spans(step, self.dealing.replicas)
        if not spans:
            return batches
        first = next(batches)
        self.content = {}
        for name, loader_order in order.by_loader().items():
            indices = keyed_batches(loader_order, spans[:1], epoch)[0]
            if all(isinstance(index, int) for index in indices):
                place = [indices.epoch, indices.position, list(indices)]
                self.content[name] = {"place": place, "hashes": list(hashes_of(self._piece(first, name)))}
        return chain([first], batches)

    def _piece(self, batch: Any, name: str) -> Any:
        """Return one loader's piece of a batch."""
        combined = self.loader if isinstance(self.source, CombinedSource) else None
        return batch if combined is None else combined.pieces(batch)[combined.names.index(name)]

    def changed_content(self, before: Mapping[str, Any]) -> list[str]:
        """Return the loaders whose samples differ from `before`, the resumed run's `content`.

        Also updates `content`. Each batch is read twice, in a worker process if the loader has workers. Values that
        differ between the two reads, and batches that cannot be read, are ignored.
        """
        self.content, changed = dict(before), list[str]()
        for name, part in self.source.map_loaders().items():
            if name in before and self.dealing.keyed:
                epoch, position, indices = before[name]["place"]
                batches = [KeyedIndices(indices, position, epoch)] * 2
                now = read_again(KeyedDataset(part.loader.dataset, part.seed, True), part.loader, batches)
                if now is not None and differs([tuple(before[name]["hashes"]), now]):
                    self.content[name] = {**before[name], "hashes": list(now)}
                    changed.append(name)
        return changed

    def steps(self, order: EpochOrder, deal: Deal, start_step: int, batches: Iterator[Any]) -> Iterator[StepInput]:
        """Yield an epoch's steps, starting at `start_step`, taking their batches from `batches` in order."""
        replicas, leaders, last = self.dealing.replicas, self.dealing.leaders, deal.steps - 1
        for step in range(start_step, last + 1):
            unmasked, masked = list[ReplicaBatch](), list[ReplicaBatch]()
            for replica, round, start, stop in deal.spans(step, replicas, leaders):
                samples = order.samples(start, stop)
                masks, place = replica not in replicas, (order, start, stop)
                item = ReplicaBatch(replica, round, next(batches), samples, masked=masks, place=place)
                (masked if item.masked else unmasked).append(item)
            rounds = min(deal.accumulate, deal.rounds - step * deal.accumulate)
            # only the last round may lack batches; with leave_out_samples, any round may
            is_full = (step < last and deal.count is None) or deal.is_full(step)
            samples = order.samples(*deal.step_positions(step))
            if self.dealing.full_rounds and samples and not is_full:
                raise DataError(
                    f"trainer.leave_out_samples leaves a replica without a batch in step {step + 1} of an epoch, but "
                    f"manual optimization and sync_batchnorm need a batch on every replica. Use a larger batch size or "
                    f"one replica."
                )
            yield StepInput(unmasked, samples, rounds, is_full, masked)

    def read_samples(self, epoch: int) -> dict[str, list[Sample]]:
        """Return the hashes of a few samples from each dataset, keyed by loader name. All ranks must call this."""
        loaders = {name: part.loader for name, part in self.source.map_loaders().items()}
        # the shortest length: a rank that only lacks samples at the end must still compare as equal
        lengths = [length_of(loader.dataset) or 0 for loader in loaders.values()]
        lengths = self.ranks.all_reduce(torch.tensor(lengths), "min").tolist()
        return {name: read_samples(loaders[name], length) for name, length in zip(loaders, lengths, strict=True)}

    def order_and_deal(self, epoch: int, batches_at_most: int | None = None) -> tuple[EpochOrder, Deal]:
        """Return an epoch's sample order, drawn by the sampler if there is one, and its division among replicas."""
        order = self.source.order(epoch)
        if batches_at_most is not None:  # batches rather than rounds: a limit may fall in the middle of a round
            order.length = min(order.length, batches_at_most * self.source.batch_size)
        deal = self._deal(order.length)
        if deal.samples > order.length:
            order.begin_again()
        if self.dealing.left_out:
            order.left_out = self.dealing.left_out
            deal = replace(deal, count=order.samples)
        return order, deal

    def _deal(self, positions: int) -> Deal:
        dealing, source, replicas = self.dealing, self.source, self.dealing.layout.replicas
        size, drop_last = source.batch_size, source.drop_last
        deal = Deal(positions, size, replicas, dealing.accumulate, drop_last, padded=dealing.padded)
        rounds = deal.rounds
        # a collective in the step (SyncBatchNorm, manual optimization) would hang if a replica had no batch
        if dealing.full_rounds and not deal.is_full(deal.steps - 1):
            rounds -= 1
            self._warn_of_rest(len(range(rounds * replicas * size, positions)))
        return replace(deal, limit_rounds=apply_limit(self.limit, rounds))

    def _warn_of_rest(self, left_out: int) -> None:
        if not self.warned and self.dealing.process == 0:
            self.warned = True
            log.warning(
                "The last %d %s of each epoch are left out because there are too few for %d replicas: manual "
                "optimization and sync_batchnorm need a batch on every replica.",
                left_out, "batches" if self.source.own_batches else "samples", self.dealing.layout.replicas,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the position in the trainer's State suffices to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see `state_dict`."""


TrainingData = DealtData | StreamData


class EvaluationData:
    """Evaluation loaders, distributed across replicas so that each sample is evaluated exactly once."""

    def __init__(
        self,
        loaders: list[Any],
        dealing: Dealing,
        limit: int | float = 1.0,
        shares: Collection[int] = (),
        ranks: Ranks = SINGLE,
        expects_shares: bool = False,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        """Wrap the loaders. All ranks must call this.

        Args:
            shares: indices of loaders that are known to read a different shard in each process.
            ranks: the ranks that compare samples to determine whether a loader yields the same data on all ranks.
            expects_shares: whether to treat map-style data as a share if its samples cannot be compared.
            count: function that counts the samples in a stream's batch.
        """
        self.loaders, self.limit, self.ranks = loaders, limit, ranks
        # Indices of loaders that yield a separate share in each process, and of loaders that need no comparison
        self.shares, self.certain_shares = set[int](), set(shares)
        self.dealing = replace(dealing, accumulate=1, full_rounds=False, padded=False, left_out=frozenset())
        # without a limit here: `limit` counts batches over all replicas, while a source's limit counts rounds
        self.sources = [training_data(loader, self.dealing, 1.0, False, ranks, count) for loader in loaders]
        for index, source in enumerate(self.sources):
            if index in shares or (isinstance(source, DealtData) and self._is_share(source, expects_shares)):
                self._take_share(index)
        # Whether each replica had a batch in the latest round
        self.is_full = True
        # Batches of each loader and batches to evaluate, over all replicas; None if unknown
        self.lengths = [
            source.source.count_batches() if isinstance(source, DealtData) else length_of(source.loader)
            for source in self.sources
        ]
        self.counts = [apply_limit(limit, length) for length in self.lengths]
        for source in self.sources:
            if isinstance(source, DealtData):
                source.source.drop_last = False  # `counts` omits the short batch; a full one must not be dropped

    def batches(self, epoch: int, limit: int | None = None) -> Iterator[ReplicaBatch]:
        """Yield this process's batches from every loader.

        Args:
            limit: maximum number of batches per loader, across all replicas.
        """
        for index, source in enumerate(self.sources):
            if isinstance(source, StreamData) and self.ranks.size > 1:
                self._compare(index, source, epoch)
            # a stream may yield more batches than its length
            is_unlimited = isinstance(source, StreamData) and isinstance(self.limit, float) and self.limit == 1.0
            limits = limit, None if is_unlimited else self.counts[index]
            most = min((count for count in limits if count is not None), default=None)
            first_replica = self.dealing.replicas.start if index in self.shares else 0
            for step in source.epoch(epoch, batches_at_most=most):
                self.is_full = step.is_full
                for item in (*step.batches, *step.masked):
                    item.dataloader_idx = index
                    item.replica += first_replica
                    yield item

    def _is_share(self, source: DealtData, expects_shares: bool) -> bool:
        """Return whether a map-style loader yields a different shard in each process. All ranks must call this."""
        # with nothing to compare, the user's setting decides
        if self.ranks.size == 1:
            return expects_shares
        if are_shares(source.read_samples(0), self.ranks, self.dealing.process):
            return True
        if not expects_shares:
            return False
        # if the user expects shares, a custom sampler or a different length indicates one
        draws = any(part.shuffled is None for part in source.source.map_loaders().values())
        return draws or not have_same(source.source.positions(0), self.ranks)

    def _compare(self, index: int, stream: StreamData, epoch: int) -> None:
        """Treat a stream's data as a share if the processes' first batches differ. All ranks must call this."""
        if index in self.certain_shares:
            return
        if are_shares(stream.read_samples(epoch), self.ranks, self.dealing.process):
            self._take_share(index)
        elif index in self.shares:
            self.shares.remove(index)
            stream.dealing = self.dealing

    def _take_share(self, index: int) -> None:
        """Treat a loader's data as this process's own share, and read all of it, as in a single-process run."""
        source = self.sources[index]
        if index in self.shares:
            return
        if self.dealing.lockstep:
            raise ConfigError(LOCKSTEP)
        self.shares.add(index)
        log_share("evaluation", source.loader, self.ranks)
        source.dealing, source.ranks = replace(self.dealing, layout=Layout(1, 1), process=0), SINGLE
        if isinstance(source, DealtData) and isinstance(source.source, MapLoader):
            source.source.is_share = True

    @property
    def is_even(self) -> bool:
        """Whether every replica has a batch in each round of each loader with a known length."""
        return all(count is None or count % replicas == 0 for count, replicas in self._dealt())

    def rounds(self) -> list[int | float]:
        """Return, for each loader, the largest number of batches per replica, or infinity if unknown."""
        return [inf if count is None else -(-count // replicas) for count, replicas in self._dealt()]

    def _dealt(self) -> Iterator[tuple[int | None, int]]:
        """Yield, for each loader, its number of batches and the number of replicas that share them."""
        return zip(self.counts, (source.dealing.layout.replicas for source in self.sources), strict=True)


def training_data(
    loader: Any,
    dealing: Dealing,
    limit: int | float,
    in_order: bool,
    ranks: Ranks = SINGLE,
    count: Callable[[Any], int] | None = None,
) -> TrainingData:
    """Return the data of a training loader, distributed by position if possible, otherwise as a stream.

    Args:
        ranks: the ranks that check, in each epoch, that they are reading the same data.
        count: function that counts the samples in a stream's batch.
    """
    if is_dealable(loader) or is_dealable_by_batch(loader):
        return DealtData(loader, dealing, limit, in_order, ranks)
    return StreamData(loader, dealing, limit, ranks, count)
