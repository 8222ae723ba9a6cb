"""Map-style DataLoaders: their order, copies that load this process's batches, and clearer errors from workers."""

import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ...base.arguments import LOADER_OPTIONS
from ...base.errors import DataError, correction
from ...base.torch_private import end_loader_workers, is_profiling, read_on, reader_of
from .randomness import KeyedDataset, seed_generators
from .sampling import CHUNK, Deal, DealtBatches, EpochOrder, SampledOrder, epoch_key, mix, permutation
from .steps import Dealing
from .workers import WorkerSetup, prepared_workers

log = logging.getLogger("legato")

# Each open iterator with worker processes, and its loader
_open_iterators: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def open_loader(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader and register its workers for `close_loaders`."""
    batches: Iterator[Any] = iter(loader)
    if getattr(loader, "num_workers", 0):
        _open_iterators[batches] = loader
    return batches


def opened_loaders() -> list[Any]:
    """Return the open iterators of loaders with workers."""
    return list(_open_iterators)


def close_loaders(keep: Sequence[Any] = ()) -> None:
    """Stop the workers of all open iterators not in `keep`, even persistent workers that a traceback keeps alive."""
    for batches in opened_loaders():
        if not any(batches is kept for kept in keep):
            end_loader_workers(batches, _open_iterators.pop(batches))


def iterate_loader(batches: Iterator[Any], loader: Any = None, length: float = 0) -> Iterator[Any]:
    """Yield the batches of an iterator, which must have at least `length` batches.

    If the iterator raises, this function stops its non-persistent workers. torch would stop them only when the last
    reference to the iterator is dropped, but the worker's error is part of a reference cycle that keeps the iterator
    alive.

    Raises DataError if there are fewer batches, because torch treats a StopIteration from a dataset or a collate_fn as
    the end of the data.
    """
    count, (read, most) = 0, reader_of(batches)
    try:
        # not `yield from`, which would close the iterator with this generator: a user's may be used in another epoch
        while True:
            if count == most:
                read = read_on(batches, count)
            yield next(batches) if is_profiling() else read()
            count += 1
    except StopIteration as error:
        if count < length:
            raise DataError(
                f"The dataset {type(loader.dataset).__name__} or the collate_fn of its loader raised StopIteration in "
                f"batch {count + 1}, which looks like the end of the data. The cause is an exhausted iterator. "
                f"Recreate the iterator, or raise IndexError instead."
            ) from error
    except Exception:
        end_loader_workers(batches)
        raise


def read_loader(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader's batches. The loader's workers leave signals to the trainer.

    Iteration over a loader with a custom `__len__` stops at that length, because the loader may be endless. A torch
    DataLoader yields all of its batches and warns if its length is too small.
    """
    with prepared_workers(loader):
        batches = open_loader(loader)
    if isinstance(loader, DataLoader) and type(loader).__len__ is DataLoader.__len__:
        return iterate_loader(batches, loader, len(loader) if _has_exact_length(loader) else 0)
    return islice(iterate_loader(batches), length_of(loader))


def _has_exact_length(loader: "DataLoader[Any]") -> bool:
    """Return whether a DataLoader reads all samples of a map-style dataset, so that its length is exact."""
    return (
        type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and is_plain_shuffle(loader.batch_sampler.sampler, length_of(loader.dataset)) is not None
    )


# Key that separates samplers' random numbers from all others
SAMPLER_STREAM = 0x73616D706C6572


class MapLoader:
    """A DataLoader over a map-style dataset, distributed by position."""

    def __init__(self, loader: "DataLoader[Any]", seed: int, in_order: bool = False) -> None:
        """Wrap `loader`.

        Args:
            in_order: whether to disable shuffling and repeat a custom sampler's first order in every epoch.
        """
        self.loader, self.seed, self.in_order = loader, seed, in_order
        # Whether the loader has a custom batch sampler, whose batches must not be split
        self.own_batches = type(loader.batch_sampler) is not BatchSampler
        self.sampler: Any = loader.batch_sampler if self.own_batches else loader.batch_sampler.sampler  # type: ignore[union-attr]
        self.drop_last = bool(getattr(loader.batch_sampler, "drop_last", False)) and not self.own_batches
        # Whether the loader yields one process's share, so that its DistributedSampler must be kept
        self.is_share = False
        self.batches: DealtBatches | None = None
        self.sibling: DataLoader[Any] | None = None
        # `chunk`: positions per call to the order; `tells_epoch`: call the dataset's set_epoch in workers too
        self.chunk, self.tells_epoch = CHUNK, False

    @property
    def batch_size(self) -> int:
        """Number of positions per batch; 1 if each position is an entire batch."""
        return 1 if self.own_batches else int(self.loader.batch_sampler.batch_size)  # type: ignore[union-attr]

    @property
    def shuffled(self) -> bool | None:
        """True if the sampler shuffles all samples, False if it yields them in order, None for any other sampler."""
        kept = self.own_batches or (self.is_share and type(self.sampler) is DistributedSampler)
        return None if kept else is_plain_shuffle(self.sampler, length_of(self.loader.dataset))

    def map_loaders(self) -> dict[str, "MapLoader"]:
        """Return the loaders, keyed by name. The name of a single loader is ""."""
        return {"": self}

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch's samples. A custom sampler draws it from generators keyed by the epoch."""
        epoch = 0 if self.in_order else epoch
        set_epoch(self.loader, epoch)
        sampler, shuffled = self.sampler, self.shuffled
        if shuffled is not None:
            length = len(self.loader.dataset)  # type: ignore[arg-type]
            if self.in_order or not shuffled:
                return EpochOrder(length, lambda positions: positions)
            key = epoch_key(self.seed, epoch)
            return EpochOrder(length, lambda positions: permutation(positions, length, key))
        # a sampler may draw from the global generators or from its own: both get the epoch's key
        key = mix(SAMPLER_STREAM, self.seed, epoch)
        # before iterating: some samplers draw when they are iterated, some when they are indexed
        seed_generators(key)
        seed_samplers(key, sampler)
        if self.own_batches:
            drawn = [list(batch) for batch in sampler]
            return EpochOrder(len(drawn), SampledOrder(drawn), lambda position: len(drawn[position]))
        order = SampledOrder(sampler)
        return EpochOrder(len(order), order)

    def positions(self, epoch: int) -> int | None:
        """Return the number of positions in an epoch, or None if unknown until the order is drawn."""
        try:
            return len(self.sampler if self.shuffled is None else self.loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def count_batches(self) -> int | None:
        """Return the number of batches in an epoch across all replicas, or None if unknown until the order is drawn."""
        positions = self.positions(0)
        if positions is None:
            return None
        return positions // self.batch_size if self.drop_last else -(-positions // self.batch_size)

    def batches_of(self, order: EpochOrder, deal: Deal, dealing: Dealing, start_step: int, epoch: int) -> Iterator[Any]:
        """Yield a process's collated batches, starting at `start_step`, in the order of `Deal.spans`."""
        batches = DealtBatches(deal, dealing.replicas, order, start_step, epoch, dealing.leaders, self.chunk)
        if self.sibling is None or self.batches is None:
            self.batches = batches
            dataset = KeyedDataset(self.loader.dataset, self.seed if dealing.keyed else None, self.tells_epoch)
            self.sibling = copy_loader(self.loader, dataset, self.batches, dealing.loader_options)
        # `sibling` is created once, since a new loader would restart persistent workers in each epoch
        vars(self.batches).update(vars(batches))
        return iterate_loader(open_loader(self.sibling), self.loader, inf)  # inf: callers never read beyond the end


def is_dealable(loader: Any) -> bool:
    """Return whether `loader` is a plain DataLoader over a map-style dataset, whose samples can be distributed."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def is_plain_shuffle(sampler: Any, length: int | None) -> bool | None:
    """Return True if a sampler shuffles all `length` samples, False if it yields them in order, None for any other.

    A DistributedSampler is treated as if there were a single process, because Legato distributes the samples.
    """
    # `type(...) is` rather than isinstance: a subclass may draw any order
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    if type(sampler) is SequentialSampler and len(sampler.data_source) == length:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True if sampler.num_samples == len(sampler.data_source) == length else None
    return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its dataset, if they define it."""
    for part in (loader, *samplers_in(loader), getattr(loader, "dataset", None)):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def seed_samplers(key: int, *samplers: Any) -> None:
    """Seed every generator in samplers and nested samplers: the first with `key`, the others with derived keys."""
    generators = [part for part in _parts_of(samplers) if isinstance(part, torch.Generator)]
    for number, generator in enumerate(generators):
        generator.manual_seed((mix(key, number) if number else key) >> 1)


def samplers_in(loader: Any) -> list[Any]:
    """Return a loader's sampler, its batch sampler, and the samplers and generators nested in them."""
    return list(_parts_of([getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]))


def _parts_of(samplers: Sequence[Any]) -> Iterator[Any]:
    """Yield the samplers, and any samplers and torch.Generators nested in their attributes, outermost first."""
    waiting: list[Any] = list(samplers)
    seen: list[Any] = []
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is item for item in seen):
            continue
        seen.append(part)
        yield part
        if isinstance(part, torch.Generator):
            continue
        waiting += (getattr(part, name, None) for name in ("generator", "sampler", "batch_sampler"))
        for value in getattr(part, "__dict__", {}).values():
            # only the first item is checked: the list may be as long as the dataset
            several = isinstance(value, (list, tuple)) and value and isinstance(value[0], (torch.Generator, Sampler))
            waiting += value if several else [value] if isinstance(value, (torch.Generator, Sampler)) else []


def copy_loader(
    loader: "DataLoader[Any]", dataset: Any, batch_sampler: Any, changes: Mapping[str, Any] | None = None
) -> "DataLoader[Any]":
    """Return a DataLoader over another dataset and batch sampler, with the options of `loader` updated by `changes`."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in LOADER_OPTIONS} | dict(changes or {})
    workers = options["num_workers"]
    options |= {
        "collate_fn": loader.collate_fn,
        # torch requires timeout 0 without workers
        "timeout": loader.timeout if workers else 0,
        "worker_init_fn": WorkerSetup(loader.worker_init_fn) if workers else loader.worker_init_fn,
        "generator": loader.generator,
    }
    if workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
    else:
        del options["prefetch_factor"], options["persistent_workers"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warned about these options when the user created the loader
        return DataLoader(dataset, batch_sampler=batch_sampler, **options)


def length_of(loader: Any) -> int | None:
    """Return len(loader), or None if the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def require_iterable(loader: Any, name: str, refuses_empty: bool = True) -> None:
    """Raise DataError if `loader` is not iterable or has length 0.

    If `refuses_empty` is false, a length of 0 only causes a warning.
    """
    if not hasattr(loader, "__iter__") or isinstance(loader, (str, bytes, Tensor, type)):
        kind = f"the class {loader.__name__}" if isinstance(loader, type) else type(loader).__name__
        example = correction("trainer.fit(task, dataset)", "trainer.fit(task, DataLoader(dataset, batch_size=32))")
        hint = example if isinstance(loader, Dataset) else ""
        raise DataError(f"{name} must be a DataLoader or another iterable of batches, got {kind}.{hint}")
    if length_of(loader) == 0:
        problem = f"{name} is empty: it yields no batches. Its dataset is empty or too small for drop_last."
        if refuses_empty:
            raise DataError(problem)
        log.warning("%s It is skipped.", problem)
