"""Checks the module that a program passes to a Trainer. The module may be compiled or use Lightning 1 hooks."""

from typing import Any

from ...tasks.task import Task
from ...trainer.hooks import RENAMED, STEP_NAMES, overrides
from .utilities import original_module


def uncompiled(model: Any) -> Any:
    """If `model` was created by torch.compile, return its original module with compiled forward and step methods."""
    module = original_module(model)
    if not isinstance(module, Task):
        return model
    for name in ("forward", *STEP_NAMES):
        if name not in vars(module) and overrides(module, Task, name):
            setattr(module, name, model.dynamo_ctx(getattr(module, name)))
    return module


HOOKS_OF_LIGHTNING_1 = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
}
"""Hooks of Lightning 1 that receive the outputs of all batches, by the Trainer method that would have called them."""


def refuse_old_hooks(method: str, module: Any) -> None:
    """Raise NotImplementedError if a module uses a Lightning 1 hook."""
    for name in HOOKS_OF_LIGHTNING_1.get(method, ()):
        if callable(getattr(module, name, None)):
            raise NotImplementedError(
                f"{type(module).__name__}.{name} is a hook from Lightning 1, which Lightning 2 does not call. Store "
                f"outputs in an attribute of the module, and use them in {RENAMED[name]}."
            )
