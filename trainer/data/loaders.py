"""How the batches of a loader's iterator are read: without marks for torch's profiler, and to a clean end."""

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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

from ..errors import DataError
from ..processes.environment import Place, find_place
from ..processes.transport import Failure
from ..torch_private import batches_of, came_from_samples, end_loader_workers, loader_workers, read_so_far
from .randomness import KeyedDataset, seed_generators
from .sampling import Deal, DealtBatches, EpochIndices, KeyedIndices, SampledOrder, epoch_key, mix, permutation
from .steps import Dealing
from .workers import Shield, guarded

SHARED_MEMORY = "/dev/shm"
"""Where Linux has what processes share."""
SECONDS_TO_END = 1.0
"""Within which a process that has lost its connections is seen to have ended."""


def iterate_loader(batches: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the batches of a loader's iterator.

    When the iterator raises, its workers end, but those that persist: torch ends them with the last reference to the
    iterator, which a worker's error keeps in a cycle.
    """
    return batches_of(batches, _refuse_early, _fail)


def _fail(batches: Iterator[Any], error: Exception) -> None:
    """End the workers; raise another error where one of them has gone."""
    loss = _loss_of_a_worker(batches, error)
    end_loader_workers(batches)
    if loss is not None:
        raise loss from error


def _refuse_early(batches: Any, end: StopIteration) -> None:
    """Raise DataError where a StopIteration is not the end of a loader, but came out of its dataset."""
    if came_from_samples(end):
        dataset, number = read_so_far(batches)
        raise DataError(
            f"The dataset {type(dataset).__name__} raised StopIteration in batch {number} of its loader, "
            f"which would pass for the end of the data: an iterator that it reads from is used up. Begin it anew, or "
            f"raise IndexError."
        ) from end


def _loss_of_a_worker(batches: Any, error: Exception) -> DataError | None:
    """Return what to raise where a worker has gone whose batch was on its way, which may break off in many an error.

    Torch looks for such workers too, but does not wait until the system says that they have ended.
    """
    workers = loader_workers(batches)
    deadline, said = time.monotonic() + SECONDS_TO_END, str(error)
    place = find_place() or Place()
    of_rank = f" of rank {place.rank}" if place.world_size > 1 else ""
    reason = (
        "No space left on device" in said or "Resource temporarily unavailable" in said
    )  # what torch 2.10 takes it for
    full = reason and ("shared memory" in said or "</torch_" in said)
    if workers and (full or "Bus error" in said):
        return _shared_memory_is_full(of_rank)
    suspect = isinstance(error, (OSError, EOFError)) or said.startswith("DataLoader worker (pid")
    while workers and suspect and time.monotonic() < deadline:
        for worker, is_needed in loader_workers(batches):
            if is_needed and not worker.is_alive():  # one whose stream has ended may go
                how = Failure.of_exit(worker.exitcode).what
                return DataError(
                    f"A batch was on its way when DataLoader worker (pid {worker.pid}){of_rank} {how}."
                    f"{_read_by(batches)}"
                )
        time.sleep(0.01)
    return None


def _read_by(batches: Any) -> str:
    """Name the user's dataset."""
    data, _ = read_so_far(batches)
    data = getattr(data, "_wrapped_dataset", data)
    return "" if data is None else f" It read {type(data).__qualname__}."


def _shared_memory_is_full(of_rank: str) -> DataError:
    """Return what to raise where workers could not hand over a batch, which they do in shared memory."""
    there = os.statvfs(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None
    sizes = "" if there is None else (
        f" (it has {there.f_blocks * there.f_frsize / 2**20:,.1f} MiB, {there.f_bavail * there.f_frsize / 2**20:,.1f} "
        f"of them free by now)"
    )  # fmt: skip
    return DataError(
        f"{SHARED_MEMORY} is full{sizes}: a DataLoader worker{of_rank} had no room to hand over a batch. Make it "
        f"larger (docker run --shm-size=8g), or lower num_workers, prefetch_factor or batch_size."
    )


SAMPLER_STREAM = 0x73616D706C6572
"""Keeps the keys under which samplers draw apart from the other keys."""


@dataclass
class EpochOrder:
    """The order of one epoch: `length` positions, and what stands at each."""

    length: int
    batch_size: int
    order: EpochIndices
    sizes: npt.NDArray[np.int64] | None = None
    """Where a position is a whole batch of the user's batch sampler: the samples of each; else None."""

    def samples(self, start: int, stop: int) -> int:
        """Return the samples at positions [start, stop)."""
        return stop - start if self.sizes is None else int(self.sizes[start:stop].sum())

    def step_samples(self, deal: Deal, step: int) -> int:
        """Return the samples of one optimizer step over all replicas."""
        if self.sizes is None:
            return deal.step_samples(step)
        rounds = deal.rounds_of(step)
        return self.samples(deal.span(rounds.start, 0).start, deal.span(rounds.stop - 1, deal.replicas - 1).stop)


class MapLoader:
    """A DataLoader over a map-style dataset, whose order is dealt out by position."""

    def __init__(self, loader: "DataLoader[Any]", seed: int, in_order: bool = False, keyed: bool = True) -> None:
        """`in_order` shuffles nothing, and gives every epoch the order that a sampler draws for the first.

        With `keyed` each batch is loaded under random numbers of its own.
        """
        self.loader, self.seed, self.in_order, self.keyed = loader, seed, in_order, keyed
        self.own_batches = is_own_batch_sampler(loader.batch_sampler)
        self.sampler: Any = loader.batch_sampler if self.own_batches else loader.batch_sampler.sampler  # type: ignore[union-attr]
        self.drop_last = bool(getattr(loader.batch_sampler, "drop_last", False)) and not self.own_batches
        self.batches: DealtBatches | None = None
        self.sibling: DataLoader[Any] | None = None

    @property
    def batch_size(self) -> int:
        """Positions of a batch."""
        return 1 if self.own_batches else int(self.loader.batch_sampler.batch_size)  # type: ignore[union-attr]

    @property
    def shuffled(self) -> bool | None:
        """True for a shuffle of all samples, False for all of them in order; None for any other sampler."""
        return None if self.own_batches else is_plain_shuffle(self.sampler, len(self.loader.dataset))  # type: ignore[arg-type]

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the user's own sampler draws it under generators keyed by the epoch."""
        epoch = 0 if self.in_order else epoch
        set_epoch(self.loader, epoch)
        sampler, size, shuffled = self.sampler, self.batch_size, self.shuffled
        if shuffled is not None:
            length = len(self.loader.dataset)  # type: ignore[arg-type]
            if self.in_order or not shuffled:
                return EpochOrder(length, size, lambda positions: positions)
            key = epoch_key(self.seed, epoch)
            return EpochOrder(length, size, lambda positions: permutation(positions, length, key))
        key = mix(SAMPLER_STREAM, self.seed, epoch)
        seed_generators(key)
        seed_samplers(key, sampler)
        if self.own_batches:
            drawn = [list(batch) for batch in sampler]
            return EpochOrder(len(drawn), 1, _WholeBatches(drawn), np.array([len(batch) for batch in drawn], np.int64))
        order = SampledOrder(sampler)
        return EpochOrder(len(order), size, order)

    def positions(self, epoch: int) -> int | None:
        """Return the number of positions in an epoch where it is known without drawing the order."""
        try:
            return len(self.sampler if self.shuffled is None else self.loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def count_batches(self) -> int | None:
        """Return the batches of an epoch over all replicas where it is known without drawing the order."""
        positions = self.positions(0)
        if positions is None:
            return None
        return positions // self.batch_size if self.drop_last else -(-positions // self.batch_size)

    def batches_of(self, order: EpochOrder, deal: Deal, dealing: Dealing, start_step: int, epoch: int) -> Iterator[Any]:
        """Yield the collated batches of a process from `start_step` on, in the order of `Deal.turns`."""
        replicas = dealing.replicas
        if self.sibling is None or self.batches is None:
            kind = DealtBatches if order.sizes is None else _DealtWholeBatches
            self.batches = kind(deal, replicas, order.order)
            dataset = KeyedDataset(self.loader.dataset, self.seed if self.keyed else None)
            self.sibling = like(self.loader, dataset, self.batches)
        self.batches.deal, self.batches.replicas, self.batches.order = deal, replicas, order.order
        self.batches.start_step, self.batches.epoch, self.batches.leaders = start_step, epoch, dealing.leaders
        return iterate_loader(iter(self.sibling))


class _WholeBatches:
    """The batches that a user's batch sampler drew, as an order whose positions are batches."""

    def __init__(self, drawn: list[list[Any]]) -> None:
        self.drawn = drawn

    def __call__(self, positions: npt.NDArray[np.int64]) -> Sequence[list[Any]]:
        return [self.drawn[position] for position in positions.tolist()]


class _DealtWholeBatches(DealtBatches):
    """Deals out batches that are drawn already: each position's list of indices is a batch."""

    def __iter__(self) -> Iterator[KeyedIndices]:
        for batch in super().__iter__():
            yield KeyedIndices(batch[0], batch.position, batch.epoch)


def is_dealable(loader: Any) -> bool:
    """Return whether `loader` is a plain DataLoader over a map-style dataset, so that its samples can be dealt out.

    Subclasses may have overridden anything, and so are passed through.
    """
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def is_own_batch_sampler(batch_sampler: Any) -> bool:
    """Return whether a batch sampler is the user's own kind, whose batches must be taken whole."""
    return type(batch_sampler) is not BatchSampler


def is_plain_shuffle(sampler: Any, length: int) -> bool | None:
    """Return True for a shuffle of all `length` samples, False for all of them in order; None for any other sampler.

    A DistributedSampler counts as what it would do in one process: the samples are dealt out here.
    """
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    if type(sampler) is SequentialSampler and len(sampler.data_source) == length:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True if sampler.num_samples == len(sampler.data_source) == length else None
    return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to every sampler, batch sampler and dataset of `loader` that has a `set_epoch`."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    told: set[int] = set()
    for part in (*parts, getattr(loader, "dataset", None)):
        if part is not None and id(part) not in told and callable(getattr(part, "set_epoch", None)):
            told.add(id(part))
            part.set_epoch(epoch)


def seed_samplers(key: int, *samplers: Any) -> None:
    """Seed every generator of samplers and of the samplers in them: the first with `key`, others with their own."""
    for number, generator in enumerate(_generators_in(samplers)):
        generator.manual_seed((mix(key, number) if number else key) >> 1)


def _generators_in(samplers: Sequence[Any]) -> Iterator[torch.Generator]:
    """Yield torch's generators from the outermost samplers inwards, each once, whatever they are called there."""
    waiting: list[Any] = list(samplers)
    seen: list[Any] = []
    while waiting:
        part = waiting.pop(0)
        if any(part is other for other in seen):
            continue
        seen.append(part)
        if isinstance(part, torch.Generator):
            yield part
            continue
        waiting += (getattr(part, name, None) for name in ("generator", "sampler", "batch_sampler"))
        for value in getattr(part, "__dict__", {}).values():
            # the first tells what a list is of: it may be as long as the dataset
            several = isinstance(value, (list, tuple)) and value and isinstance(value[0], (torch.Generator, Sampler))
            waiting += value if several else [value] if isinstance(value, (torch.Generator, Sampler)) else []


def like(loader: "DataLoader[Any]", dataset: Any, batch_sampler: Any) -> "DataLoader[Any]":
    """Return a DataLoader with every option of `loader`, over another dataset and batch sampler."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": guarded(loader.collate_fn),
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": Shield(loader.worker_init_fn) if loader.num_workers else loader.worker_init_fn,
        "generator": loader.generator,
    }
    if loader.num_workers > 0:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
    if getattr(loader, "pin_memory_device", ""):
        options["pin_memory_device"] = loader.pin_memory_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say of these options was said when the user made the loader
        return DataLoader(dataset, batch_sampler=batch_sampler, **options)


def length_of(loader: Any) -> int | None:
    """Return len(loader), or None where it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def require_iterable(loader: Any, name: str) -> None:
    """Raise DataError where `loader` cannot be iterated over or is known to be empty."""
    if not hasattr(loader, "__iter__") or isinstance(loader, (str, bytes, Tensor, type)):
        came = f"the class {loader.__name__}" if isinstance(loader, type) else type(loader).__name__
        hint = " Give DataLoader(dataset, batch_size=...)." if isinstance(loader, Dataset) else ""
        raise DataError(f"{name} must be a DataLoader or another iterable of batches, got {came}.{hint}")
    if length_of(loader) == 0:
        raise DataError(
            f"{name} is empty: it yields no batch. Is its dataset empty, or drop_last with too few samples?"
        )
