"""CombinedLoader: several loaders as one, whose batches are made of a batch of each; or of one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from ..errors import ConfigError, DataError, did_you_mean
from .loaders import EpochOrder, MapLoader, is_dealable, iterate_loader, length_of, like, require_iterable
from .randomness import KeyedDataset
from .sampling import CHUNK, Deal, KeyedIndices, Layout, mix
from .steps import Dealing
from .transfer import count_samples
from .workers import shielded

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
_END = object()


class CombinedLoader(Iterable[tuple[Any, int, int]]):
    """Loaders in a dict, a list, a tuple or any nesting of them; a batch has that same form.

    In `fit` the order of samples, resume and augmentation are those of each loader alone; a combined batch counts as
    the samples of all loaders in it.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        """Combine loaders, each of them any iterable of batches.

        mode: "min_size" ends with the shortest loader; "max_size_cycle" with the longest, while shorter ones begin
        anew; "max_size" with the longest, with None for those that are done; "sequential" takes the batches of one
        loader after the other, as they are.

        Raises ConfigError for another mode, DataError for what is no loader.
        """
        if mode not in get_args(Mode):
            raise ConfigError(
                f"CombinedLoader(mode={mode!r}): expected one of {get_args(Mode)}.{did_you_mean(mode, get_args(Mode))}"
            )
        self.iterables, self.mode = iterables, mode
        named = list(_leaves(iterables, ""))
        self.names = [name or "loader" for name, _ in named]
        """Where each loader stands, such as "text.0"."""
        self.flattened = [loader for _, loader in named]
        """The loaders, in the order in which the nesting is written."""
        if not named:
            raise DataError("A CombinedLoader needs at least one loader, got none.")
        for name, loader in zip(self.names, self.flattened, strict=True):
            if isinstance(loader, CombinedLoader):
                raise DataError(
                    f"The combined loader {name!r} is a CombinedLoader itself; put its loaders in its place."
                )
            require_iterable(loader, f"The combined loader {name!r}")

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx); with "sequential" both count by loader, else the second is 0."""
        if self.mode != "sequential":
            yield from ((batch, index, 0) for index, batch in enumerate(self.batches()))
            return
        for number, loader in enumerate(self.flattened):
            yield from ((batch, index, number) for index, batch in enumerate(_opened(loader)))

    def __len__(self) -> int:
        """Return the number of combined batches. Raises TypeError where a loader that counts does not say its own."""
        lengths = [length_of(loader) for loader in self.flattened]
        unknown = [name for name, length in zip(self.names, lengths, strict=True) if length is None]
        if unknown:
            raise TypeError(f"{', '.join(unknown)} of this CombinedLoader: no length.")
        return self.combine_lengths([length for length in lengths if length is not None])

    def combine_lengths(self, lengths: list[int]) -> int:
        """Return how many combined batches there are, given the loaders' own numbers."""
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def batches(self) -> Iterator[Any]:
        """Yield the combined batches."""
        if self.mode == "sequential":
            return (batch for batch, *_ in self)
        return map(self.fill, self._rows())

    def fill(self, pieces: Iterable[Any]) -> Any:
        """Return the nesting of the loaders, with a piece in the place of each."""
        return _fill(self.iterables, iter(pieces))

    def count_samples(self, batch: Any) -> int:
        """Return the samples of a combined batch: of all loaders together."""
        if self.mode == "sequential":
            return count_samples(batch)
        return sum(count_samples(piece) for piece in _pieces(self.iterables, batch) if piece is not None)

    def _rows(self) -> Iterator[list[Any]]:
        """Yield a batch of each loader."""
        iterators = [_opened(loader) for loader in self.flattened]
        done: set[int] = set()
        while True:
            row: list[Any] = []
            for number, loader in enumerate(self.flattened):
                piece = None if self.mode == "max_size" and number in done else next(iterators[number], _END)
                if piece is _END:
                    done.add(number)
                    if self.mode == "min_size" or len(done) == len(self.flattened):
                        return
                    piece = None
                    if self.mode == "max_size_cycle":
                        iterators[number] = _opened(loader)
                        piece = next(iterators[number], _END)
                    if piece is _END:
                        raise DataError(f"The combined loader {self.names[number]!r} yields no batch.")
                row.append(piece)
            yield row


def combined(loaders: Any) -> Any:
    """Return several loaders in a dict, list or tuple as a CombinedLoader, as `fit` takes them; else what was given.

    A list counts as several loaders where it has a DataLoader in it: without one it is a list of batches.
    """
    if isinstance(loaders, Mapping) or (isinstance(loaders, (list, tuple)) and _has_loader(loaders)):
        return CombinedLoader(loaders, "max_size_cycle")
    return loaders


def one_after_another(loaders: Any) -> list[Any]:
    """Return the loaders over which an evaluation passes one after the other, given a dict or list of them, or one."""
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return list(loaders)
    return [] if loaders is None else [loaders]


def sample_counter(loader: Any) -> Callable[[Any], int]:
    """Return what counts the samples in a batch of `loader`."""
    return loader.count_samples if isinstance(loader, CombinedLoader) else count_samples


def loaders_in(loader: Any) -> list[Any]:
    """Return the loaders that a loader is made of: itself, where it is not combined."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def _has_loader(loaders: Any) -> bool:
    parts = loaders.values() if isinstance(loaders, Mapping) else loaders
    return any(
        _has_loader(part)
        if isinstance(part, (Mapping, list, tuple))
        else isinstance(part, (DataLoader, CombinedLoader))
        for part in parts
    )


def _opened(loader: Any) -> Iterator[Any]:
    with shielded(loader):
        return iterate_loader(iter(loader))


def _leaves(loaders: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each loader with its place in the nesting."""
    if not isinstance(loaders, (Mapping, list, tuple)):
        yield name, loaders
        return
    keys = loaders if isinstance(loaders, Mapping) else getattr(loaders, "_fields", range(len(loaders)))
    for key, part in zip(keys, loaders.values() if isinstance(loaders, Mapping) else loaders, strict=True):
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _fill(loaders: Any, pieces: Iterator[Any]) -> Any:
    if isinstance(loaders, Mapping):
        filled = {key: _fill(part, pieces) for key, part in loaders.items()}
        return filled if type(loaders) is dict else type(loaders)(filled)  # type: ignore[call-arg]
    if isinstance(loaders, tuple) and hasattr(loaders, "_fields"):
        return type(loaders)(*(_fill(part, pieces) for part in loaders))
    if isinstance(loaders, (list, tuple)):
        return type(loaders)(_fill(part, pieces) for part in loaders)
    return next(pieces)


def _pieces(loaders: Any, batch: Any) -> Iterator[Any]:
    """Yield each loader's piece of a combined batch."""
    if isinstance(loaders, Mapping):
        for key, part in loaders.items():
            yield from _pieces(part, batch[key])
    elif isinstance(loaders, (list, tuple)):
        for part, piece in zip(loaders, batch, strict=True):
            yield from _pieces(part, piece)
    else:
        yield batch


PART_STREAM = 0x7061727473
"""Keeps the keys of the second loader, and of those after it, apart from the first one's: their orders must differ."""


@dataclass
class CombinedOrder(EpochOrder):
    """The order of one epoch: at each of `length` positions a combined batch."""

    epoch: int = 0
    parts: "tuple[CombinedPart, ...]" = ()

    def samples(self, start: int, stop: int) -> int:
        """Return the samples at positions [start, stop), of all loaders."""
        return sum(part.samples(self.epoch, start, stop) for part in self.parts)

    def step_samples(self, deal: Deal, step: int) -> int:
        """Return the samples of one optimizer step over all replicas and loaders."""
        rounds = deal.rounds_of(step)
        return self.samples(deal.span(rounds.start, 0).start, deal.span(rounds.stop - 1, deal.replicas - 1).stop)


class CombinedPart:
    """One of the loaders: where its batches stand, and what is in them."""

    def __init__(self, name: str, source: MapLoader) -> None:
        batches, positions = source.count_batches(), source.positions(0)
        if not batches or not positions:
            raise DataError(f"The combined loader {name!r} does not say how many batches it has, or has none.")
        self.name, self.source, self.batches, self.positions = name, source, batches, positions
        self.offset, self.cycles, self.passes = 0, False, 1
        """The position of its first batch, whether it begins anew after its last, and how often in an epoch."""
        self.orders: dict[int, EpochOrder] = {}
        """The orders of the newest passes, by the number of the pass in the run."""
        self.orders_kept = 2
        self.sampler: _PartBatches | None = None
        self.sibling: DataLoader[Any] | None = None

    def place(self, position: int) -> tuple[int, int] | None:
        """Return pass and batch that stand at a position of the epoch; None where there is none of this loader."""
        index = position - self.offset
        if index < 0 or (index >= self.batches and not self.cycles):
            return None
        return divmod(index, self.batches)

    def own_epoch(self, epoch: int, number: int) -> int:
        """Return which of this loader's epochs a pass is."""
        return epoch * self.passes + number

    def order(self, own_epoch: int) -> EpochOrder:
        """Return the order of one of this loader's epochs. Raises DataError where it has not its promised length."""
        found = self.orders.get(own_epoch)
        if found is None:
            found = self.source.order(own_epoch)
            if found.length != self.positions:
                raise DataError(
                    f"The sampler of combined loader {self.name!r} drew {found.length} for its epoch {own_epoch}, but "
                    f"its length is {self.positions}. Combined loaders are dealt out by their lengths: give a sampler "
                    f"that draws as many as its __len__ says."
                )
            while len(self.orders) >= self.orders_kept:
                del self.orders[next(iter(self.orders))]
            self.orders[own_epoch] = found
        return found

    def span(self, batch: int) -> range:
        """Return the positions of a batch within its pass."""
        size = self.source.batch_size
        return range(batch * size, min((batch + 1) * size, self.positions))

    def samples(self, epoch: int, start: int, stop: int) -> int:
        """Return the samples that this loader has at positions [start, stop) of an epoch."""
        first, last = max(start - self.offset, 0), max(stop - self.offset, 0)
        if not self.cycles:
            first, last = min(first, self.batches), min(last, self.batches)
        found = 0
        for number in range(first // self.batches, -(-last // self.batches)):
            left, right = max(first - number * self.batches, 0), min(last - number * self.batches, self.batches)
            if left < right:
                found += self._samples_of_pass(self.own_epoch(epoch, number), left, right)
        return found

    def _samples_of_pass(self, own_epoch: int, first: int, last: int) -> int:
        if self.source.own_batches:
            return self.order(own_epoch).samples(first, last)
        return self.span(last - 1).stop - self.span(first).start

    def open(self, deal: Deal, dealing: Dealing, start_step: int, epoch: int) -> Iterator[Any]:
        """Return an iterator over this loader's collated batches for a process, from `start_step` on."""
        in_step = deal.replicas * deal.accumulate
        self.orders_kept = 2 + -(-in_step // self.batches)
        if self.sampler is None or self.sibling is None:
            self.sampler = _PartBatches(self)
            loader = self.source.loader
            tells = not self.source.in_order
            dataset = KeyedDataset(loader.dataset, self.source.seed if dealing.keyed else None, tells)
            self.sibling = like(loader, dataset, self.sampler)
        self.sampler.deal, self.sampler.dealing = deal, dealing
        self.sampler.start_step, self.sampler.epoch = start_step, epoch
        return iter(self.sibling)


class _PartBatches:
    """The batches of one loader for some replicas, as a batch sampler for a DataLoader."""

    def __init__(self, part: CombinedPart) -> None:
        self.part = part
        self.deal, self.dealing = Deal(0, 1, 1, 1), Dealing(Layout(1, 1), 0)
        self.start_step = self.epoch = 0

    def __iter__(self) -> Iterator[KeyedIndices]:
        part, whole = self.part, self.part.source.own_batches
        for number, spans in self._chunks():
            own_epoch = part.own_epoch(self.epoch, number)
            positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in spans])
            found = part.order(own_epoch).order(positions)
            indices = found.tolist() if isinstance(found, np.ndarray) else found
            offset = 0
            for span in spans:
                end = offset + len(span)
                yield KeyedIndices(indices[offset] if whole else indices[offset:end], span.start, own_epoch)
                offset = end

    def _chunks(self) -> Iterator[tuple[int, list[range]]]:
        """Yield batches together that are of one pass, so that their order is evaluated in one call."""
        number, chunk, waiting = -1, list[range](), 0
        for step in range(self.start_step, self.deal.steps):
            for turn in self.deal.turns(step, self.dealing.replicas, self.dealing.leaders):
                place = self.part.place(turn.start)
                if place is None:
                    continue
                if chunk and (place[0] != number or waiting >= CHUNK):
                    yield number, chunk
                    chunk, waiting = [], 0
                number = place[0]
                chunk.append(self.part.span(place[1]))
                waiting += len(chunk[-1])
        if chunk:
            yield number, chunk


class CombinedSource:
    """Combined loaders with the face of a MapLoader: its positions are the combined batches."""

    batch_size, own_batches = 1, True

    def __init__(self, loader: CombinedLoader, seed: int, in_order: bool = False, keyed: bool = True) -> None:
        """The first loader has the order and the random numbers that it would have alone."""
        self.loader = loader
        parts = []
        for number, (name, own) in enumerate(zip(loader.names, loader.flattened, strict=True)):
            own_seed = mix(PART_STREAM, seed, number) if number else seed
            parts.append(CombinedPart(name, MapLoader(own, own_seed, in_order, keyed)))
        self.parts = tuple(parts)
        self.length = loader.combine_lengths([part.batches for part in parts])
        self.drop_last = all(part.source.drop_last for part in parts)
        """Whether a round is left out in which some replica would have no batch."""
        offset = 0
        for part in parts:
            if loader.mode == "sequential":
                part.offset, offset = offset, offset + part.batches
            if loader.mode == "max_size_cycle":
                part.cycles, part.passes = True, -(-self.length // part.batches)

    def positions(self, epoch: int) -> int:
        """Return the number of combined batches in an epoch."""
        return self.length

    def count_batches(self) -> int:
        """Return the number of combined batches in an epoch, over all replicas."""
        return self.length

    def order(self, epoch: int) -> CombinedOrder:
        """Return the order of an epoch."""
        return CombinedOrder(self.length, 1, _positions_themselves, epoch=epoch, parts=self.parts)

    def batches_of(self, order: EpochOrder, deal: Deal, dealing: Dealing, start_step: int, epoch: int) -> Iterator[Any]:
        """Yield the combined batches of a process from `start_step` on, in the order of `Deal.turns`."""
        opened: list[Iterator[Any] | None] = [None] * len(self.parts)
        for step in range(start_step, deal.steps):
            for turn in deal.turns(step, dealing.replicas, dealing.leaders):
                pieces: list[Any] = []
                for number, part in enumerate(self.parts):
                    here = part.place(turn.start) is not None
                    batches = opened[number]
                    if here and batches is None:  # one that comes later starts its workers later
                        batches = opened[number] = part.open(deal, dealing, start_step, epoch)
                    if here or self.loader.mode != "sequential":
                        pieces.append(next(batches) if here and batches is not None else None)
                yield pieces[0] if self.loader.mode == "sequential" else self.loader.fill(pieces)


def is_dealable_by_batch(loader: Any) -> bool:
    """Return whether `loader` is a CombinedLoader of plain DataLoaders that all say how many batches they have."""
    return isinstance(loader, CombinedLoader) and all(
        is_dealable(part) and MapLoader(part, 0).count_batches() for part in loader.flattened
    )


def _positions_themselves(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return positions
