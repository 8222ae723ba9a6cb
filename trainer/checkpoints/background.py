"""Background saves: training waits only for a copy in host memory; a thread writes it."""

import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ..accelerators import has_streams
from ..processes.ranks import SINGLE, Ranks
from ..processes.save_progress import SAVES
from .codec import FlatState, flatten
from .commit import NO_OWNER, Owner, commit

_ALIGNMENT = 64


class Writer:
    """Thread that writes checkpoints, one at a time.

    Host memory is one copy of the largest state saved, kept for the next save: touching fresh memory costs more than
    the copy. The thread is not a daemon, so a process that ends by an exception still finishes its checkpoint.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._directory = Path()

    def save(
        self,
        directory: Path,
        contents: Mapping[str, Any],
        *,
        ranks: Ranks = SINGLE,
        owner: Owner = NO_OWNER,
    ) -> None:
        """Copy `contents` and return; a thread writes the copy. Waits for the save before, and raises its error.

        Every one of `ranks` calls this, and uses them for nothing else until the save is done.
        """
        self.wait()
        # in the caller's step, where a value that cannot be stored names its path and the call that saved it
        flat = flatten(contents)
        flat.assign_writers(ranks)
        self._snapshot(flat)
        self._directory = Path(os.path.abspath(directory))
        self._thread = threading.Thread(target=self._write, args=(flat, ranks, owner))
        self._thread.name = "legato-checkpoint"
        self._thread.start()

    def join(self) -> None:
        """Wait until the save is done, whether it succeeded or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise CheckpointError, once, if a save has failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"Saving {self._directory} in the background failed: {error}") from error

    def wait(self) -> None:
        """Wait until the save is done; raises what `check` raises."""
        self.join()
        self.check()

    def close(self) -> None:
        """Wait, and free the memory."""
        try:
            self.wait()
        finally:
            self.memory = None

    def _write(self, flat: FlatState, ranks: Ranks, owner: Owner) -> None:
        try:
            with SAVES.save():
                commit(self._directory, flat, ranks, owner)
        except BaseException as error:  # raised by `check`, where it can end the run
            self._error = error

    def _snapshot(self, flat: FlatState) -> None:
        """Copy every tensor to the host; a tensor under several names is copied once."""
        tensors = [tensor for named in flat.tensors.values() for tensor in named.values()]
        tensors += [part.block for named in flat.parts.values() for part in named.values()]
        places: dict[object, int] = {}
        end = 0
        for tensor in tensors:
            if _identity(tensor) not in places:
                places[_identity(tensor)] = end
                end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # only copies into pinned memory run behind the host; one wait at the end serves all
        memory = self._memory_of(end, any(has_streams(tensor.device) for tensor in tensors))
        copies: dict[object, Tensor] = {}
        for tensor in tensors:
            identity = _identity(tensor)
            if identity not in copies:
                start = places[identity]
                copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[identity] = copy.copy_(tensor, non_blocking=has_streams(tensor.device))
        # training goes on with these very tensors as soon as this returns
        for device in {tensor.device for tensor in tensors if has_streams(tensor.device)}:
            torch.accelerator.synchronize(device)
        for file, named in flat.tensors.items():
            flat.tensors[file] = {name: copies[_identity(tensor)] for name, tensor in named.items()}
        for file, parts in flat.parts.items():
            flat.parts[file] = {
                name: replace(part, block=copies[_identity(part.block)]) for name, part in parts.items()
            }

    def _memory_of(self, size: int, pinned: bool) -> Tensor:
        memory = self.memory
        if memory is None or memory.nbytes < size or (pinned and not memory.is_pinned()):
            self.memory = memory = None  # freed first, so that there are never two copies
            self.memory = memory = _allocate(max(size, 1), pinned)
        return memory


def _identity(tensor: Tensor) -> object:
    if not tensor.nbytes:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _allocate(size: int, pinned: bool) -> Tensor:
    if pinned:  # the device copies into pinned memory asynchronously
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    # huge pages: the first copy into 500 MB of fresh memory takes 45 ms instead of 190
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
