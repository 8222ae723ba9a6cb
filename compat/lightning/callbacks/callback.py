"""Callback, as programs for Lightning subclass it."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import getmembers, isfunction, signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from ....callbacks import callback

if TYPE_CHECKING:
    from ....tasks.task import Task

Kind = TypeVar("Kind")
ROOM = __package__.rpartition(".")[0]


LIGHTNINGS_NAMES = {"task": "pl_module"}
"""Parameters of hooks that Lightning names otherwise."""


def with_lightnings_names(function: FunctionType) -> FunctionType:
    """Return a copy of a function whose parameters have Lightning's names.

    It is the same code, so that it costs no call more; `copy_of` is the function itself, by which a hook that nothing
    overrides is still known as such.
    """

    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(LIGHTNINGS_NAMES.get(name, name) for name in names)

    old = function.__code__
    code = old.replace(co_varnames=renamed(old.co_varnames), co_cellvars=renamed(old.co_cellvars))
    found = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__, found.__doc__ = function.__kwdefaults__, function.__doc__
    found.__module__, found.__qualname__ = function.__module__, function.__qualname__
    annotations = function.__annotations__
    found.__annotations__ = dict(zip(renamed(annotations), annotations.values(), strict=True))
    found.__dict__.update(function.__dict__, copy_of=function)
    return found


class Callback(callback.Callback):
    """A Legato callback with what programs for Lightning find on one: `log` and `log_dict` while a run is under way."""

    names_are_free = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the parameters of this package's own classes, also in inherited methods, Lightning's names."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith(ROOM):
            name_parameters(cls)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restore the state when a run is resumed."""  # here with Lightning's type, which packages hold theirs against

    def set_task(self, task: "Task | None") -> None:
        """Give the callback the task's `log` and `log_dict` for the time of a run."""
        for name in ("log", "log_dict"):
            if task is not None:
                self.__dict__[name] = getattr(task, name)
            else:
                self.__dict__.pop(name, None)

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a key for `state_key`: the class's name and the given arguments."""
        return f"{type(self).__qualname__}{kwargs!r}"

    @property
    def _legacy_state_key(self) -> type["Callback"]:
        return type(self)


def with_optional_arguments(*names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator by which methods of a class may be called with fewer arguments; those left out are None."""

    def decorate(cls: type[Kind]) -> type[Kind]:
        for name in names:
            setattr(cls, name, _with_optional_arguments(getattr(cls, name)))
        return cls

    return decorate


def _with_optional_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(signature(method).parameters)

    @wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        return method(*given, **{**dict.fromkeys(parameters[len(given) :]), **named})

    return call


def name_parameters(cls: type) -> None:
    """Give the parameters of a class's public methods, also of those that it inherits, Lightning's names."""
    for name, method in getmembers(cls, isfunction):
        if not name.startswith("_") and LIGHTNINGS_NAMES.keys() & signature(method).parameters.keys():
            setattr(cls, name, with_lightnings_names(method))


name_parameters(Callback)
