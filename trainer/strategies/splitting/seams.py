"""Seams: what moves activations from device to device, between the blocks of a model that is spread over several.

    batch on the last device                                                    output on the last device
        |                                                                                   |
      [seam] block 0   [seam] block 1   ...   [seam] block k   ...   [seam] block n ------ -´
        `---- moved to the first device         `- moved to the next device

A seam is a pre-hook on a block: whatever comes in, nested and as keyword too, goes to the device of the block. Where it
is there already nothing happens. autograd takes gradients back the same way.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...data.transfer import to_device
from ...torch_private import buffers_of


class Seams:
    """The seams before some blocks, until `close`."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def add(self, block: nn.Module, device: torch.device) -> None:
        """From now on `block`, which lives on `device`, gets its input there."""
        hook = partial(_bring, device)
        # before all hooks of the user's own, which see what the block sees
        self.handles.append(block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def close(self) -> None:
        """Leave the blocks alone from now on."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


def _bring(
    device: torch.device, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].device == device:
        return None  # the usual case within a part: 2 us where a walk through the arguments takes 6
    return to_device(args, device), to_device(kwargs, device)


def move_parts(task: nn.Module, parts: Iterable[tuple[Iterable[nn.Module], torch.device]], rest: torch.device) -> None:
    """Move each part to its device, and everything of the task that is in none to `rest`."""
    placed: set[nn.Module] = set()
    for modules, device in parts:
        for module in modules:
            module.to(device)
            placed.add(module)
    _move_rest(task, placed, rest)


def _move_rest(module: nn.Module, placed: set[nn.Module], device: torch.device) -> None:
    if not placed.intersection(module.modules()):
        module.to(device)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    buffers = buffers_of(module)
    for name, buffer in list(buffers.items()):
        buffers[name] = None if buffer is None else buffer.to(device)
    for child in module.children():
        if child not in placed:
            _move_rest(child, placed, device)
