"""Files that are hashed while they are written, and tensors in the safetensors format.

The library's own writer builds the whole file in memory, or writes it where no one can hash it on the way: a second
pass. Here one pass takes each tensor's bytes from where they are. What is written is read by the library.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from .progress import SAVES

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}
_CHUNK = 1 << 20
_BLOCK = 1 << 26


class Sum(NamedTuple):
    """What a manifest says about a file."""

    size: int
    sha256: str


class HashedFile:
    """A new file that is hashed while it is written and synced when it is closed; `sum` is there afterwards."""

    def __init__(self, path: Path) -> None:
        self.sum = Sum(0, "")
        self._size = 0
        self._hash = hashlib.sha256()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Append. Hashing on a thread meanwhile was no faster where every core has a process of the run."""
        view = memoryview(data)
        self._hash.update(view)
        self._size += view.nbytes
        while view.nbytes:  # in blocks, each of them a sign that the save moves; a full disk takes less than a block
            view = view[os.write(self._descriptor, view[:_BLOCK]) :]
            SAVES.move()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
                self.sum = Sum(self._size, self._hash.hexdigest())
        finally:
            os.close(self._descriptor)


def write_bytes(path: Path, data: bytes) -> Sum:
    """Write and sync a new file."""
    with HashedFile(path) as file:
        file.write(data)
    return file.sum


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Sum:
    """Write and sync a new safetensors file; tensors on a device or not contiguous are copied over one by one."""
    # the largest items first, so that every tensor is aligned for readers that map the file
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].nbytes:
                file.write(flat_bytes(tensors[name].cpu()).numpy().data)
    return file.sum


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a uint8 tensor; without a copy where it is contiguous."""
    # `contiguous` lets any stride pass where a size is 0 or 1, and the second `view` does not
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into memory of its own; raises CheckpointError where its header does not hold.

    The library maps the file. A tensor that stayed mapped would fail when the file goes away on a network disk, keep a
    deleted file's space, and lie at an address of any alignment, which changes the last bits of some kernels' results.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error


def read_verified(path: Path, expected: Sum) -> dict[str, Tensor]:
    """Read a safetensors file once, hashing it on the way, into memory of its own (see `read_tensors`).

    Raises CheckpointError where it is not the file that `expected` describes, or no safetensors file.
    """
    try:
        with HashedReader(path) as file:
            tensors = _read_tensors(file, expected.size)
        damaged = file.sum != expected
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        damaged = file_sum(path) != expected
        if not damaged:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    if damaged:
        raise CheckpointError(f"{path.parent}: {path.name} is damaged: its SHA-256 is not the one that was written.")
    return tensors


def _read_tensors(file: "HashedReader", size: int) -> dict[str, Tensor]:
    length = int.from_bytes(file.take(8), "little")
    if length > size - 8:
        raise ValueError(f"its header would have {length} bytes")
    header = json.loads(file.take(length).decode("utf-8"), object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    tensors, end = {}, 0
    for name in sorted(places, key=lambda name: tuple(places[name])):
        (start, stop), entry = places[name], header[name]
        shape, dtype = entry["shape"], TYPES[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"{name!r} has no place in it")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > size - 8 - length:
            raise ValueError(f"{name!r} of shape {shape} does not lie at {start}..{stop}")
        tensors[name] = torch.empty(shape, dtype=dtype)
        file.fill(flat_bytes(tensors[name]).numpy().data)
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"{size - 8 - length - end} bytes at its end belong to no tensor")
    return {name: tensors[name] for name in header}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice in its header")
    return dict(pairs)


class HashedReader:
    """A file that is hashed while it is read; `sum` is that of all that was read."""

    def __init__(self, path: Path) -> None:
        self.sum = Sum(0, "")
        self._size = 0
        self._hash = hashlib.sha256()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, target: memoryview) -> None:
        """Read as many bytes as `target` has, piece by piece, so that they are hashed while they are in the cache."""
        for start in range(0, target.nbytes, _CHUNK):
            piece = target[start : start + _CHUNK]
            filled = 0
            while filled < piece.nbytes:
                count = os.readv(self._descriptor, [piece[filled:]])
                if not count:
                    raise ValueError("it ends too early")
                filled += count
            self._hash.update(piece)
            self._size += piece.nbytes

    def __enter__(self) -> "HashedReader":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if os.read(self._descriptor, 1):
                self._size = -1  # longer than it says
            self.sum = Sum(self._size, self._hash.hexdigest())
        finally:
            os.close(self._descriptor)


def file_sum(path: Path, sync: bool = False) -> Sum:
    """Return size and SHA-256 of a file; with `sync`, see it to the disk first."""
    digest, size, buffer = hashlib.sha256(), 0, bytearray(_CHUNK)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        if sync:
            os.fsync(descriptor)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return Sum(size, digest.hexdigest())
