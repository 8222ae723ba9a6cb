"""Shares: whether each process reads its own share of the data, or all the same, by comparing what they read."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ...base.errors import DataError
from ..processes.ranks import Ranks
from .loaders import copy_loader, is_dealable, iterate_loader, length_of, open_loader, samplers_in
from .randomness import KeyedDataset, kept_generators
from .sampling import KeyedIndices

log = logging.getLogger("legato")

# Samples of a dataset to compare, and how often each is read, to tell noise that no seed repeats
SAMPLES, READINGS = 4, 3
WRITTEN = (str, bytes, int, float, complex, type(None))

# Why a strategy whose processes run in lockstep takes no shares
LOCKSTEP = (
    "Each process reads its own share of the data, which may be uneven, but under this strategy all processes must run "
    "equally many batches. Give each process all of the data, which Legato deals out; or use strategy ddp."
)

# A hash for each tensor, number and text of a sample; None for one that differs each time it is read
Sample = tuple[int | None, ...] | None


def hashes_of(content: Any) -> tuple[int, ...]:
    """Return a hash for each tensor, array, number and text in nested content, in its order."""
    return tuple(
        int.from_bytes(blake2b(leaf, digest_size=8).digest(), "little", signed=True)
        for leaf in _content_of(content, [])
    )


def _content_of(part: Any, above: list[Any]) -> Iterator[bytes]:
    if isinstance(part, torch.Tensor):
        # what has no plain memory is compared by type and shape alone
        plain = part.layout == torch.strided and not part.is_quantized and not part.is_nested
        dense = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) if plain else torch.zeros(0)
        yield repr((part.dtype, part.shape)).encode() + dense.view(torch.uint8).numpy().tobytes()
    elif isinstance(part, WRITTEN):
        yield repr(part).encode()
    elif isinstance(part, np.ndarray) and part.dtype.hasobject:
        yield from _content_of(part.tolist(), above)
    elif callable(getattr(part, "tobytes", None)):  # arrays, numbers of NumPy, images
        yield part.tobytes()
    elif not any(part is other for other in above):
        items: Any = ()
        if isinstance(part, Mapping):
            items = part.items()
        elif isinstance(part, (list, tuple)):
            items = part
        elif is_dataclass(part) and not isinstance(part, type):
            items = [getattr(part, field.name) for field in fields(part)]
        elif not isinstance(part, type):
            items = getattr(part, "__dict__", {})
            items = items.items() if isinstance(items, Mapping) else ()
        for item in items:
            yield from _content_of(item, [*above, part])


def _hashes_of_each(samples: Any) -> list[tuple[int, ...]]:
    return [hashes_of(sample) for sample in (samples if isinstance(samples, list) else [samples])]


def read_samples(loader: "DataLoader[Any]", length: int) -> list[Sample]:
    """Return the hashes of a few of the first `length` samples of a loader's dataset, which differ by data alone.

    All are read under the same random numbers, and by a worker process where the loader has some: a file that the
    dataset opens when it is first read must not be open in the process that workers are forked from.
    """
    indices = sorted({length * number // SAMPLES for number in range(SAMPLES)}) if length else []
    try:
        # without the collate_fn, which may draw or refuse
        batches = [KeyedIndices(indices, 0)] * READINGS
        readings = read_batches(KeyedDataset(loader.dataset, 0), loader, batches, _hashes_of_each) if indices else []
    except Exception:  # its sampler may have other indices; and what is wrong with a sample is told when it is needed
        return []
    return [_repeated(several) for several in zip(*readings, strict=True)]


def read_again(dataset: KeyedDataset, loader: "DataLoader[Any]", batches: list[KeyedIndices]) -> Sample:
    """Return the hashes of one collated batch of a loader that is read several times; None where it cannot be."""
    try:
        return _repeated([hashes_of(batch) for batch in read_batches(dataset, loader, batches)])
    except Exception:
        return None


def read_batches(
    dataset: KeyedDataset, loader: "DataLoader[Any]", batches: list[Any], collate: Any = None
) -> list[Any]:
    """Return batches of a loader's dataset; the generators continue where they were."""
    # one worker reads all the samples: a look must not start eight processes
    options = {"num_workers": min(1, loader.num_workers), "persistent_workers": False, "pin_memory": False}
    probe = copy_loader(loader, dataset, batches, options)
    # without a generator, as an iterator over a loader draws its base seed from it
    probe.collate_fn, probe.generator = collate or probe.collate_fn, None
    with kept_generators():
        return list(iterate_loader(open_loader(probe)))


def _repeated(readings: Sequence[tuple[int, ...]]) -> Sample:
    """Return the hashes of a sample that was read several times."""
    if len({len(reading) for reading in readings}) > 1:
        return None
    return tuple(values[0] if len(set(values)) == 1 else None for values in zip(*readings, strict=True))


def differ(ranks: Sequence[Sequence[Sample]]) -> bool:
    """Return whether most samples of each rank differ from those of the others; unknown ones are left out."""
    compared = [samples for samples in zip(*ranks, strict=False) if None not in samples]
    # most of them, as a few samples of any dataset may be equal
    return 2 * sum(map(differs, compared)) > len(compared)


def differs(samples: Sequence[Any]) -> bool:
    """Return whether readings of one sample differ in what each of them knows."""
    if len({len(sample) for sample in samples}) > 1:
        return True
    return any(None not in values and len(set(values)) > 1 for values in zip(*samples, strict=True))


def are_shares(samples: Mapping[str, list[Sample]], ranks: Ranks, data_rank: int) -> bool:
    """Return whether processes read different data, by the samples that each has read; every rank calls it.

    samples: by the name of their loader, where several are combined.
    data_rank: the same on ranks that work on the same batches.

    Raises DataError where such ranks read different data, and where only some of the loaders are shares.
    """
    every = ranks.gather_objects((data_rank, samples))
    for number in {number for number, _ in every}:
        # ranks of a pipeline or of tensor parallelism, which must get the same batch
        together = [rank for rank, (other, _) in enumerate(every) if other == number]
        if any(differ([every[rank][1][name] for rank in together]) for name in samples):
            raise DataError(
                f"Ranks {', '.join(map(str, together))} work on the same batches, but read different data. A dataset "
                f"that reads by rank must take the rank along the axis of data."
            )
    by_data_rank = list(dict(every).values())
    different = [name for name in samples if differ([read[name] for read in by_data_rank])]
    if different and len(different) < len(samples):
        same = [name for name in samples if name not in different]
        raise DataError(
            f"The processes read different data of the combined loaders {', '.join(different)}, but the same of "
            f"{', '.join(same)}. Either each process reads its own share of all loaders, or all read the same data, "
            f"which Legato deals out."
        )
    return bool(different)


def name_of(loader: Any) -> str:
    """Return the class of a loader and of its dataset, for messages."""
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + ("" if dataset is None else f" over {type(dataset).__name__}")


def tell_of_share(data: str, loader: Any, ranks: Ranks) -> None:
    """Say on rank 0 that a loader is read as it is; data: "training" or "evaluation"."""
    stays = f", so this run stays on {ranks.size} processes" if data == "training" else ""
    if ranks.rank == 0:
        log.info("Each process reads its own share of the %s data (%s)%s.", data, name_of(loader), stays)


def reads_share(loader: Any, ranks: Ranks) -> bool:
    """Return whether samplers of torch's class DistributedSampler give this process its own share.

    ranks: those that samples are dealt out to.

    Raises DataError for one that was made for another process or number of processes.
    """
    samplers = [sampler for sampler in _distributed_samplers(loader) if sampler.num_replicas > 1]
    for sampler in samplers:
        if (sampler.num_replicas, sampler.rank) != (ranks.size, ranks.rank):
            raise DataError(
                f"A {type(sampler).__name__} has num_replicas={sampler.num_replicas} and rank={sampler.rank} in "
                f"process {ranks.rank} of {ranks.size}. Make it in train_dataloader, where torch.distributed knows "
                f"both; or leave it out: Legato deals samples out to processes."
            )
    return bool(samplers)


def _distributed_samplers(loader: Any) -> "list[DistributedSampler[Any]]":
    """Return the DistributedSamplers of a loader, but for one that Legato reads in place of its process."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if is_dealable(loader) and type(batches) is BatchSampler and type(batches.sampler) is DistributedSampler:  # type: ignore[comparison-overlap]
        return []
    return [sampler for sampler in samplers_in(loader) if isinstance(sampler, DistributedSampler)]


@contextmanager
def unpadded(loader: Any) -> Iterator[None]:
    """Let DistributedSamplers give each sample once in this context, where they repeat some to make shares even."""
    before = []
    for sampler in _distributed_samplers(loader):
        length = length_of(sampler.dataset)
        if type(sampler).__iter__ is DistributedSampler.__iter__ and not sampler.drop_last and length is not None:
            before.append((sampler, sampler.num_samples, sampler.total_size))
            sampler.num_samples = len(range(sampler.rank, length, sampler.num_replicas))
            sampler.total_size = length
    try:
        yield
    finally:
        for sampler, samples, total in before:
            sampler.num_samples, sampler.total_size = samples, total


def have_same(content: Any, ranks: Ranks) -> bool:
    """Return whether all ranks have the same content; every rank calls it."""
    # Python's hash of integers is the same in each process, and that of texts is not
    numbers = torch.tensor([hash(hashes_of(content)) >> 1])
    return len(set(ranks.all_gather(numbers).flatten().tolist())) == 1


def require_same(content: Any, ranks: Ranks, where: str) -> None:
    """Raise DataError where ranks that deal out one stream or order have read different content."""
    if not have_same(content, ranks):
        raise DataError(
            f"The processes read different data in {where}, of which each would keep a part: samples would be lost. "
            f"Where each process reads its own share, set trainer.use_distributed_sampler=false. Where all are to read "
            f"the same, let it draw from the global generators of Python, NumPy or torch, which are seeded alike."
        )


def require_different(content: Any, ranks: Ranks, where: str) -> None:
    """Raise DataError where ranks that bring shares of their own have read the same content."""
    if have_same(content, ranks) and content is not None:
        raise DataError(
            f"All {ranks.size} processes read the same data in {where}, though each is to bring its own share: they "
            f"would train on each sample {ranks.size} times. A dataset made before its process was started does not "
            f"know its rank: make it in train_dataloader. Or leave out use_distributed_sampler=false: Legato deals "
            f"samples out."
        )
