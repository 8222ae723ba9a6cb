"""Sharded tensors in checkpoints: the shard that each process saves, and reads by slices."""

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
    """Shard of a tensor on this process."""

    block: Tensor
    shape: Numbers
    """Shape of the whole tensor."""
    offset: Numbers
    """Index of the shard's first element in the whole tensor."""


def shard_block(tensor: Tensor) -> ShardBlock | None:
    """Return this process's shard of a DTensor; None for any other tensor."""
    # not imported for this: a program that has no DTensors need not wait for it
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks of a tensor
    shape, offset = chunk.sizes, tuple(chunk.offsets)
    local = tensor.detach().to_local()
    if not math.prod(shape):  # more processes than rows: this shard is empty
        offset = (0,) * len(tensor.shape)
    return ShardBlock(local.view(shape), tuple(tensor.shape), tuple(offset))


def file_name(file: str, rank: int) -> str:
    """Return the name of the file in which a rank keeps its shards of what belongs to `file`."""
    return f"{file}-{rank:05d}.safetensors"


# --- reading ----------------------------------------------------------------------------------------------------------
class ShardFiles:
    """Files of a checkpoint that hold shards, opened when needed."""

    def __init__(self, fetch: Callable[[str], Path], names: Collection[str]) -> None:
        """`fetch` returns the local path of a file.

        names: the files of the manifest; no other is opened, as nobody has verified it.
        """
        self.fetch, self.names = fetch, names
        self._open: dict[str, tuple[Any, set[str]]] = {}

    def shard(self, file: str, name: str) -> Any:
        """Return a shard that is read when sliced; raises CheckpointError if it is not there."""
        base = base_of(file)
        if base in self.names and (file not in self.names or name not in self._opened(file)[1]):
            file = base
        if file not in self.names:
            raise CheckpointError(f"{file} is not among the files of the checkpoint.")
        try:
            return self._opened(file)[0].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} has no tensor {name!r}: {error}") from error

    def _opened(self, file: str) -> tuple[Any, set[str]]:
        """Return a file, and the names of the tensors in it."""
        if file not in self._open:
            path = self.fetch(file)
            try:
                # mapped, not read: a rank that needs some rows of a file reads no others
                opened: Any = safe_open(path, framework="pt", device="cpu")
                self._open[file] = opened, set(opened.keys())
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        return self._open[file]


class StoredTensor:
    """Tensor stored in shards, read when sliced."""

    def __init__(
        self,
        files: ShardFiles,
        name: str,
        shape: Numbers,
        dtype: torch.dtype,
        parts: Sequence[tuple[str, Numbers, Numbers]],
        mark: Mapping[str, Any],
    ) -> None:
        """`parts`: file, offset and shape of each shard; `mark`: its mark in the state (see codec.py).

        Raises ValueError if they do not make up the whole tensor.
        """
        self.files, self.name, self.dtype, self.parts, self.mark = files, name, dtype, parts, mark
        self.shape = torch.Size(shape)
        self.ndim = len(shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"{name!r} cannot have the shape {shape}")
        for file, offset, size in parts:
            inside = all(0 <= start <= start + count <= whole for start, count, whole in _zip(offset, size, shape))
            if not inside or list(size) != files.shard(file, name).get_shape():
                raise ValueError(f"the part of {name!r} in {file} does not fit into a tensor of shape {shape}")
        # enough, as DTensor cuts into a grid: blocks at different places whose sizes add up leave no gap
        if len({offset for _, offset, _ in parts}) < len(parts) or self.numel() != sum(
            math.prod(size) for _, _, size in parts
        ):
            raise ValueError(f"the parts of {name!r} do not make up a tensor of shape {shape}")

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        """Return a block (slices without steps, one for each dimension) in own memory."""
        starts = [range(size)[part].start for part, size in zip(place, self.shape, strict=True)]
        counts = [len(range(size)[part]) for part, size in zip(place, self.shape, strict=True)]
        block = torch.zeros(counts, dtype=self.dtype)
        for file, offset, size in self.parts:
            inner, outer = [], []
            for start, count, first, length in _zip(starts, counts, offset, size):
                low, high = max(start, first), min(start + count, first + length)
                inner.append(slice(low - first, high - first))
                outer.append(slice(low - start, high - start))
            if all(part.start < part.stop for part in inner):  # else the shard has nothing of this block
                block[tuple(outer)] = self.files.shard(file, self.name)[tuple(inner)]
        return block

    def whole(self) -> Tensor:
        """Return the whole tensor."""
        return self[tuple(slice(0, size) for size in self.shape)]


def _zip(*sequences: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return zip(*sequences, strict=True)


def load_stored(value: Any) -> Any:
    """Return nested containers with every stored tensor read whole."""
    if isinstance(value, StoredTensor):
        return value.whole()
    if type(value) is dict:
        return {key: load_stored(item) for key, item in value.items()}
    return type(value)(map(load_stored, value)) if type(value) in (list, tuple) else value


# --- tensors of other ranks -------------------------------------------------------------------------------------------
def without_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tensors by empty shards of them, to be sent; numbers, also as tensors without dimensions, stay."""
    return {
        # plain also for a DTensor, with which its mesh would be sent
        name: (_part(torch.empty((0,) * value.ndim, dtype=value.dtype), value) if value.ndim else value.detach().cpu())
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def with_own_data(described: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what `without_data` returned by this rank's own tensors, where it has them.

    The empty shards that stay have no bytes to write: all ranks so describe the same tensors, in the same order.
    """
    return {
        name: shard_block(own[name]) or _part(own[name].detach(), own[name])
        if isinstance(value, ShardBlock) and own.get(name) is not None
        else value
        for name, value in described.items()
    }


def _part(block: Tensor, whole: Tensor) -> ShardBlock:
    return ShardBlock(block, tuple(whole.shape), (0,) * whole.ndim)
