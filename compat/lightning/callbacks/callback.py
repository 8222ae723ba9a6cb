"""Callback, as programs for Lightning subclass it."""

from collections.abc import Callable
from functools import wraps
from inspect import getmembers, isfunction, signature
from typing import Any

from ....callbacks import callback

ROOM = __package__.rpartition(".")[0]


OUR_NAME, LIGHTNINGS_NAME = "task", "pl_module"
"""The parameter of hooks that Lightning names otherwise."""
EMPTY_HOOKS: set[Any] = set()
"""Hooks that nothing overrides, under Lightning's names for their parameters: a run need not call them."""


def with_lightnings_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also takes its parameter `task` by Lightning's name."""
    parameters = signature(function).parameters.values()

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if LIGHTNINGS_NAME in named:
            named[OUR_NAME] = named.pop(LIGHTNINGS_NAME)
        return function(*given, **named)

    renamed = [one.replace(name=LIGHTNINGS_NAME) if one.name == OUR_NAME else one for one in parameters]
    call.__signature__ = signature(function).replace(parameters=renamed)  # type: ignore[attr-defined]
    if function is vars(callback.Callback).get(function.__name__):
        EMPTY_HOOKS.add(call)
    return call


def without_empty(calls: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the calls of a hook that do something; those of callbacks are partial."""
    return tuple(call for call in calls if getattr(getattr(call, "func", None), "__func__", None) not in EMPTY_HOOKS)


class Callback(callback.Callback):
    """A Legato callback with what programs for Lightning find on one: `log` and `log_dict` while a run is under way."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the parameters of this package's own classes, also in inherited methods, Lightning's names."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith(ROOM):
            name_parameters(cls)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restore the state when a run is resumed."""  # here with Lightning's type, which packages hold theirs against

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a key for `state_key`: the class's name and the given arguments."""
        return f"{type(self).__qualname__}{kwargs!r}"

    @property
    def _legacy_state_key(self) -> type["Callback"]:
        return type(self)


def name_parameters(cls: type) -> None:
    """Give the parameters of a class's public methods, also of those that it inherits, Lightning's names."""
    for name, method in getmembers(cls, isfunction):
        if not name.startswith("_") and OUR_NAME in signature(method).parameters:
            setattr(cls, name, with_lightnings_names(method))


name_parameters(Callback)
