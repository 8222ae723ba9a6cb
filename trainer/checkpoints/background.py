"""Background saves: training waits only while the state is copied to host memory. A thread writes the copy to disk."""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.location import Location, to_absolute
from ..accelerators import has_streams, pins_memory
from ..processes.ranks import SINGLE, Ranks
from ..processes.save_progress import SAVES
from .codec import FlatState, flatten
from .commit import commit, no_locks


class Writer:
    """Writes checkpoints in a background thread, one at a time.

    The writer keeps one copy of the state in host memory. It reuses that memory for the next save, because writing to
    newly allocated memory takes longer than the copy itself. The thread is not a daemon, so a process that exits
    with an exception still finishes its checkpoint.
    """

    def __init__(self) -> None:
        self.memory: dict[tuple[str, str], Tensor] = {}
        """Copies in host memory, keyed by file and tensor name."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._checkpoint: Location | None = None

    def save(
        self,
        checkpoint: Location,
        contents: Mapping[str, Any],
        *,
        ranks: Ranks = SINGLE,
        run: str = "",
        frozen: Collection[str] = (),
        check_locks: Callable[[], None] = no_locks,
    ) -> None:
        """Copy `contents`, start a thread that writes the copy, and return.

        First wait for the previous save to finish, and raise its error if it failed. All ranks in `ranks` must call
        this, and they must not use `ranks` for anything else until the save is done.
        """
        self.wait()  # two saves at once would need memory for two copies
        # flatten here, not in the thread, so that if a value is invalid, the traceback points to the save
        flat = flatten(contents, frozen)
        flat.assign_writers(ranks)
        self._snapshot(flat)
        self._checkpoint = to_absolute(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(self._checkpoint, flat, ranks, run, check_locks))
        self._thread.name = "legato-checkpoint"
        self._thread.start()

    def join(self) -> None:
        """Wait until the save has finished, successfully or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise CheckpointError if a save has failed. Each failure is raised only once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"Saving {self._checkpoint} in the background failed: {error}") from error

    def wait(self) -> None:
        """Wait until the save has finished. Raises CheckpointError as `check` does."""
        self.join()
        self.check()

    def _write(
        self, checkpoint: Location, flat: FlatState, ranks: Ranks, run: str, check_locks: Callable[[], None]
    ) -> None:
        try:
            with SAVES.save():
                commit(checkpoint, flat, ranks, run, check_locks)
        except BaseException as error:  # `check` raises it in the main thread, where it can end the run
            self._error = error

    def _snapshot(self, flat: FlatState) -> None:
        """Replace every tensor with a copy in host memory. A tensor with multiple names is copied only once."""
        copies: dict[object, Tensor] = {}
        devices = set()
        for file, tensors in flat.tensors.items():
            for name, tensor in tensors.items():
                tensors[name] = self._copy((file, name), tensor, copies)
                devices.add(tensor.device)
        for file, shards in flat.shards.items():
            for name, shard in shards.items():
                shards[name] = replace(shard, block=self._copy((file, name), shard.block, copies))
                devices.add(shard.block.device)
        # wait once for all copies: training changes the tensors as soon as this method returns
        for device in filter(has_streams, devices):
            torch.accelerator.synchronize(device)

    def _copy(self, place: tuple[str, str], tensor: Tensor, copies: dict[object, Tensor]) -> Tensor:
        """Copy a tensor into the memory used for its copy in the previous save."""
        identity = _identity(tensor)
        if identity not in copies:
            memory, is_async = self.memory.pop(place, None), has_streams(tensor.device)
            if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                memory = None  # freed first, so that there are never two copies
                # only copies into pinned memory are asynchronous
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_async and pins_memory())
            self.memory[place] = copies[identity] = memory.copy_(tensor, non_blocking=is_async)
        return copies[identity]


def _identity(tensor: Tensor) -> object:
    # empty tensors may share an address, and tensors on some devices have no address
    if not tensor.nbytes or not tensor.data_ptr():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
