"""Files hashed while they are written, tensors in the safetensors format, and nested values as JSON.

The safetensors library writes a file in one call, which leaves a second pass for the hash. Here one pass takes each
tensor's bytes from where they are. The library reads the result.
"""

import base64
import errno
import hashlib
import json
import math
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...base.errors import CheckpointError
from ..processes.collectives import Collectives
from .progress import SAVES
from .shards import ShardBlock, ShardFiles, StoredTensor, file_name, shard_block

DTYPE_NAMES = {
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
TYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK = 1 << 20
_BLOCK = 8 << 20
_DIRECT_FROM = 64 << 20
"""Bytes from which a file is written past the page cache."""


class FileSum(NamedTuple):
    """Size and hash of a file, as in the manifest."""

    size: int
    sha256: str


class HashedFile:
    """New file that is hashed while it is written and synced when it is closed; `sum` is set afterwards."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """`size`: about how many bytes will be written; a large file goes to the disk past the page cache."""
        self.sum = FileSum(0, "")
        self._size = 0
        self._hash = hashlib.sha256()
        # O_EXCL and O_NOFOLLOW: never through a link, nor into a file that another process has begun
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._blocks: BlockWriter | None = None
        if size >= _DIRECT_FROM and _set_direct(self._descriptor, True):
            self._blocks = BlockWriter(self._descriptor, self._hash)

    def write(self, data: memoryview | bytes) -> None:
        """Append data."""
        view = memoryview(data)
        self._size += view.nbytes
        if self._blocks is not None:
            self._blocks.write(view)
        else:
            self._hash.update(view)
            write_all(self._descriptor, view)

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._blocks is not None:
                self._blocks.close(complete=kind is None)
            if kind is None:
                os.fsync(self._descriptor)
                self.sum = FileSum(self._size, self._hash.hexdigest())
        finally:
            os.close(self._descriptor)


class BlockWriter:
    """Writes a file in blocks past the page cache; two threads write and hash a block while the next is filled.

    The kernel's copy into fresh pages takes longer than the disk, and more of a processor than the hash.
    """

    def __init__(self, descriptor: int, digest: Any) -> None:
        self._descriptor, self._hash = descriptor, digest
        self._blocks = [np.frombuffer(mmap.mmap(-1, _BLOCK), np.uint8) for _ in range(2)]  # aligned, as the disk wants
        self._filled = 0
        # beside training, not where it waits for the save
        in_background = threading.current_thread() is not threading.main_thread()
        self._threads = ThreadPoolExecutor(2, "legato-checkpoint-file", _lower_priority if in_background else None)
        self._pending: list[Future[None]] = []

    def write(self, data: memoryview) -> None:
        """Append data."""
        source = np.frombuffer(data, np.uint8)
        while source.size:
            count = min(source.size, _BLOCK - self._filled)
            np.copyto(self._blocks[0][self._filled : self._filled + count], source[:count])
            source, self._filled = source[count:], self._filled + count
            if self._filled == _BLOCK:
                self._flush()

    def close(self, complete: bool) -> None:
        """Write the rest, if the file is to be `complete`, and end the threads."""
        try:
            if complete:
                self._wait()
                _set_direct(self._descriptor, False)  # which takes whole pages only
                rest = self._blocks[0][: self._filled].data
                self._hash.update(rest)
                write_all(self._descriptor, rest)
        finally:
            self._threads.shutdown()

    def _flush(self) -> None:
        self._wait()
        block, self._filled = self._blocks[0].data, 0
        self._blocks.reverse()
        self._pending = [self._start(self._hash.update, block), self._start(write_all, self._descriptor, block)]

    def _start(self, action: Callable[..., None], *arguments: Any) -> "Future[None]":
        try:
            return self._threads.submit(action, *arguments)
        except RuntimeError:  # the interpreter is ending and starts no thread; the save is finished nevertheless
            action(*arguments)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _wait(self) -> None:
        for future in self._pending:
            future.result()


def _lower_priority() -> None:
    """Give this thread a thirtieth of a core where training takes all, a whole one where it does not.

    Only threads that hold Python's lock for moments: the main thread would wait for a slow one that holds it.
    """
    if sys.platform == "linux":  # elsewhere it is the priority of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(os.getpriority(os.PRIO_PROCESS, 0) + 15, 19))


def write_all(descriptor: int, view: memoryview) -> None:
    """Write all bytes of a view, in blocks: each is progress of the save, and a full disk takes less than one."""
    while view.nbytes:
        try:
            view = view[os.write(descriptor, view[:_BLOCK]) :]
        except OSError as error:
            # some file systems accept the flag and refuse the write, and after a part of a block its rest is no page
            if error.errno != errno.EINVAL or not _set_direct(descriptor, False):
                raise
        SAVES.record()


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Have writes pass by the page cache, or not; return whether that changed."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    import fcntl  # not on every platform

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & direct) == wanted:
        return False
    with suppress(OSError):  # as tmpfs and some network file systems raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ direct)
        return True
    return False


def write_bytes(path: Path, data: bytes) -> FileSum:
    """Write and sync a new file."""
    with HashedFile(path) as file:
        file.write(data)
    return file.sum


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """Write and sync a new safetensors file; tensors on a device or not contiguous are copied one by one."""
    # the largest items first, so that every tensor is aligned for readers that map the file
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    # the format wants the data to begin at a multiple of 8 bytes
    text += b" " * (-len(text) % 8)
    with HashedFile(path, end) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].nbytes:
                file.write(flat_bytes(tensors[name].cpu()).numpy().data)
    return file.sum


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a uint8 tensor; no copy if it is contiguous."""
    # `contiguous` accepts any stride where a size is 0 or 1, and the second `view` does not
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into own memory; raises CheckpointError if the header is invalid.

    The library maps the file. A mapped tensor would fail when the file goes away on a network disk, keep a deleted
    file's space, and have any alignment, which changes the last bits of some kernels' results.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error


def read_verified(path: Path, expected: FileSum) -> dict[str, Tensor]:
    """Read a safetensors file once, hashing it on the way, into own memory (see `read_tensors`).

    Raises CheckpointError if it does not match `expected`, or is no safetensors file.
    """
    try:
        with HashedReader(path) as file:
            tensors = _read_tensors(file, expected.size)
        damaged = file.sum != expected
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # a flipped bit in the header fails in any of these ways: only the hash says whether the file is damaged or
        # never was one
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
    header = json.loads(file.take(length).decode("utf-8"), object_pairs_hook=unique_keys)
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    tensors, end = {}, 0
    for name in sorted(places, key=lambda name: tuple(places[name])):
        (start, stop), entry = places[name], header[name]
        shape, dtype = entry["shape"], TYPES[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"{name!r} has no place in it")
        # without gaps or overlaps, as the format demands, so that each byte of the file belongs to one tensor
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > size - 8 - length:
            raise ValueError(f"{name!r} of shape {shape} does not lie at {start}..{stop}")
        tensors[name] = torch.empty(shape, dtype=dtype)
        file.fill(flat_bytes(tensors[name]).numpy().data)
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"{size - 8 - length - end} bytes at its end belong to no tensor")
    return {name: tensors[name] for name in header}


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raises ValueError if a key appears twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


class HashedReader:
    """File that is hashed while it is read; `sum` covers all that was read."""

    def __init__(self, path: Path) -> None:
        self.sum = FileSum(0, "")
        self._size = 0
        self._hash = hashlib.sha256()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, target: memoryview) -> None:
        """Read as many bytes as `target` has, in pieces that are hashed while they are in the cache."""
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
                self._size = -1  # longer than the header says
            self.sum = FileSum(self._size, self._hash.hexdigest())
        finally:
            os.close(self._descriptor)


def file_sum(path: Path, sync: bool = False) -> FileSum:
    """Return size and SHA-256 of a file; `sync`: sync it first."""
    digest, size, buffer = hashlib.sha256(), 0, bytearray(_CHUNK)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        if sync:
            os.fsync(descriptor)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileSum(size, digest.hexdigest())


MARK = "__legato__"
DEPTH = 100  # levels of nesting; a value that contains itself ends here too
MODEL, OTHERS = "model", "tensors"
KNOWN_EVERYWHERE = frozenset(DTYPE_NAMES)
"""Dtypes that every release of safetensors reads; others are stored as real numbers or bytes, with a mark."""
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

ValuePath = tuple[str, ...]


@dataclass
class FlatState:
    """Nested value split into JSON and tensors."""

    tree: Any
    """Strict JSON with marks in place of tensors."""
    tensors: dict[str, dict[str, Tensor]]
    """Tensor file (`model`, `tensors`) -> name in it -> tensor, not copied, and possibly sharing memory."""

    parts: dict[str, dict[str, ShardBlock]] = field(default_factory=lambda: {MODEL: {}, OTHERS: {}})
    """The same for this process's parts of sharded tensors."""
    marks: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Marks of those tensors in the tree."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and parts."""
        tensors = sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())
        return tensors + sum(part.block.nbytes for parts in self.parts.values() for part in parts.values())

    def assign_writers(self, ranks: Collectives) -> None:
        """Assign a writer to every part, the first rank that has it, and to the rest rank 0; every rank calls it.

        The marks record the files of the parts.
        """
        own = {
            (file, name): (part.offset, tuple(part.block.shape))
            for file, parts in self.parts.items()
            for name, part in parts.items()
            if part.block.numel()
        }
        everyone = ranks.gather_objects(own)
        for (file, name), mark in self.marks.items():
            writers: dict[Any, int] = {}
            for rank, regions in enumerate(everyone):
                if (file, name) in regions:
                    # on a mesh with a replicated axis several ranks hold the same region
                    writers.setdefault(regions[file, name], rank)
            mark["parts"] = [[rank, *map(list, region)] for region, rank in writers.items()]
            if writers.get(own.get((file, name))) != ranks.rank:
                del self.parts[file][name]
        if ranks.rank > 0:
            self.tensors = {file: {} for file in self.tensors}


def flatten(contents: Mapping[str, Any]) -> FlatState:
    """Split a nested value; the tensors of `contents["state_dict"]` keep their names, in a file of their own.

    Raises CheckpointError with the path of a value that is neither JSON nor a tensor.
    """
    flat = FlatState({}, {MODEL: {}, OTHERS: {}})
    flat.tree = _encode(dict(contents), (), flat)
    return flat


class _Unclaimed(dict[tuple[str, str], Any]):
    """Tensors and parts without a mark so far: (file, name) -> tensor."""

    files: ShardFiles | None = None
    some_parts = False
    """Whether the files may hold parts without a mark."""


def unflatten(
    tree: Any,
    tensors: Mapping[str, Mapping[str, Tensor]],
    files: ShardFiles | None = None,
    parts: Iterable[str] | None = (),
) -> dict[str, Any]:
    """Rebuild a value from what `flatten` returned, with the names of files that hold `parts`; None: some of their
    parts.

    A sharded tensor becomes a `StoredTensor`. Raises CheckpointError if something does not match.
    """
    # Each tensor must be claimed by one mark: one that nothing mentions tells of files that do not belong together.
    left = _Unclaimed({(file, name): tensor for file, named in tensors.items() for name, tensor in named.items()})
    if files is not None:
        left.files, left.some_parts = files, parts is None
        left.update(dict.fromkeys(place for file in parts or () for place in files.names(file)))
    try:
        contents = _decode(tree, (), left)
    except RecursionError:
        raise CheckpointError("state.json is nested too deeply to be a checkpoint's.") from None
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise CheckpointError(f"state.json must hold an object with names as keys, got {_a(contents)}.")
    if left:
        file, name = next(iter(left))
        file = file.removesuffix(".safetensors")
        raise CheckpointError(f"{file}.safetensors holds {name!r}, which state.json does not mention.")
    return contents


def _encode(value: Any, path: ValuePath, flat: FlatState) -> Any:
    if len(path) > DEPTH:
        raise CheckpointError(f"{_dotted(path[:4])}... is nested more than {DEPTH} deep; does it contain itself?")
    # before int, of which bool is a subclass
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # str Enum included: JSON has only its text
        return str.__str__(value)
    if isinstance(value, StoredTensor):  # stays in the files of another checkpoint
        return dict(value.mark)
    part = value if isinstance(value, ShardBlock) else shard_block(value) if isinstance(value, Tensor) else None
    if part is not None:
        return _encode_part(part, path, flat)
    if isinstance(value, Tensor):
        return _encode_tensor("tensor", value, path, flat)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value, path, flat)
    if isinstance(value, int):
        # beyond 64 bits other readers lose digits, and Python refuses very long decimals
        return int(value) if value.bit_length() < 64 else _mark("int", hex(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _mark("float", repr(float(value)))
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, flat)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_collection(value, path, flat)
    return _encode_plain(value, path)


def _encode_mapping(value: Mapping[Any, Any], path: ValuePath, flat: FlatState) -> Any:
    inner = {key: _encode(item, (*path, str(key)), flat) for key, item in value.items()}
    if all(isinstance(key, str) for key in inner) and MARK not in inner and not isinstance(value, Counter):
        return {str.__str__(key): item for key, item in inner.items()}
    for key in inner:
        if isinstance(key, (Tensor, np.ndarray)):
            raise _refusal(key, (*path, "a key"))
    items = [[_encode(key, (*path, "a key"), flat), item] for key, item in inner.items()]
    return _mark("counter" if isinstance(value, Counter) else "items", items)


def _encode_collection(value: Any, path: ValuePath, flat: FlatState) -> Any:
    inner = [_encode(item, (*path, str(place)), flat) for place, item in enumerate(value)]
    if isinstance(value, list):
        return inner
    if isinstance(value, torch.Size):
        return _mark("size", inner)
    if type(value) in (tuple, set, frozenset):
        return _mark(type(value).__name__, inner)
    raise _refusal(value, path)


def _encode_plain(value: Any, path: ValuePath) -> Any:
    if isinstance(value, complex):
        return _mark("complex", [repr(value.real), repr(value.imag)])
    if isinstance(value, bytes):
        return _mark("bytes", base64.b64encode(value).decode("ascii"))
    if isinstance(value, torch.dtype):
        return _mark("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return _mark("device", str(value))
    if isinstance(value, timedelta):
        return _mark("timedelta", [value.days, value.seconds, value.microseconds])
    if isinstance(value, PurePath):
        return _mark("path", str(value))
    raise _refusal(value, path)


def _encode_numpy(value: Any, path: ValuePath, flat: FlatState) -> Any:
    native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")  # a copy: contiguous and writable
    try:
        tensor = torch.from_numpy(native)
    except TypeError:
        raise CheckpointError(
            f"{_dotted(path)} is a numpy {value.dtype}; a checkpoint holds numbers, bools, text and tensors."
        ) from None
    return _encode_tensor("array" if isinstance(value, np.ndarray) else "scalar", tensor, path, flat)


def _encode_tensor(kind: str, value: Tensor, path: ValuePath, flat: FlatState) -> Any:
    # a wrapper subclass (of quantization, say) has no memory of its own whose bytes could be written
    wrapped = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wrapped or value.layout != torch.strided or value.is_quantized or value.is_meta:
        what = type(value).__name__ if wrapped else "meta tensor" if value.is_meta else f"{value.layout} tensor"
        raise CheckpointError(
            f"{_dotted(path)} is a {what}; a checkpoint holds plain, dense tensors: convert it first."
        )
    tensor = value.detach().resolve_conj().resolve_neg()
    file, unique = _name_in_file(path, flat)
    mark: dict[str, Any] = {MARK: kind, "file": file, "name": unique}
    if tensor.dtype not in KNOWN_EVERYWHERE:
        mark |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else flat_bytes(tensor)
    flat.tensors[file][unique] = tensor
    return mark


def _encode_part(part: ShardBlock, path: ValuePath, flat: FlatState) -> Any:
    kind = str(part.block.dtype).removeprefix("torch.")
    if part.block.dtype not in KNOWN_EVERYWHERE:
        raise CheckpointError(
            f"{_dotted(path)} is on several processes and is {kind}, which cannot be stored in parts."
        )
    file, unique = _name_in_file(path, flat)
    mark = {MARK: "parts", "file": file, "name": unique, "dtype": kind, "shape": list(part.shape)}
    flat.parts[file][unique], flat.marks[file, unique] = part, mark
    return mark


def _name_in_file(path: ValuePath, flat: FlatState) -> tuple[str, str]:
    file, name = (MODEL, path[1:]) if path[0] == "state_dict" and len(path) > 1 else (OTHERS, path)
    unique = ".".join(name).encode("utf-8", "replace").decode("utf-8")  # safetensors has no lone surrogates
    while unique in flat.tensors[file] or (file, unique) in flat.marks or unique == "__metadata__":
        unique += "'"  # "a.b" and "a" -> "b" give the same name
    return file, unique


def _decode(node: Any, path: ValuePath, left: _Unclaimed) -> Any:
    if isinstance(node, list):
        return [_decode(item, (*path, str(place)), left) for place, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if MARK not in node:
        return {key: _decode(item, (*path, key), left) for key, item in node.items()}
    kind = node[MARK]
    try:
        if kind in ("tensor", "array", "scalar"):
            return _decode_tensor(kind, node, left)
        if kind == "parts":
            return _decode_parts(node, left)
        if node.keys() != {MARK, "value"} or not isinstance(kind, str) or kind not in READERS:
            raise ValueError(f"no such mark: {str(node)[:80]}")
        return READERS[kind](_decode(node["value"], path, left))
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RecursionError):
            raise
        raise CheckpointError(f"state.json is damaged at {_dotted(path)}: {str(error)[:200]}.") from error


def _decode_tensor(kind: str, node: dict[str, Any], left: _Unclaimed) -> Any:
    if not {"file", "name"} <= node.keys() <= {MARK, "file", "name", "dtype", "shape"}:
        raise ValueError(f"no such mark: {str(node)[:80]}")
    place = (node["file"], node["name"])
    if place not in left:
        raise ValueError(f"{place[0]}.safetensors holds no tensor {place[1]!r}, or it is used twice")
    tensor = left.pop(place)
    if "dtype" in node:
        dtype, shape = DTYPES[node["dtype"]], _all_of(int, node["shape"])
        tensor = torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)
        if tensor.dtype != dtype:
            raise ValueError(f"{place[1]!r} is stored as {tensor.dtype}, marked as {dtype}")
        tensor = tensor.view(shape)
    if kind == "tensor":
        return tensor
    array = tensor.numpy()
    if kind == "scalar" and array.ndim:
        raise ValueError(f"{place[1]!r} is marked as a scalar and has shape {array.shape}")
    return array if kind == "array" else array[()]


def _decode_parts(node: dict[str, Any], left: _Unclaimed) -> StoredTensor:
    if node.keys() != {MARK, "file", "name", "dtype", "shape", "parts"} or left.files is None:
        raise ValueError(f"no such mark: {str(node)[:80]}")
    name, shape, parts = _of(str, node["name"]), tuple(_all_of(int, node["shape"])), []
    for rank, offset, size in _all_of(list, node["parts"]):
        file = file_name(_of(str, node["file"]), _of(int, rank))
        if not left.some_parts:
            del left[file, name]
        parts.append((file, tuple(_all_of(int, offset)), tuple(_all_of(int, size))))
    return StoredTensor(left.files, name, shape, DTYPES[node["dtype"]], parts, node)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {_a(value)}")
    return value


def _all_of(kind: type, values: Any) -> list[Any]:
    return [_of(kind, value) for value in _of(list, values)]


def _decode_items(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in _all_of(list, value):
        key, item = pair
        if not isinstance(key, Hashable) or isinstance(key, Tensor) or key in found:
            raise ValueError("a key that is no key or appears twice")
        found[key] = item
    return found


def _float(text: Any) -> float:
    return float(_of(str, text))


def _complex(parts: Any) -> complex:
    real, imaginary = _of(list, parts)
    return complex(_float(real), _float(imaginary))


def _timedelta(parts: Any) -> timedelta:
    days, seconds, microseconds = _all_of(int, parts)
    return timedelta(days, seconds, microseconds)


READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(_of(str, value), 16),
    "float": _float,
    "complex": _complex,
    "bytes": lambda value: base64.b64decode(_of(str, value), validate=True),
    "tuple": lambda value: tuple(_of(list, value)),
    "set": lambda value: set(_of(list, value)),
    "frozenset": lambda value: frozenset(_of(list, value)),
    "size": lambda value: torch.Size(_all_of(int, value)),
    "items": _decode_items,
    "counter": lambda value: Counter(_decode_items(value)),
    "dtype": lambda value: DTYPES[_of(str, value)],
    "device": lambda value: torch.device(_of(str, value)),
    "timedelta": _timedelta,
    "path": lambda value: Path(_of(str, value)),
}


def _mark(kind: str, value: Any) -> dict[str, Any]:
    return {MARK: kind, "value": value}


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _dotted(path: ValuePath) -> str:
    return ".".join(path) or "the checkpoint"


def _refusal(value: Any, path: ValuePath) -> CheckpointError:
    return CheckpointError(
        f"{_dotted(path)} is {_a(value)}; a checkpoint holds JSON values and tensors. "
        f"Leave it out of the state, or turn it into numbers, text, lists, dicts or tensors."
    )
