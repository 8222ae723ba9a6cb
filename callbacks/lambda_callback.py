"""LambdaCallback: a callback whose hooks are functions."""

from collections.abc import Callable
from typing import Any

from ..base.errors import ConfigError, did_you_mean
from . import callback


class LambdaCallback(callback.Callback):
    """Uses functions as hooks: `LambdaCallback(on_train_end=lambda trainer, task: print("done"))`."""

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        """Set hooks by name. Each function takes its hook's arguments. Raises ConfigError for unknown names."""
        names = [name for name in vars(callback.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
        for name, hook in hooks.items():
            if name not in names:
                raise ConfigError(f"LambdaCallback: {name!r} is not a hook of Callback.{did_you_mean(name, names)}")
            if hook is not None:
                setattr(self, name, hook)
