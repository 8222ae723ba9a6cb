"""Reads other programs' checkpoint files without running any code in them."""

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from .tensors import read_tensors

NESTS = ("state_dict", "model", "model_state_dict", "module")
"""Keys that other programs use for the weights in a larger file. Lightning uses the first key."""
DDP_PREFIX, COMPILE_PREFIX = "module.", "_orig_mod."
_EXTRA_STATE = "_extra_state"  # result of nn.Module.get_extra_state; may be any object


def read_contents(path: Path, names: Collection[str] = ()) -> dict[str, Any]:
    """Read a file with `read_file`, and remove prefixes that do not occur in `names`, the task's parameter names."""
    contents = read_file(path)
    return {**contents, "state_dict": plain_names(path, contents["state_dict"], names)}


def read_file(path: Path) -> dict[str, Any]:
    """Read a `torch.save` file, a Lightning `.ckpt` or a `.safetensors` file as the contents of a checkpoint.

    The contents are the weights and, if the file has a `state_dict` key, the file's other entries. If the file is
    rejected, raises a CheckpointError that describes its contents.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; expected a .pt, .pth, .ckpt or .safetensors file.")
    if path.suffix == ".safetensors":
        return {"state_dict": read_tensors(path)}
    loaded = _load_pickle(path)
    entries = loaded if isinstance(loaded, Mapping) and NESTS[0] in loaded else {}
    return {**entries, "state_dict": _state_dict(path, loaded)}


def _load_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about TorchScript and old formats; errors are raised anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # given an unknown file, a parser may raise any exception
        unsafe = _unsafe_names(path) or re.findall(r"GLOBAL (\S+)", str(error))
        if unsafe:
            raise CheckpointError(
                f"{path} contains objects other than tensors and plain values: {', '.join(unsafe)}. Legato rejects the "
                f"file because reading it could run arbitrary code. Save it again without these objects or, if you "
                f"trust it, first pass their classes to torch.serialization.add_safe_globals([...])."
            ) from None
        # drop torch's advice to load the file without weights_only
        lines = [line.strip() for line in str(error).split("\n") if line.strip() and "weights_only" not in line]
        reason = lines[0].removeprefix("WeightsUnpickler error: ")[:300] if lines else type(error).__name__
        raise CheckpointError(f"{path} cannot be read as weights: {reason}") from None


def _unsafe_names(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # not a zip file, or damaged: torch.load's error is clearer
        return []


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    if isinstance(loaded, Mapping):
        for nest in NESTS:
            if isinstance(loaded.get(nest), Mapping) and loaded[nest]:
                loaded = loaded[nest]
                break
        weights = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
        objects = {name: value for name, value in loaded.items() if name not in weights}
        if weights and not [name for name in objects if not str(name).endswith(_EXTRA_STATE)]:
            return {str(name): value.detach() for name, value in weights.items()}
        types = [f"{name!s:.40} ({type(value).__name__})" for name, value in list(objects.items())[:6]]
        contents = ", ".join(types) or "nothing"
    else:
        contents = type(loaded).__name__
    raise CheckpointError(
        f"{path} contains no state dict: expected a dict that maps names to tensors, at the top level or under "
        f"{', '.join(NESTS)}, got {contents}."
    )


def plain_names(path: object, weights: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Remove the prefixes that DDP and torch.compile add to weight names, unless `names` contains them."""
    if names and set(names) <= weights.keys():
        return weights
    plain = {_uncompiled(name): value for name, value in weights.items()}
    # a loop, because wrappers may be nested
    while plain and not (names and set(names) <= plain.keys()) and all(name.startswith(DDP_PREFIX) for name in plain):
        plain = {_uncompiled(name.removeprefix(DDP_PREFIX)): value for name, value in plain.items()}
    if len(plain) != len(weights):
        raise CheckpointError(f"{path} has two weights whose names differ only by the prefix {COMPILE_PREFIX!r}.")
    return plain


def _uncompiled(name: str) -> str:
    """Remove `_orig_mod.`, which marks a compiled submodule, from a name."""
    return ".".join(word for word in name.split(".") if word != COMPILE_PREFIX[:-1])
