"""Shares: detects whether processes read different shards of the data by comparing the samples they read."""

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

# Number of samples of a dataset to compare, and how often to read each, to detect noise that no seed reproduces
SAMPLES, READINGS = 4, 3
WRITTEN = (str, bytes, int, float, complex, type(None))

# The error of strategies whose processes run in lockstep
LOCKSTEP = (
    "Each process reads its own share of the data, which may be uneven, but under this strategy all processes must run "
    "the same number of batches. Let each process read all of the data, which Legato distributes, or use strategy=ddp."
)

# A hash for each tensor, number and string in a sample; None for a value that differs between readings
Sample = tuple[int | None, ...] | None


def hashes_of(content: Any) -> tuple[int, ...]:
    """Return a hash for each tensor, array, number and string in nested content, in order."""
    return tuple(
        int.from_bytes(blake2b(leaf, digest_size=8).digest(), "little", signed=True)
        for leaf in _content_of(content, [])
    )


def _content_of(part: Any, above: list[Any]) -> Iterator[bytes]:
    if isinstance(part, torch.Tensor):
        # tensors without plain memory are compared by dtype and shape only
        plain = part.layout == torch.strided and not part.is_quantized and not part.is_nested
        dense = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) if plain else torch.zeros(0)
        yield repr((part.dtype, part.shape)).encode() + dense.view(torch.uint8).numpy().tobytes()
    elif isinstance(part, WRITTEN):
        yield repr(part).encode()
    elif isinstance(part, np.ndarray) and part.dtype.hasobject:
        yield from _content_of(part.tolist(), above)
    elif callable(getattr(part, "tobytes", None)):  # arrays, NumPy scalars, images
        yield part.tobytes()
    elif not any(part is parent for parent in above):
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
    """Return the hashes of a few of the first `length` samples in a loader's dataset.

    The samples are read with fixed random seeds, so the hashes depend only on the data. If the loader has workers, a
    worker reads the samples, because a file that the dataset opens on first read must not be open in the process that
    forks workers.
    """
    indices = sorted({length * number // SAMPLES for number in range(SAMPLES)}) if length else []
    try:
        # without the collate_fn, which may draw random numbers or raise
        batches = [KeyedIndices(indices, 0)] * READINGS
        readings = read_batches(KeyedDataset(loader.dataset, 0), loader, batches, _hashes_of_each) if indices else []
    except Exception:  # a sampler may use other indices; a faulty sample raises its error when training reads it
        return []
    return [_repeated(sample) for sample in zip(*readings, strict=True)]


def read_again(dataset: KeyedDataset, loader: "DataLoader[Any]", batches: list[KeyedIndices]) -> Sample:
    """Read the same collated batch from a loader multiple times. Return its hashes, or None if it cannot be read."""
    try:
        return _repeated([hashes_of(batch) for batch in read_batches(dataset, loader, batches)])
    except Exception:
        return None


def read_batches(
    dataset: KeyedDataset, loader: "DataLoader[Any]", batches: list[Any], collate: Any = None
) -> list[Any]:
    """Return batches from a loader's dataset without changing the generators."""
    # one worker reads all samples: a probe must not start eight processes
    options = {"num_workers": min(1, loader.num_workers), "persistent_workers": False, "pin_memory": False}
    probe = copy_loader(loader, dataset, batches, options)
    # without the user's generator, from which an iterator draws its base seed
    probe.collate_fn, probe.generator = collate or probe.collate_fn, None
    with kept_generators():
        return list(iterate_loader(open_loader(probe)))


def _repeated(readings: Sequence[tuple[int, ...]]) -> Sample:
    """Return the hashes of a sample, with None in place of each hash that differs between reads of the sample."""
    if len({len(reading) for reading in readings}) > 1:
        return None
    return tuple(values[0] if len(set(values)) == 1 else None for values in zip(*readings, strict=True))


def differ(ranks: Sequence[Sequence[Sample]]) -> bool:
    """Return whether most samples differ between ranks. Samples that cannot be read are ignored."""
    compared = [samples for samples in zip(*ranks, strict=False) if None not in samples]
    # most rather than all, as a few samples of any dataset may be equal
    return 2 * sum(map(differs, compared)) > len(compared)


def differs(samples: Sequence[Any]) -> bool:
    """Return whether the ranks' hashes of one sample differ. A hash that is None on any rank is ignored."""
    if len({len(sample) for sample in samples}) > 1:
        return True
    return any(None not in values and len(set(values)) > 1 for values in zip(*samples, strict=True))


def are_shares(samples: Mapping[str, list[Sample]], ranks: Ranks, data_rank: int) -> bool:
    """Compare a few samples and return whether processes read different data. All ranks must call this.

    Args:
        samples: this rank's samples, keyed by loader name.
        data_rank: this process's rank along the data axis, which is the same on ranks that work on the same batches.

    Raises DataError if ranks with equal data ranks read different data, or if only some of the loaders yield shares.
    """
    every = ranks.gather_objects((data_rank, samples))
    for number in {number for number, _ in every}:
        # ranks of a pipeline or of tensor parallelism must get the same batch
        together = [rank for rank, (its_number, _) in enumerate(every) if its_number == number]
        if any(differ([every[rank][1][name] for rank in together]) for name in samples):
            raise DataError(
                f"Ranks {', '.join(map(str, together))} work on the same batches but read different data. A dataset "
                f"that selects samples by rank must use the rank along the data axis."
            )
    by_data_rank = list(dict(every).values())
    different = [name for name in samples if differ([read[name] for read in by_data_rank])]
    if different and len(different) < len(samples):
        same = [name for name in samples if name not in different]
        raise DataError(
            f"The processes read different data from the combined loaders {', '.join(different)}, but the same data "
            f"from {', '.join(same)}. Each process must read either its own share from every loader or all of the "
            f"data, which Legato then distributes."
        )
    return bool(different)


def name_of(loader: Any) -> str:
    """Return the class names of a loader and its dataset, for use in messages."""
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + ("" if dataset is None else f" over {type(dataset).__name__}")


def log_share(data: str, loader: Any, ranks: Ranks) -> None:
    """Log on rank 0 that each process reads its own share of the "training" or "evaluation" data."""
    stays = f", so this run must keep {ranks.size} processes" if data == "training" else ""
    if ranks.rank == 0:
        log.info("Each process reads its own share of the %s data (%s)%s.", data, name_of(loader), stays)


def reads_share(loader: Any, ranks: Ranks) -> bool:
    """Return whether a torch DistributedSampler assigns this process its own share.

    Args:
        ranks: the data-parallel ranks.

    Raises DataError for a sampler created for a different rank or number of processes.
    """
    samplers = [sampler for sampler in _distributed_samplers(loader) if sampler.num_replicas > 1]
    for sampler in samplers:
        if (sampler.num_replicas, sampler.rank) != (ranks.size, ranks.rank):
            raise DataError(
                f"A {type(sampler).__name__} has num_replicas={sampler.num_replicas} and rank={sampler.rank} in "
                f"process {ranks.rank} of {ranks.size}. Create it in train_dataloader, after torch.distributed is "
                f"initialized, or remove it, because Legato distributes samples across processes."
            )
    return bool(samplers)


def _distributed_samplers(loader: Any) -> "list[DistributedSampler[Any]]":
    """Return a loader's DistributedSamplers, except any that Legato replaces with its own order."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if is_dealable(loader) and type(batches) is BatchSampler and type(batches.sampler) is DistributedSampler:  # type: ignore[comparison-overlap]
        return []
    return [sampler for sampler in samplers_in(loader) if isinstance(sampler, DistributedSampler)]


@contextmanager
def unpadded(loader: Any) -> Iterator[None]:
    """Make DistributedSamplers yield each sample once within this context, instead of repeating samples as padding."""
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
    """Return whether all ranks have the same content. All ranks must call this."""
    # a hash of integers, which is equal in all processes; Python's hash of strings is not
    numbers = torch.tensor([hash(hashes_of(content)) >> 1])
    return len(set(ranks.all_gather(numbers).flatten().tolist())) == 1


def require_same(content: Any, ranks: Ranks, where: str) -> None:
    """Raise DataError if ranks that share a stream or sample order read different content. All ranks must call this."""
    if not have_same(content, ranks):
        raise DataError(
            f"The processes read different data in {where}, so samples would be lost: each process keeps only its "
            f"part. If each process reads its own share, set trainer.use_distributed_sampler=false. If all should read "
            f"the same data, draw random numbers from the generators of Python, NumPy or torch, which Legato seeds."
        )


def require_different(content: Any, ranks: Ranks, where: str) -> None:
    """Raise DataError if ranks that should read different shards read the same content. All ranks must call this."""
    if have_same(content, ranks) and content is not None:
        raise DataError(
            f"All {ranks.size} processes read the same data in {where}, but each should read its own share; otherwise "
            f"each sample is used {ranks.size} times. A dataset created before its process starts does not know its "
            f"rank, so create it in train_dataloader. Alternatively, remove use_distributed_sampler=false so that "
            f"Legato distributes the samples."
        )
