"""Undoing torch's composable wrappers: fully_shard and parallelize_module cannot be undone themselves.

They give a module another class, hooks, and entries in its `__dict__`; all three are put back as they were.
"""

from typing import Any

from torch import nn

from ....base.torch_private import forget_wrapping

Entry = tuple[str, int | None]
"""A name in a module's `__dict__`, or a name there and the number of a hook in the dict that it has."""


class Wrapping:
    """Record of a task's modules before they are wrapped, so that the wrappers can be removed."""

    def __init__(self, task: nn.Module) -> None:
        """Remember how the modules are now."""
        self.before = [(module, type(module), entries(module)) for module in task.modules()]
        self.added: list[set[Entry]] = []

    def done(self) -> None:
        """Remember what was added since, which is what `undo` takes away."""
        self.added = [entries(module) - before for module, _, before in self.before]

    def undo(self) -> None:
        """Take the wrappers away; parameters stay as they are."""
        for (module, kind, _), added in zip(self.before, self.added, strict=True):
            # FSDP adds those around state_dict in the first forward
            late = {
                (name, key) for name, key in entries(module) if key is not None and is_fsdp(vars(module)[name][key])
            }
            for name, number in added | late:
                owner: dict[Any, Any] = vars(module) if number is None else vars(module).get(name, {})
                owner.pop(name if number is None else number, None)
            module.__class__ = kind
            forget_wrapping(module)


def is_fsdp(hook: Any) -> bool:
    """Return whether a hook is torch's own for sharded modules; it holds a process group, and cannot be pickled."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def entries(module: nn.Module) -> set[Entry]:
    """Return the names in a module's `__dict__`, and the numbers of the hooks in each dict there.

    Other keys (of buffers, say) are the task's own, also where it has added them meanwhile.
    """
    hooks = ((name, value) for name, value in vars(module).items() if isinstance(value, dict))
    numbers = {(name, key) for name, value in hooks for key in value if isinstance(key, int)}
    return numbers | {(name, None) for name in vars(module)}
