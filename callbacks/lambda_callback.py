"""LambdaCallback: hooks given as functions."""

from collections.abc import Callable
from typing import Any

from ..base.errors import ConfigError, did_you_mean
from . import callback


class LambdaCallback(callback.Callback):
    """Calls the given functions as hooks: `LambdaCallback(on_train_end=lambda trainer, task: print("done"))`."""

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        """Take hooks by name, with the arguments that Callback's methods have. Raises ConfigError for other names."""
        known = [name for name in vars(callback.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
        for name, hook in hooks.items():
            if name not in known:
                raise ConfigError(f"LambdaCallback: there is no hook {name!r}.{did_you_mean(name, known)}")
            if hook is not None:
                setattr(self, name, hook)
