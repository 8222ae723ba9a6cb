"""Undoing torch's composable wrappers: fully_shard and parallelize_module cannot be undone themselves.

They give a module another class, hooks, and entries in its `__dict__`; all three are put back as they were.
"""

from typing import Any

from torch import nn

from ....base.torch_private import forget_wrapping


class Wrapping:
    """Record of a task's modules before they are wrapped, so that the wrappers can be removed."""

    def __init__(self, task: nn.Module) -> None:
        """Remember how the modules are now."""
        self.before: list[tuple[nn.Module, type, set[str]]] = []
        for module in task.modules():
            self.before.append((module, type(module), set(module.__dict__)))
        self.keys: list[dict[str, set[Any]]] = [
            {name: set(value) for name, value in module.__dict__.items() if isinstance(value, dict)}
            for module, *_ in self.before
        ]  # of every dict that a module has; torch keeps hooks in such, by number
        self.added: list[tuple[dict[str, Any], list[Any]]] = []

    def done(self) -> None:
        """Remember what was added since, which is what `undo` takes away."""
        for (module, _, names), dicts in zip(self.before, self.keys, strict=True):
            own = module.__dict__
            self.added.append((own, [name for name in own if name not in names]))
            for name, keys in dicts.items():
                # hooks are numbered; names that the task itself has added meanwhile (buffers, say) are its own
                self.added.append((own[name], [key for key in own[name] if isinstance(key, int) and key not in keys]))

    def undo(self) -> None:
        """Take the wrappers away; parameters stay as they are."""
        for owner, keys in self.added:
            for key in keys:
                owner.pop(key, None)
        for module, kind, _ in self.before:
            module.__class__ = kind
            forget_wrapping(module)
        self.before, self.added = [], []
