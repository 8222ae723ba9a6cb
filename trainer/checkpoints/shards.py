"""Tensors in parts: the block that one process has of a tensor that lies on several, saved, and put together again."""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class ShardBlock:
    """The block of a tensor that this process has."""

    block: Tensor
    shape: Numbers
    """Of the whole tensor."""
    offset: Numbers
    """Where the block begins in it."""


def shard_block(tensor: Tensor) -> ShardBlock | None:
    """Return this process's part of a DTensor; None for a tensor that it has whole."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks of a tensor
    shape, offset = chunk.sizes, tuple(chunk.offsets)
    local = tensor.detach().to_local()
    if not math.prod(shape):  # more processes than rows: this one has none
        offset = (0,) * len(tensor.shape)
    return ShardBlock(local.view(shape), tuple(tensor.shape), tuple(offset))


def file_name(file: str, rank: int) -> str:
    """Return the name of the file in which a rank keeps its parts of what belongs to `file`."""
    return f"{file}-{rank:05d}.safetensors"


PART_FILE = re.compile(r"(model|tensors)-[0-9]{5,}\.safetensors")


# --- reading ----------------------------------------------------------------------------------------------------------
class PartFiles:
    """The files of a checkpoint that hold parts, opened as they are needed."""

    def __init__(self, directory: Path, held: dict[str, dict[str, Tensor]] | None = None) -> None:
        """`held`: the tensors of files that this process has read already."""
        self.directory, self.held = directory, held or {}
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def names(self, file: str) -> Iterator[tuple[str, str]]:
        """Yield (file, name) of every part in a file."""
        for name in self.held.get(file) or self._handle(file).keys():
            yield file, name

    def block(self, file: str, name: str) -> Any:
        """Return a part that is read where it is sliced."""
        held = self.held.get(file, {}).get(name)
        return self._handle(file).get_slice(name) if held is None else held

    def shape(self, file: str, name: str) -> list[int]:
        """Return the shape of a part."""
        block = self.block(file, name)
        return list(block.shape) if isinstance(block, Tensor) else list(block.get_shape())

    def drop(self, file: str, name: str) -> None:
        """Forget a part that was read before; it is read again where it is asked for."""
        self.held.get(file, {}).pop(name, None)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        return self._open[file]


class Stored:
    """A tensor that lies in a checkpoint in parts, and is read where it is sliced."""

    def __init__(
        self,
        files: PartFiles,
        name: str,
        shape: Numbers,
        dtype: torch.dtype,
        parts: Sequence[tuple[str, Numbers, Numbers]],
        mark: Mapping[str, Any],
    ) -> None:
        """`parts`: of each its file, offset and shape; `mark`: what says so in the state (see tree.py).

        Raises ValueError where they do not make up the whole.
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
        if len({offset for _, offset, _ in parts}) < len(parts) or self.numel() != sum(
            math.prod(size) for _, _, size in parts
        ):
            raise ValueError(f"the parts of {name!r} do not make up a tensor of shape {shape}")

    def numel(self) -> int:
        """Return how many numbers the whole has."""
        return math.prod(self.shape)

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        """Return the block that is asked for (slices without steps, one for each dimension), in memory of its own."""
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


def made_whole(value: Any) -> Any:
    """Return nested containers with every stored tensor read, and forgotten in parts."""
    if isinstance(value, Stored):
        found = value.whole()
        for file, _, _ in value.parts:
            value.files.drop(file, value.name)
        return found
    if type(value) is dict:
        return {key: made_whole(item) for key, item in value.items()}
    return type(value)(map(made_whole, value)) if type(value) in (list, tuple) else value


class Outline(NamedTuple):
    """What other ranks know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outlines(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return outlines in the place of tensors; numbers, also as tensors without dimensions, stay, on the host."""
    return {
        name: (Outline(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu())
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def in_parts(known: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return parts in the place of outlines: this rank's own tensors, and empty ones of what others keep."""
    found = {}
    for name, value in known.items():
        if isinstance(value, Outline):
            kept = own.get(name)
            if kept is None:
                kept = torch.empty((0,) * len(value.shape), dtype=value.dtype)
            value = shard_block(kept) or ShardBlock(kept.detach(), value.shape, (0,) * len(value.shape))
        found[name] = value
    return found
