"""What torch's composable wrappers do to a task's modules, undone: fully_shard and parallelize_module have no way back.

They give a module another class, hooks, and entries in its `__dict__`; all three are put back as they were.
"""

from typing import Any

from torch import nn
from torch.distributed import _composable_state

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Wrapping:
    """What is about to be done to the modules of a task, and can be undone."""

    def __init__(self, task: nn.Module) -> None:
        """Remember how the modules are now."""
        self.before: list[tuple[nn.Module, type, set[str]]] = []
        for module in task.modules():
            self.before.append((module, type(module), set(module.__dict__)))
        self.hooks: list[dict[str, set[int]]] = [
            {name: set(module.__dict__[name]) for name in HOOKS if name in module.__dict__}
            for module, *_ in self.before
        ]
        self.added: list[tuple[dict[str, Any], list[Any]]] = []

    def done(self) -> None:
        """Remember what was added since, which is what `undo` takes away."""
        for (module, _, names), hooks in zip(self.before, self.hooks, strict=True):
            own = module.__dict__
            self.added.append((own, [name for name in own if name not in names]))
            for name, keys in hooks.items():
                self.added.append((own[name], [key for key in own[name] if key not in keys]))

    def undo(self) -> None:
        """Take the wrappers away; parameters stay as they are."""
        for owner, keys in self.added:
            for key in keys:
                owner.pop(key, None)
        for module, kind, _ in self.before:
            module.__class__ = kind
            _composable_state._module_state_mapping.pop(module, None)
        self.before, self.added = [], []
