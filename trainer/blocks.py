"""Blocks: the modules of a task that a config names by their class; and blocks that compute their forward twice."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .errors import ConfigError, did_you_mean


def modules_named(task: nn.Module, names: str | Sequence[str], option: str) -> list[nn.Module]:
    """Return the modules whose class, or a base of it, has one of these names, outer ones first.

    Raises ConfigError, naming `option` and the nearest classes, for a name that no module has.
    """
    wanted = {names} if isinstance(names, str) else set(names)
    found, missing = [], set(wanted)
    for module in task.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if module is not task and kinds & wanted:
            found.append(module)
            missing -= kinds
    if missing:
        known = sorted({type(module).__name__ for module in task.modules() if module is not task})
        name = sorted(missing)[0]
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        raise ConfigError(
            f"{option}: no module of {type(task).__name__} is a {name!r}.{did_you_mean(name, known)} There are {shown}."
        )
    return found


class Recomputing:
    """Blocks that keep only their input for backward, and compute the rest once more there.

    After Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (https://arxiv.org/abs/1604.06174), by
    torch.utils.checkpoint. Random numbers are drawn again as they were, and buffers such as batch norm's running
    statistics are updated by the first forward only: the result stays the same to the last bit. A module gets a class
    of its own for the time of a run, so that names, hooks and copies of it are what they were.
    """

    def __init__(self, task: nn.Module, names: str | Sequence[str]) -> None:
        """Let the modules of these classes compute twice; raises ConfigError for a class that the task has not."""
        self.before = [(module, type(module)) for module in modules_named(task, names, "activation_checkpointing")]
        kinds = {kind: _recomputing(kind) for _, kind in self.before}
        for module, kind in self.before:
            module.__class__ = kinds[kind]

    def undo(self) -> None:
        """Let them compute once again."""
        for module, kind in self.before:
            module.__class__ = kind
        self.before = []


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *arguments, **options)
        contexts = (nullcontext(), _on_copies_of_buffers(self))
        return checkpoint(kind.forward, self, *arguments, use_reentrant=False, context_fn=lambda: contexts, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


@contextmanager
def _on_copies_of_buffers(block: nn.Module) -> Iterator[None]:
    """Let a forward update copies of a block's buffers, which are dropped afterwards."""
    own = [(module, *item) for module in block.modules() for item in module.named_buffers(recurse=False)]
    try:
        for module, name, buffer in own:
            setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)
