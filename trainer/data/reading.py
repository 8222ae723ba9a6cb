"""How the batches of a loader's iterator are read: without marks for torch's profiler, and to a clean end."""

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import DataError
from ..processes.launch import Place, find_place
from ..processes.parcel import Failure
from ..torch_private import came_from_samples

SHARED_MEMORY = "/dev/shm"
"""Where Linux has what processes share."""
SECONDS_TO_END = 1.0
"""Within which a process that has lost its connections is seen to have ended."""


def read(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader's iterator.

    Torch spends 20 us a batch on marks for its profiler; while none runs they are left out. When the iterator raises,
    its workers end, but those that persist: torch ends them with the last reference to the iterator, which a worker's
    error keeps in a cycle.
    """
    torchs: Any = batches
    try:
        if type(batches).__next__ is _BaseDataLoaderIter.__next__:
            profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
            # Beyond the length that an iterable dataset told torch's own way goes on, which warns of it.
            while torchs._num_yielded != torchs._IterableDataset_len_called and not profiling():
                try:
                    batch = torchs._next_data()
                except StopIteration as end:
                    _refuse_early(torchs, end)
                    return
                torchs._num_yielded += 1
                yield batch
        # not `yield from`, which closes the iterator with this generator: a user's own may have more for another epoch
        while True:
            try:
                batch = next(batches)
            except StopIteration as end:
                _refuse_early(torchs, end)
                return
            yield batch
    except Exception as error:
        loss = _loss_of_a_worker(batches, error)
        end_workers = getattr(batches, "_shutdown_workers", None)
        if end_workers is not None and not torchs._persistent_workers:
            end_workers()
        if loss is not None:
            raise loss from error
        raise


def _refuse_early(batches: Any, end: StopIteration) -> None:
    """Raise DataError where a StopIteration is not the end of a loader, but came out of its dataset."""
    if came_from_samples(end):
        dataset = getattr(batches, "_dataset", None)
        raise DataError(
            f"The dataset {type(dataset).__name__} raised StopIteration in batch {batches._num_yielded} of its loader, "
            f"which would pass for the end of the data: an iterator that it reads from is used up. Begin it anew, or "
            f"raise IndexError."
        ) from end


def _loss_of_a_worker(batches: Any, error: Exception) -> DataError | None:
    """Return what to raise where a worker has gone whose batch was on its way, which may break off in many an error.

    Torch looks for such workers too, but does not wait until the system says that they have ended.
    """
    workers = getattr(batches, "_workers", ())
    deadline, said = time.monotonic() + SECONDS_TO_END, str(error)
    place = find_place() or Place()
    of_rank = f" of rank {place.rank}" if place.world_size > 1 else ""
    full = "No space left on device" in said and ("shared memory" in said or "</torch_" in said)
    if workers and (full or "Bus error" in said):
        return _shared_memory_is_full(of_rank)
    suspect = isinstance(error, (OSError, EOFError)) or said.startswith("DataLoader worker (pid")
    while workers and suspect and time.monotonic() < deadline:
        for worker, is_needed in zip(workers, batches._workers_status, strict=True):
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
    data = getattr(batches, "_dataset", None)
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
