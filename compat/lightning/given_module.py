"""The module that a program gives a Trainer: what torch.compile has made of it, and hooks of Lightning 1."""

from typing import Any

from ...tasks.task import Task
from ...trainer.hooks import RENAMED, STEP_NAMES, overrides
from .utilities import given_to_compile


def uncompiled(model: Any) -> Any:
    """Return the module in what torch.compile returned for it, with its forward and its steps compiled."""
    module = given_to_compile(model)
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
"""Hooks that were given the outputs of all batches, and would not be called, by the method that would call them."""


def refuse_old_hooks(method: str, module: Any) -> None:
    """Raise NotImplementedError for a module with such a hook."""
    for name in HOOKS_OF_LIGHTNING_1.get(method, ()):
        if callable(getattr(module, name, None)):
            raise NotImplementedError(
                f"{type(module).__name__}.{name} is a hook of Lightning 1, which Lightning 2 does not call: keep "
                f"outputs in an attribute of the module, and use them in {RENAMED[name]}."
            )
