"""Removes the wrappers that fully_shard and parallelize_module add. torch has no function for this.

Wrapping changes a module's class and adds hooks and entries to its `__dict__`. `Wrapping.undo` reverts the changes.
"""

from typing import Any

from torch import nn

from ....base.torch_private import forget_wrapping

Entry = tuple[str, int | None]
"""A name in a module's `__dict__` and, for a hook, its key in the dict of that name."""


class Wrapping:
    """Record of a task's modules before they are wrapped, so that the wrappers can be removed."""

    def __init__(self, task: nn.Module) -> None:
        """Record the modules before wrapping."""
        self.before = [(module, type(module), entries(module)) for module in task.modules()]
        self.added: list[set[Entry]] = []

    def done(self) -> None:
        """Record the entries that wrapping added, so that `undo` can remove them."""
        self.added = [entries(module) - before for module, _, before in self.before]

    def undo(self) -> None:
        """Remove the wrappers, even if wrapping failed before `done` was called. Parameters are left unchanged."""
        if not self.added:
            self.done()
        for (module, kind, _), added in zip(self.before, self.added, strict=True):
            # FSDP adds its state_dict hooks in the first forward pass
            late = {
                (name, key) for name, key in entries(module) if key is not None and is_fsdp(vars(module)[name][key])
            }
            for name, number in added | late:
                owner: dict[Any, Any] = vars(module) if number is None else vars(module).get(name, {})
                owner.pop(name if number is None else number, None)
            module.__class__ = kind
            forget_wrapping(module)


def is_fsdp(hook: Any) -> bool:
    """Return whether a hook belongs to FSDP. FSDP's hooks reference a process group and cannot be pickled."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def entries(module: nn.Module) -> set[Entry]:
    """Return the names in a module's `__dict__`, and the keys of any hooks stored in its dicts.

    Other keys in the dicts, such as buffer names, are not returned, because they belong to the task.
    """
    hooks = ((name, value) for name, value in vars(module).items() if isinstance(value, dict))
    numbers = {(name, key) for name, value in hooks for key in value if isinstance(key, int)}
    return numbers | {(name, None) for name in vars(module)}
