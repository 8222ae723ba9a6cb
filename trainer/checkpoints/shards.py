"""Sharded tensors in checkpoints: the shard that each process saves, and reads by slices."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...base.errors import CheckpointError

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

    def __init__(self, directory: Path, held: dict[str, dict[str, Tensor]] | None = None) -> None:
        """`held`: tensors of files that this process has read already."""
        self.directory, self.held = directory, held or {}
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def names(self, file: str) -> Iterator[tuple[str, str]]:
        """Yield (file, name) of every shard in a file."""
        for name in self.held.get(file) or self._handle(file).keys():
            yield file, name

    def block(self, file: str, name: str) -> Any:
        """Return a shard that is read when sliced."""
        held = self.held.get(file, {}).get(name)
        return self._handle(file).get_slice(name) if held is None else held

    def shape(self, file: str, name: str) -> list[int]:
        """Return the shape of a shard."""
        block = self.block(file, name)
        return list(block.shape) if isinstance(block, Tensor) else list(block.get_shape())

    def drop(self, file: str, name: str) -> None:
        """Free a shard that was read before; it is read again when needed."""
        self.held.get(file, {}).pop(name, None)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
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
            if not inside or list(size) != files.shape(file, name):
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
        found = torch.zeros(counts, dtype=self.dtype)
        for file, offset, size in self.parts:
            inner, outer = [], []
            for start, count, first, length in _zip(starts, counts, offset, size):
                low, high = max(start, first), min(start + count, first + length)
                inner.append(slice(low - first, high - first))
                outer.append(slice(low - start, high - start))
            if all(part.start < part.stop for part in inner):
                found[tuple(outer)] = self.files.block(file, self.name)[tuple(inner)]
        return found

    def whole(self) -> Tensor:
        """Return the whole tensor."""
        return self[tuple(slice(0, size) for size in self.shape)]


def _zip(*sequences: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return zip(*sequences, strict=True)


def load_stored(value: Any) -> Any:
    """Return nested containers with every stored tensor read whole, freeing its shards."""
    if isinstance(value, StoredTensor):
        found = value.whole()
        for file, _, _ in value.parts:
            value.files.drop(file, value.name)
        return found
    if type(value) is dict:
        return {key: load_stored(item) for key, item in value.items()}
    return type(value)(map(load_stored, value)) if type(value) in (list, tuple) else value


class Placeholder(NamedTuple):
    """Placeholder for a tensor owned by another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def with_placeholders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tensors by placeholders; numbers, also as tensors without dimensions, stay, on the host."""
    return {
        name: (Placeholder(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu())
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def without_placeholders(known: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace placeholders: by this rank's own tensors, and by empty shards of those that other ranks own."""
    found = {}
    for name, value in known.items():
        if isinstance(value, Placeholder):
            kept = own.get(name)
            if kept is None:
                # an empty shard: all ranks describe the same tensors, in the same order, and this one writes no bytes
                # of it
                kept = torch.empty((0,) * len(value.shape), dtype=value.dtype)
            value = shard_block(kept) or ShardBlock(kept.detach(), value.shape, (0,) * len(value.shape))
        found[name] = value
    return found
