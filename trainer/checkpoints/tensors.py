"""Reads and writes tensors in the safetensors format."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...base.errors import CheckpointError
from .hashed import FileSum, HashedFile

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Dtypes that every release of safetensors reads."""


def write_tensors(file: HashedFile, tensors: Mapping[str, Tensor], **metadata: str) -> FileSum:
    """Write and sync a new safetensors file. Noncontiguous and accelerator tensors are copied one at a time.

    The safetensors library's own writer rejects tensors that share memory (tied weights), and would require a second
    pass to compute the hash.
    """
    # largest item sizes first, which aligns every tensor for readers that memory-map the file
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in order:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)  # in this format the data begins at a multiple of 8 bytes
    with file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].nbytes:
                file.write(flat_bytes(tensors[name].cpu()).numpy().data)
    return file.sum


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a uint8 tensor, without a copy if the tensor is contiguous."""
    # for dimensions of size 0 or 1, `contiguous` accepts any stride, but the second `view` does not
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into this process's memory. Raises CheckpointError for any other kind of file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Copied, because the library memory-maps the file: a mapped tensor fails if the file disappears from a
            # network disk, and its alignment varies, which changes the low-order bits of some kernels' results.
            return {name: _copied(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error


def _copied(mapped: Tensor) -> Tensor:
    copy = torch.empty_like(mapped)
    # NumPy copies in one thread: torch's threads touch fresh memory together, which takes 7 times the CPU time
    flat_bytes(copy).numpy()[:] = flat_bytes(mapped).numpy()
    return copy
