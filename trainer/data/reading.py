"""How the batches of a loader's iterator are read: without marks for torch's profiler, and to a clean end."""

import os
import time
from collections.abc import Iterator
from typing import Any

from ..errors import DataError
from ..processes.launch import Place, find_place
from ..processes.parcel import Failure
from ..torch_private import batches_of, came_from_samples, end_loader_workers, loader_workers, read_so_far

SHARED_MEMORY = "/dev/shm"
"""Where Linux has what processes share."""
SECONDS_TO_END = 1.0
"""Within which a process that has lost its connections is seen to have ended."""


def read(batches: Iterator[Any]) -> Iterator[Any]:
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
    full = "No space left on device" in said and ("shared memory" in said or "</torch_" in said)
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
