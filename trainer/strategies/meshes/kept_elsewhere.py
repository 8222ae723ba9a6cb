"""Tensors that some ranks keep and others only know of, as a checkpoint takes them: each rank writes what it keeps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoints.parts import Part, part_of


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
            value = part_of(kept) or Part(kept.detach(), value.shape, (0,) * len(value.shape))
        found[name] = value
    return found
