"""CombinedLoader: multiple loaders read together or one after another, with the same guarantees as a single loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import lru_cache, reduce
from itertools import groupby
from operator import getitem, itemgetter
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...base.errors import ConfigError, DataError, did_you_mean
from ...base.tensors import require_samples
from .loaders import MapLoader, is_dealable, length_of, read_loader, require_iterable
from .sampling import CHUNK, Deal, EpochOrder, Integers, KeyedIndices, keyed_batches, mix
from .steps import Dealing

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
_END = object()


class CombinedLoader(Iterable[tuple[Any, int, int]]):
    """Multiple loaders in a dict, list, tuple or any nesting of these. Each batch has the same structure.

    In `fit`, each loader has its own sample order, resume position and random numbers. The number of samples in a
    combined batch is the sum across all loaders.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        """Combine loaders, each of which may be any iterable of batches.

        Args:
            mode: "min_size" stops with the shortest loader. "max_size_cycle" stops with the longest and restarts
                shorter loaders. "max_size" stops with the longest and yields None for exhausted loaders. "sequential"
                yields all batches of one loader before those of the next, without nesting.

        Raises ConfigError for an unknown mode and DataError for an object that is not a loader.
        """
        if mode not in get_args(Mode):
            raise ConfigError(
                f"CombinedLoader(mode={mode!r}): expected one of {get_args(Mode)}.{did_you_mean(mode, get_args(Mode))}"
            )
        self.iterables, self.mode = iterables, mode
        leaves = list(_leaves(iterables))
        self.names = [name for name, *_ in leaves]
        """The path of each loader in the nesting, such as "text.0"."""
        self.flattened = [loader for *_, loader in leaves]
        """The loaders, in nesting order."""
        self._keys = [keys for _, keys, _ in leaves]
        if not leaves:
            raise DataError("CombinedLoader needs at least one loader, but got none.")
        for name, loader in zip(self.names, self.flattened, strict=True):
            if isinstance(loader, CombinedLoader):
                raise DataError(f"The combined loader {name!r} is itself a CombinedLoader. Pass its loaders directly.")
            require_iterable(loader, f"The combined loader {name!r}")

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx); dataloader_idx is 0 in every mode except "sequential"."""
        if self.mode != "sequential":
            yield from ((batch, index, 0) for index, batch in enumerate(self.batches()))
            return
        for number, loader in enumerate(self.flattened):
            yield from ((batch, index, number) for index, batch in enumerate(read_loader(loader)))

    def __len__(self) -> int:
        """Return the number of combined batches. Raises TypeError if a loader has no length."""
        lengths = [length_of(loader) for loader in self.flattened]
        unknown = [name for name, length in zip(self.names, lengths, strict=True) if length is None]
        if unknown:
            raise TypeError(f"CombinedLoader has no length because these loaders have none: {', '.join(unknown)}.")
        return self.combine_lengths([length for length in lengths if length is not None])

    def combine_lengths(self, lengths: list[int]) -> int:
        """Return the number of combined batches, given the length of each loader."""
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def batches(self) -> Iterator[Any]:
        """Yield the combined batches."""
        if self.mode == "sequential":
            return (batch for batch, *_ in self)
        return map(self.fill, self._rows())

    def fill(self, pieces: Iterable[Any]) -> Any:
        """Return a combined batch: the nesting of the loaders with each loader replaced by its batch."""
        return _fill(self.iterables, iter(pieces))

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a combined batch, summed across all loaders."""
        return sum(require_samples(piece) for piece in self.pieces(batch) if piece is not None)

    def pieces(self, batch: Any) -> list[Any]:
        """Return each loader's piece of a combined batch. In "sequential" mode, the batch is the only piece."""
        return [batch] if self.mode == "sequential" else [reduce(getitem, keys, batch) for keys in self._keys]

    def _rows(self) -> Iterator[list[Any]]:
        # open all at once, so that every loader's workers start before the first batch is needed
        iterators = [read_loader(loader) for loader in self.flattened]
        done: set[int] = set()
        while True:
            row: list[Any] = []
            for number, loader in enumerate(self.flattened):
                piece = None if self.mode == "max_size" and number in done else next(iterators[number], _END)
                if piece is _END:
                    done.add(number)
                    # in max_size_cycle too, the epoch ends with the longest loader, which is exhausted last
                    if self.mode == "min_size" or len(done) == len(self.flattened):
                        return
                    piece = None
                    if self.mode == "max_size_cycle":
                        iterators[number] = read_loader(loader)
                        piece = next(iterators[number], _END)
                    if piece is _END:
                        raise DataError(f"The combined loader {self.names[number]!r} yields no batches.")
                row.append(piece)
            yield row


def combined(loaders: Any) -> Any:
    """Wrap a dict, list or tuple of loaders in a CombinedLoader, as `fit` does. Return anything else unchanged.

    A list that contains no loader is treated as a list of batches. Any iterable is treated as a loader unless it can be
    indexed or moved to a device, as batches can.
    """
    if isinstance(loaders, Mapping) or (isinstance(loaders, (list, tuple)) and _has_loader(loaders)):
        return CombinedLoader(loaders, "max_size_cycle")
    return loaders


def one_after_another(loaders: Any) -> list[Any]:
    """Return an evaluation's loaders as a list, given a loader, a list, a dict or None.

    As in training, a list of batches is treated as a single loader.
    """
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        batches = loaders and not _has_loader(loaders) and all(map(_is_batch, loaders))
        return [loaders] if batches else list(loaders)
    return [] if loaders is None else [loaders]


def sample_counter(loader: Any, by_task: Callable[[Any], int] | None) -> Callable[[Any], int]:
    """Return the function that counts the samples in a batch from `loader`: `by_task` if the task defines it."""
    if by_task is not None:
        return by_task
    return loader.count_samples if isinstance(loader, CombinedLoader) else require_samples


def loaders_in(loader: Any) -> list[Any]:
    """Return the loaders of a CombinedLoader, or `[loader]`."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def most_batches(loader: Any) -> int | None:
    """Return the maximum number of batches that a loader may yield in an epoch, or None if it has no length.

    With an iterable dataset, each DataLoader worker may yield a short last batch, which the DataLoader's length does
    not account for.
    """
    if isinstance(loader, CombinedLoader):
        lengths = [most_batches(part) for part in loader.flattened]
        return None if None in lengths else loader.combine_lengths([length for length in lengths if length is not None])
    length = length_of(loader)
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if length is None or not is_stream or type(loader).__len__ is not DataLoader.__len__:
        return length
    workers: int = loader.num_workers
    return length + max(0, workers - 1)


def _has_loader(loaders: Any) -> bool:
    parts = loaders.values() if isinstance(loaders, Mapping) else loaders
    alone = not _has_values(parts)  # next to tensors, an iterable such as a set of names is not a loader
    return any(
        _has_loader(part)
        if isinstance(part, (Mapping, list, tuple))
        else isinstance(part, (DataLoader, CombinedLoader))
        or (alone and hasattr(part, "__iter__") and not hasattr(part, "__getitem__") and not hasattr(part, "to"))
        for part in parts
    )


def _has_values(parts: Iterable[Any]) -> bool:
    return any(isinstance(part, (Tensor, np.ndarray)) for part in parts)


def _is_batch(part: Any) -> bool:
    """Return whether an element of a list without DataLoaders is a batch rather than an iterable of batches."""
    if isinstance(part, list):
        return _has_values(part)
    # a custom batch class, such as a graph, may be iterable; its `to` method shows that it is a batch
    kind = type(part)
    return isinstance(part, (Tensor, np.ndarray, tuple, Mapping)) or hasattr(kind, "to") or is_dataclass(kind)


def _leaves(loaders: Any, names: tuple[str, ...] = (), keys: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the keys and the loader of each leaf in the nesting."""
    if not isinstance(loaders, (Mapping, list, tuple)):
        yield ".".join(names) or "loader", keys, loaders
        return
    parts = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
    fields = getattr(loaders, "_fields", None)
    for key, part in parts:
        yield from _leaves(part, (*names, str(fields[key] if fields else key)), (*keys, key))


def _fill(loaders: Any, pieces: Iterator[Any]) -> Any:
    if isinstance(loaders, Mapping):
        filled = {key: _fill(part, pieces) for key, part in loaders.items()}
        return filled if type(loaders) is dict else type(loaders)(filled)  # type: ignore[call-arg]
    if isinstance(loaders, tuple) and hasattr(loaders, "_fields"):
        return type(loaders)(*(_fill(part, pieces) for part in loaders))
    if isinstance(loaders, (list, tuple)):
        return type(loaders)(_fill(part, pieces) for part in loaders)
    return next(pieces)


# Key mixed into the seeds of all loaders but the first, so that their orders differ
PART_STREAM = 0x7061727473


class CombinedPart(MapLoader):
    """A loader in a CombinedLoader, distributed in whole batches: position p is batch p % count of pass p // count."""

    def __init__(self, name: str, loader: "DataLoader[Any]", seed: int, in_order: bool, padded_for: int) -> None:
        super().__init__(loader, seed, in_order)
        self.name, positions = name, self.positions(0) or 0
        # for one replica: batches are only numbered here; CombinedSource distributes them to replicas
        self.deal = Deal(positions, self.batch_size, padded_for, 1, self.drop_last, padded=True)
        # Batches in a pass, and passes in an epoch
        self.count, self.passes = self.deal.rounds * padded_for, 1
        if not self.count:
            raise DataError(f"The combined loader {name!r} must have a length (__len__) of at least one batch.")
        # each restart within an epoch is another epoch of this loader
        self.tells_epoch, self.chunk = not in_order, max(1, CHUNK // self.batch_size)
        # cached, because an order drawn by a sampler is as long as the dataset
        self.order_of_pass = lru_cache(maxsize=4)(self._order_of_pass)

    def order_of_batches(self, epoch: int) -> EpochOrder:
        """Return the order of a combined epoch. Each position is one batch from this loader."""

        def place(position: int) -> tuple[int, range]:
            """Return a batch's pass, numbered like this loader's epochs, and the batch's positions in that pass."""
            number, batch = divmod(position, self.count)
            return epoch * self.passes + number, self.deal.span(*divmod(batch, self.deal.replicas))

        def batches_at(positions: Integers) -> list[KeyedIndices]:
            batches: list[KeyedIndices] = []
            for loader_epoch, places in groupby(map(place, positions.tolist()), itemgetter(0)):
                # all batches of a pass in one call, to share NumPy's overhead
                batches += keyed_batches(self.order_of_pass(loader_epoch), [span for _, span in places], loader_epoch)
            return batches

        def size_of(position: int) -> int:
            loader_epoch, span = place(position)
            return self.order_of_pass(loader_epoch).samples(span.start, span.stop)

        return EpochOrder(self.count * self.passes, batches_at, size_of)

    def _order_of_pass(self, loader_epoch: int) -> EpochOrder:
        """Return the order of one of this loader's epochs.

        Raises DataError if the sampler draws a number of indices that differs from its length.
        """
        order = self.order(loader_epoch)
        if order.length != self.deal.length:
            raise DataError(
                f"The sampler of the combined loader {self.name!r} drew {order.length} indices in epoch "
                f"{loader_epoch}, but its length is {self.deal.length}. Combined loaders are distributed by length: "
                f"use a sampler that draws exactly len(sampler) indices."
            )
        if self.deal.samples > order.length:
            order.begin_again()
        return order


class CombinedSource:
    """A CombinedLoader with the interface of MapLoader. Each position is one combined batch."""

    batch_size, own_batches = 1, True

    def __init__(self, loader: CombinedLoader, seed: int, in_order: bool = False, padded_for: int = 1) -> None:
        """Wrap the loaders. The first one has the same order and random numbers as it would have on its own.

        Args:
            padded_for: number of replicas for which each loader repeats samples, so that all replicas get batches of
                equal size.
        """
        self.loader = loader
        self.parts = [
            CombinedPart(name, leaf, mix(PART_STREAM, seed, number) if number else seed, in_order, padded_for)
            for number, (name, leaf) in enumerate(zip(loader.names, loader.flattened, strict=True))
        ]
        self.length = loader.combine_lengths([part.count for part in self.parts])
        # Whether to drop a round in which a replica has no batch. True only if every loader drops its last batch: a
        # loader that keeps it still has a batch to train on.
        self.drop_last = all(part.drop_last for part in self.parts)
        for part in self.parts:
            part.passes = -(-self.length // part.count)

    def map_loaders(self) -> dict[str, MapLoader]:
        """Return the loaders, keyed by name."""
        return {part.name: part for part in self.parts}

    def positions(self, epoch: int) -> int:
        """Return the number of combined batches in an epoch."""
        return self.length

    def count_batches(self) -> int:
        """Return the number of combined batches in an epoch, across all replicas."""
        return self.length

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch. Each position is one combined batch."""
        parts = {part.name: part.order_of_batches(epoch) for part in self.parts}

        def size_of(position: int) -> int:
            return sum(part.samples(position, position + 1) for part in parts.values())

        return EpochOrder(self.length, lambda positions: positions, size_of, parts=parts)

    def batches_of(self, order: EpochOrder, deal: Deal, dealing: Dealing, start_step: int, epoch: int) -> Iterator[Any]:
        """Yield a process's combined batches, starting at `start_step`, in the order of `Deal.spans`."""
        orders = order.by_loader()
        pieces = (part.batches_of(orders[part.name], deal, dealing, start_step, epoch) for part in self.parts)
        return map(self.loader.fill, zip(*pieces, strict=False))


def is_dealable_by_batch(loader: Any) -> bool:
    """Return whether `loader` is a CombinedLoader of plain DataLoaders that all have a length.

    Return False for the modes "max_size" and "sequential", where a position does not determine each loader's batch.
    Such a CombinedLoader is read as a stream.
    """
    return (
        isinstance(loader, CombinedLoader)
        and loader.mode in ("min_size", "max_size_cycle")
        and all(is_dealable(part) and MapLoader(part, 0).count_batches() for part in loader.flattened)
    )
