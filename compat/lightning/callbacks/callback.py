"""Callback, the base class for callbacks in programs written for Lightning."""

from collections.abc import Callable
from functools import wraps
from inspect import getmembers, isfunction, signature
from typing import Any

from ....callbacks import callback

ROOM = __package__.rpartition(".")[0]


OUR_NAME, LIGHTNINGS_NAME = "task", "pl_module"
"""The hook parameter that has a different name in Lightning."""
EMPTY_HOOKS: set[Any] = set()
"""Empty hooks of the base class. A run does not call them."""


def with_lightnings_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also accepts its `task` argument under Lightning's name, `pl_module`."""
    parameters = signature(function).parameters.values()

    @wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        if LIGHTNINGS_NAME in named:
            named[OUR_NAME] = named.pop(LIGHTNINGS_NAME)
        return function(*positional, **named)

    renamed = [param.replace(name=LIGHTNINGS_NAME) if param.name == OUR_NAME else param for param in parameters]
    call.__signature__ = signature(function).replace(parameters=renamed)  # type: ignore[attr-defined]
    if function is vars(callback.Callback).get(function.__name__):
        EMPTY_HOOKS.add(call)
    return call


def without_empty(calls: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a hook's calls, leaving out calls to empty hooks. Calls to callbacks are `functools.partial` objects."""
    return tuple(call for call in calls if getattr(getattr(call, "func", None), "__func__", None) not in EMPTY_HOOKS)


class Callback(callback.Callback):
    """A Legato callback with Lightning's attributes, including `log` and `log_dict` during a run."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Rename the method parameters of this package's classes to Lightning's names."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith(ROOM):
            name_parameters(cls)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restore the state when a run is resumed."""  # packages compare their annotation with this one

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a `state_key` composed of the class name and the keyword arguments."""
        return f"{type(self).__qualname__}{kwargs!r}"

    @property
    def _legacy_state_key(self) -> type["Callback"]:
        return type(self)


def name_parameters(cls: type) -> None:
    """Rename the parameters of a class's public methods, including inherited methods, to Lightning's names."""
    for name, method in getmembers(cls, isfunction):
        if not name.startswith("_") and OUR_NAME in signature(method).parameters:
            setattr(cls, name, with_lightnings_names(method))


name_parameters(Callback)
