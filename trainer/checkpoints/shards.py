"""Sharded tensors in checkpoints: each process saves its shard, and reads only the slices of shards that it needs."""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...base.errors import CheckpointError
from .manifest import base_of

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class ShardBlock:
    """This process's shard of a tensor."""

    block: Tensor
    shape: Numbers
    """Shape of the full tensor."""
    offset: Numbers
    """Index of the shard's first element in the full tensor."""


def shard_block(tensor: Tensor) -> ShardBlock | None:
    """Return this process's shard of a DTensor; None for any other tensor."""
    # DTensor is not imported here, because a program without DTensors would wait for the import
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # torch.distributed.checkpoint's protocol for tensors
    shape, offset = chunk.sizes, tuple(chunk.offsets)
    local = tensor.detach().to_local()
    if not math.prod(shape):  # more processes than rows: this shard is empty
        offset = (0,) * len(tensor.shape)
    return ShardBlock(local.view(shape), tuple(tensor.shape), tuple(offset))


def file_name(file: str, rank: int) -> str:
    """Return the name of the file where a rank stores its shards of the tensors in `file`, "model" or "tensors"."""
    return f"{file}-{rank:05d}.safetensors"


# --- reading ----------------------------------------------------------------------------------------------------------
class ShardFiles:
    """The files of a checkpoint that contain shards. A file is opened when it is first needed."""

    def __init__(self, fetch: Callable[[str], Path], names: Collection[str]) -> None:
        """Record the files without opening them.

        Args:
            fetch: returns the local path of a file.
            names: the files in the manifest. Other files are never opened, because they are not verified.
        """
        self.fetch, self.names = fetch, names
        self._open: dict[str, tuple[Any, set[str]]] = {}

    def shard(self, file: str, name: str) -> Any:
        """Return a shard, which is read only when it is sliced. Raises CheckpointError if the shard is missing."""
        base = base_of(file)
        if base in self.names and (file not in self.names or name not in self._opened(file)[1]):
            file = base
        if file not in self.names:
            raise CheckpointError(f"{file} is not a file of the checkpoint.")
        try:
            return self._opened(file)[0].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} has no tensor {name!r}: {error}") from error

    def _opened(self, file: str) -> tuple[Any, set[str]]:
        """Return an open file and the names of the tensors in it."""
        if file not in self._open:
            path = self.fetch(file)
            try:
                # memory-mapped, not read: a rank reads only the rows that it needs
                opened: Any = safe_open(path, framework="pt", device="cpu")
                self._open[file] = opened, set(opened.keys())
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        return self._open[file]


class StoredTensor:
    """A tensor that is stored in shards. The shards are read when the tensor is sliced."""

    def __init__(
        self,
        files: ShardFiles,
        name: str,
        shape: Numbers,
        dtype: torch.dtype,
        shards: Sequence[tuple[str, Numbers, Numbers]],
        mark: Mapping[str, Any],
    ) -> None:
        """Describe a stored tensor by its shards.

        Args:
            shards: file, offset and shape of each shard.
            mark: mark of the tensor in state.json (see codec.py).

        Raises ValueError if the shards do not make up the full tensor.
        """
        self.files, self.name, self.dtype, self.shards, self.mark = files, name, dtype, shards, mark
        self.shape = torch.Size(shape)
        self.ndim = len(shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"{name!r} cannot have the shape {shape}")
        for file, offset, size in shards:
            is_inside = all(0 <= start <= start + count <= full for start, count, full in _zip(offset, size, shape))
            if not is_inside or list(size) != files.shard(file, name).get_shape():
                raise ValueError(f"the shard of {name!r} in {file} does not fit into a tensor of shape {shape}")
        # sufficient, because DTensor shards form a grid: blocks with different offsets whose sizes add up leave no gap
        if len({offset for _, offset, _ in shards}) < len(shards) or self.numel() != sum(
            math.prod(size) for _, _, size in shards
        ):
            raise ValueError(f"the shards of {name!r} do not make up a tensor of shape {shape}")

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        """Read a block into new memory. `place` must contain one slice, without a step, for each dimension."""
        starts = [range(size)[cut].start for cut, size in zip(place, self.shape, strict=True)]
        counts = [len(range(size)[cut]) for cut, size in zip(place, self.shape, strict=True)]
        block = torch.zeros(counts, dtype=self.dtype)
        for file, offset, size in self.shards:
            inner, outer = [], []
            for start, count, first, length in _zip(starts, counts, offset, size):
                low, high = max(start, first), min(start + count, first + length)
                inner.append(slice(low - first, high - first))
                outer.append(slice(low - start, high - start))
            if all(cut.start < cut.stop for cut in inner):  # otherwise the shard does not overlap the block
                block[tuple(outer)] = self.files.shard(file, self.name)[tuple(inner)]
        return block

    def read(self) -> Tensor:
        """Read the full tensor."""
        return self[tuple(slice(0, size) for size in self.shape)]


def _zip(*sequences: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return zip(*sequences, strict=True)


def load_stored(value: Any) -> Any:
    """Return nested containers with every StoredTensor replaced by the full tensor."""
    if isinstance(value, StoredTensor):
        return value.read()
    if type(value) is dict:
        return {key: load_stored(item) for key, item in value.items()}
    return type(value)(map(load_stored, value)) if type(value) in (list, tuple) else value


# --- tensors of other ranks -------------------------------------------------------------------------------------------
def without_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tensors with empty shards, which are cheap to send. Numbers and 0-dim tensors are left unchanged."""
    return {
        # a plain tensor also for a DTensor, whose mesh would be sent with it
        name: (_shard(torch.empty((0,) * value.ndim, dtype=value.dtype), value) if value.ndim else value.detach().cpu())
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def with_own_data(described: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the empty shards from `without_data` with this rank's tensors if they are in `tensors`.

    All other shards remain empty, so that all ranks have the same tensors in the same order. No bytes are written for
    empty shards.
    """
    return {
        name: shard_block(tensors[name]) or _shard(tensors[name].detach(), tensors[name])
        if isinstance(value, ShardBlock) and tensors.get(name) is not None
        else value
        for name, value in described.items()
    }


def _shard(block: Tensor, tensor: Tensor) -> ShardBlock:
    return ShardBlock(block, tuple(tensor.shape), (0,) * tensor.ndim)
