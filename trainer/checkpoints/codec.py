"""Encodes nested values as JSON and named tensors, and decodes them, without using pickle.

A value of a type that JSON does not support is encoded as a mark, `{"__legato__": KIND, "value": ...}`. A tensor's mark
contains a file name and the tensor's name in that file.
"""

import base64
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ..processes.ranks import Ranks
from .shards import ShardBlock, ShardFiles, StoredTensor, file_name, shard_block
from .tensors import DTYPE_NAMES, flat_bytes

MARK = "__legato__"
DEPTH = 100  # maximum nesting depth; the limit also catches values that contain themselves
MODEL, OTHERS = "model", "tensors"
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
UNFLATTEN = "__tensor_unflatten__"
WRAPPED = "wrapped"
"""Kind of a tensor subclass that wraps plain tensors, such as a quantized weight."""
PLAIN = (bool, int, float, str, type(None), list, tuple, dict, torch.Size, torch.dtype, torch.device)
"""Types that a checkpoint restores unchanged."""
ValuePath = tuple[str, ...]


class Kind(NamedTuple):
    """How to store values of a type that JSON does not support."""

    of: type[Any]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    packed: type[Any] = str
    """Return type of `pack`."""
    items: type[Any] | None = None
    """Type of the items if `pack` returns a list; None allows any type."""


def _mapping_of(pairs: list[Any]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, Hashable) or isinstance(key, Tensor) or key in mapping:
            raise ValueError("a key is not hashable or appears twice")
        mapping[key] = value
    return mapping


def _items(mapping: Mapping[Any, Any]) -> list[Any]:
    return list(mapping.items())


def _complex_of(texts: list[str]) -> complex:
    real, imaginary = texts
    return complex(float(real), float(imaginary))


def _timedelta_of(numbers: list[int]) -> timedelta:
    days, seconds, microseconds = numbers
    return timedelta(days, seconds, microseconds)


KINDS = {
    "int": Kind(int, hex, lambda text: int(text, 16)),
    "float": Kind(float, repr, float),
    "complex": Kind(complex, lambda number: [repr(number.real), repr(number.imag)], _complex_of, list, str),
    "bytes": Kind(
        bytes, lambda data: base64.b64encode(data).decode(), lambda text: base64.b64decode(text, validate=True)
    ),
    "tuple": Kind(tuple, list, tuple, list),
    "set": Kind(set, list, set, list),
    "frozenset": Kind(frozenset, list, frozenset, list),
    "size": Kind(torch.Size, list, torch.Size, list, int),
    "items": Kind(dict, _items, _mapping_of, list, list),
    "counter": Kind(Counter, _items, lambda pairs: Counter(_mapping_of(pairs)), list, list),
    "dtype": Kind(torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), DTYPES.__getitem__),
    "device": Kind(torch.device, str, torch.device),
    "timedelta": Kind(timedelta, lambda time: [time.days, time.seconds, time.microseconds], _timedelta_of, list, int),
    "path": Kind(PurePath, str, Path),
}
SUBCLASSED = ("int", "float", "path")
"""Kinds whose subclasses, such as an IntEnum, a NumPy float or a PosixPath, are stored as the base class."""


@dataclass
class FlatState:
    """A nested value, split into JSON and tensors."""

    tree: Any
    """Strict JSON, with marks in place of tensors."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {MODEL: {}, OTHERS: {}})
    """Tensors, keyed by file (`model` or `tensors`) and name. They are not copied and may share memory."""
    shards: dict[str, dict[str, ShardBlock]] = field(default_factory=lambda: {MODEL: {}, OTHERS: {}})
    """This process's shards of sharded tensors, keyed by file and name."""
    marks: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Marks of the sharded tensors in the tree."""
    frozen: set[str] = field(default_factory=set)
    """Names of the weights in `model` that may be stored in a base (frozen_base.py)."""

    def assign_writers(self, ranks: Ranks) -> None:
        """Assign each shard to the first rank that has it, and all other tensors to rank 0. All ranks must call this.

        The marks record which file contains each shard.
        """
        regions = {
            (file, name): (shard.offset, tuple(shard.block.shape))
            for file, shards in self.shards.items()
            for name, shard in shards.items()
            if shard.block.numel()
        }
        regions_by_rank = ranks.gather_objects(regions)
        for (file, name), mark in self.marks.items():
            writers: dict[Any, int] = {}
            for rank, rank_regions in enumerate(regions_by_rank):
                if (file, name) in rank_regions:
                    # on a mesh with a replicated axis, multiple ranks hold the same region
                    writers.setdefault(rank_regions[file, name], rank)
            mark["parts"] = [[rank, *map(list, region)] for region, rank in writers.items()]
            if writers.get(regions.get((file, name))) != ranks.rank:
                del self.shards[file][name]
        if ranks.rank > 0:
            self.tensors = {file: {} for file in self.tensors}


# --- encoding ---------------------------------------------------------------------------------------------------------
def flatten(contents: Mapping[str, Any], frozen: Collection[str] = ()) -> FlatState:
    """Split a nested value into JSON and tensors.

    The tensors in `contents["state_dict"]` are stored in a separate file under their own names.

    Args:
        frozen: state dict keys of the weights that are not trained.

    Raises CheckpointError if a checkpoint cannot store a value. The error message includes the value's path.
    """
    flat = FlatState({}, frozen=set(frozen))
    flat.tree = _encode(dict(contents), (), flat)
    return flat


def _encode(value: Any, path: ValuePath, flat: FlatState) -> Any:
    if len(path) > DEPTH:
        raise CheckpointError(f"{_dotted(path[:4])}... is nested over {DEPTH} levels deep. Does it contain itself?")
    if value is None or isinstance(value, bool):  # before int: bool is a subclass of it
        return value
    if isinstance(value, str):  # a str Enum, too: JSON stores only its text
        return str.__str__(value)
    if isinstance(value, StoredTensor):  # its data remains in another checkpoint's files
        return dict(value.mark)
    if isinstance(value, (Tensor, ShardBlock, np.ndarray, np.generic)):
        return _encode_tensor(value, path, flat)
    # beyond 64 bits, other JSON readers lose digits, and Python rejects very long decimals
    if isinstance(value, int) and value.bit_length() < 64:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list):
        return [_encode(item, (*path, str(place)), flat) for place, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, flat)
    kind = next((name for name, kind in KINDS.items() if type(value) is kind.of), None)
    kind = kind or next((name for name in SUBCLASSED if isinstance(value, KINDS[name].of)), None)
    if kind is None:
        raise _refusal(value, path)
    return {MARK: kind, "value": _encode(KINDS[kind].pack(value), path, flat)}


def _encode_mapping(value: Mapping[Any, Any], path: ValuePath, flat: FlatState) -> Any:
    inner = {key: _encode(item, (*path, str(key)), flat) for key, item in value.items()}
    if all(isinstance(key, str) for key in inner) and MARK not in inner and not isinstance(value, Counter):
        return {str.__str__(key): item for key, item in inner.items()}
    for key in inner:
        if isinstance(key, (Tensor, np.ndarray)):
            raise _refusal(key, (*path, "a key"))
    items = [[_encode(key, (*path, "a key"), flat), item] for key, item in inner.items()]
    return {MARK: "counter" if isinstance(value, Counter) else "items", "value": items}


def _encode_tensor(value: Any, path: ValuePath, flat: FlatState) -> dict[str, Any]:
    """Add a tensor, this process's shard of a tensor, or a NumPy value to `flat`, and return its mark."""
    kind, shard = "tensor", value if isinstance(value, ShardBlock) else None
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:  # a copy is contiguous, writable, and in this machine's byte order
            value = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        except TypeError:
            raise CheckpointError(
                f"{_dotted(path)} is a numpy {value.dtype} array. Convert it to numbers, bools, strings or tensors."
            ) from None
    shard = shard or shard_block(value)
    # a wrapper subclass, such as a quantized weight, has no memory of its own to write
    if type(value if shard is None else shard.block).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return _encode_wrapped(value, path, flat, is_sharded=shard is not None)
    file, name = (MODEL, path[1:]) if path[0] == "state_dict" and len(path) > 1 else (OTHERS, path)
    unique = ".".join(name).encode("utf-8", "replace").decode("utf-8")  # safetensors rejects lone surrogates
    while unique in flat.tensors[file] or (file, unique) in flat.marks or unique == "__metadata__":
        unique += "'"  # "a.b" and "a" -> "b" give the same name
    if file == MODEL and path[1] in flat.frozen:
        flat.frozen.add(unique)  # also for each inner tensor of a wrapper subclass
    mark: dict[str, Any] = {MARK: kind, "file": file, "name": unique}
    dtype = (value if shard is None else shard.block).dtype
    dtype_name = str(dtype).removeprefix("torch.")
    if shard is not None:
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{_dotted(path)} is a sharded {dtype_name} tensor, which a checkpoint cannot store. Use float32."
            )
        mark |= {MARK: "parts", "dtype": dtype_name, "shape": list(shard.shape)}
        flat.shards[file][unique], flat.marks[file, unique] = shard, mark
        return mark
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "meta tensor" if value.is_meta else f"{value.layout} tensor"
        raise CheckpointError(
            f"{_dotted(path)} is a {kind}. A checkpoint can only store dense tensors. Convert it to a dense tensor."
        )
    tensor = value.detach().resolve_conj().resolve_neg()
    # every release of safetensors reads DTYPE_NAMES; other dtypes are stored as real numbers or bytes
    if dtype not in DTYPE_NAMES:
        mark |= {"dtype": dtype_name, "shape": list(tensor.shape)}
        tensor = torch.view_as_real(tensor) if dtype.is_complex else flat_bytes(tensor)
    flat.tensors[file][unique] = tensor
    return mark


def _encode_wrapped(value: Any, path: ValuePath, flat: FlatState, is_sharded: bool) -> dict[str, Any]:
    """Return the mark of a tensor subclass that `__tensor_flatten__` splits into tensors and plain values."""
    name, problem = f"{type(value).__module__}.{type(value).__qualname__}", "sharded across processes"
    if not is_sharded:
        inner, settings = value.__tensor_flatten__() if hasattr(value, "__tensor_flatten__") else ((), object())
        if _wrapper_class(name) is type(value) and _is_plain(settings):
            tensors = {key: _encode(getattr(value, key), (*path, key), flat) for key in inner}
            encoded = _encode([settings, value.size(), tuple(value.stride())], path, flat)
            return {MARK: WRAPPED, "class": name, "tensors": tensors, "settings": encoded}
        problem = "whose __tensor_flatten__ does not return plain tensors and plain values"
    raise CheckpointError(
        f"{_dotted(path)} is a {name}, {problem}. A checkpoint cannot store it. Convert it to a plain tensor, "
        f"leave it out of the state dict (register_buffer with persistent=False), or train without checkpoints."
    )


def _wrapper_class(name: str) -> Any:
    """Return the wrapper subclass with the given name; None if it has not been imported or cannot be rebuilt."""
    # only classes that the program has already imported: reading a checkpoint imports no modules
    module, _, attribute = name.rpartition(".")
    kind = vars(sys.modules.get(module, object)).get(attribute)
    return kind if isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, UNFLATTEN) else None


def _is_plain(value: Any) -> bool:
    """Return whether a value is restored from a checkpoint unchanged, with the same type."""
    items = [*value.keys(), *value.values()] if type(value) is dict else value if type(value) in (list, tuple) else ()
    return type(value) in PLAIN and all(map(_is_plain, items))


# --- decoding ---------------------------------------------------------------------------------------------------------
Tensors = dict[tuple[str, str], Tensor]
"""Tensors, keyed by file and name."""


def unflatten(
    tree: Any, tensors: Mapping[str, Mapping[str, Tensor]], files: ShardFiles | None = None
) -> dict[str, Any]:
    """Rebuild a value that was split by `flatten`. Shards are read from `files`.

    Each sharded tensor is returned as a `StoredTensor`. Raises CheckpointError if the tree and the tensors do not
    match.
    """
    # Each tensor must be claimed by exactly one mark: an unclaimed tensor means that the files do not belong together.
    unclaimed = {(file, name): tensor for file, named in tensors.items() for name, tensor in named.items()}
    try:
        contents = _decode(tree, (), unclaimed, files)
    except RecursionError:
        raise CheckpointError("state.json is nested too deeply for a checkpoint.") from None
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise CheckpointError(f"state.json must contain an object with string keys, got {type(contents).__name__}.")
    if unclaimed:
        file, name = next(iter(unclaimed))
        raise CheckpointError(f"{file}.safetensors contains {name!r}, which state.json does not mention.")
    return contents


def _decode(node: Any, path: ValuePath, unclaimed: Tensors, files: ShardFiles | None) -> Any:
    if isinstance(node, list):
        return [_decode(item, (*path, str(place)), unclaimed, files) for place, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if MARK not in node:
        return {key: _decode(item, (*path, key), unclaimed, files) for key, item in node.items()}
    kind = node[MARK]
    try:
        if kind in ("tensor", "array", "scalar"):
            return _decode_tensor(kind, node, unclaimed)
        if kind == "parts" and files is not None:
            return _decode_shards(node, files)
        if kind == WRAPPED:
            return _decode_wrapped(node, path, unclaimed, files)
        if node.keys() != {MARK, "value"} or not isinstance(kind, str):
            raise ValueError(f"unknown mark: {str(node)[:80]}")
        value = _decode(node["value"], path, unclaimed, files)
        return KINDS[kind].unpack(_typed(KINDS[kind].packed, value, KINDS[kind].items))
    except (CheckpointError, RecursionError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"state.json is damaged at {_dotted(path)}: {str(error)[:200]}.") from error


def _decode_tensor(kind: str, node: dict[str, Any], unclaimed: Tensors) -> Any:
    if not {"file", "name"} <= node.keys() <= {MARK, "file", "name", "dtype", "shape"}:
        raise ValueError(f"unknown mark: {str(node)[:80]}")
    place = (node["file"], node["name"])
    if place not in unclaimed:
        raise ValueError(f"{place[0]}.safetensors has no tensor {place[1]!r}, or state.json mentions it twice")
    tensor = unclaimed.pop(place)
    if "dtype" in node:
        dtype, shape = DTYPES[node["dtype"]], _typed(list, node["shape"], int)
        tensor = torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)
        if tensor.dtype != dtype:
            raise ValueError(f"{place[1]!r} is stored as {tensor.dtype}, but marked as {dtype}")
        tensor = tensor.view(shape)
    if kind == "tensor":
        return tensor
    array = tensor.numpy()
    if kind == "scalar" and array.ndim:
        raise ValueError(f"{place[1]!r} is marked as a scalar, but has shape {array.shape}")
    return array if kind == "array" else array[()]


def _decode_wrapped(node: dict[str, Any], path: ValuePath, unclaimed: Tensors, files: ShardFiles | None) -> Any:
    if node.keys() != {MARK, "class", "tensors", "settings"}:
        raise ValueError(f"unknown mark: {str(node)[:80]}")
    tensors = _decode(_typed(dict, node["tensors"]), path, unclaimed, files)
    settings, size, stride = _decode(_typed(list, node["settings"]), path, unclaimed, files)
    kind = _wrapper_class(_typed(str, node["class"]))
    if kind is None:  # a program that only copies weights may not have imported the package: return the inner tensors
        return tensors
    try:
        return getattr(kind, UNFLATTEN)(tensors, settings, size, stride)
    except Exception as error:  # given a damaged or malicious file, the package may raise any exception
        raise ValueError(f"{node['class']} cannot be rebuilt: {error}") from error


def _decode_shards(node: dict[str, Any], files: ShardFiles) -> StoredTensor:
    if node.keys() != {MARK, "file", "name", "dtype", "shape", "parts"}:
        raise ValueError(f"unknown mark: {str(node)[:80]}")
    shape, shards = tuple(_typed(list, node["shape"], int)), []
    for rank, offset, size in _typed(list, node["parts"], list):
        file = file_name(_typed(str, node["file"]), _typed(int, rank))
        shards.append((file, tuple(_typed(list, offset, int)), tuple(_typed(list, size, int))))
    return StoredTensor(files, _typed(str, node["name"]), shape, DTYPES[node["dtype"]], shards, node)


def _typed(kind: type[Any], value: Any, items: type[Any] | None = None) -> Any:
    """Check the exact type of a value and, if `items` is set, of its items. Return the value."""
    if type(value) is not kind or (items is not None and any(type(item) is not items for item in value)):
        raise TypeError(f"expected {kind.__name__}, got {str(value)[:40]}")
    return value


def _dotted(path: ValuePath) -> str:
    return ".".join(path) or "the checkpoint"


def _refusal(value: Any, path: ValuePath) -> CheckpointError:
    name = type(value).__name__
    return CheckpointError(
        f"{_dotted(path)} is {'an' if name[0].lower() in 'aeiou' else 'a'} {name}, but a checkpoint stores JSON values "
        f"and tensors. Leave it out of the state, or convert it to numbers, text, lists, dicts or tensors."
    )
