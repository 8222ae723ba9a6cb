"""Callback, as programs for Lightning subclass it."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from ....callbacks import callback
from ....trainer.hooks import CALLBACK_HOOKS

if TYPE_CHECKING:
    from ....tasks.task import Task

ROOM = __package__.rpartition(".")[0]


class Hook:
    """A hook that an object calls with the module as `task` or, as programs for Lightning name it, `pl_module`.

    Asked of a class it is the function itself, so that one which nothing overrides is still known as such.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: Any, kind: Any = None) -> Callable[..., Any]:
        if instance is None:
            return self.function
        bound = self.function.__get__(instance)

        @wraps(bound)
        def call(*arguments: Any, **named: Any) -> Any:
            return bound(*arguments, **{"task" if name == "pl_module" else name: one for name, one in named.items()})

        return call


class Callback(callback.Callback):
    """A Legato callback with what programs for Lightning find on one: `log` and `log_dict` while a run is under way."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the hooks of this package's own classes, also those that they inherit, take `pl_module`."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith(ROOM):
            name_module(cls)

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


def name_module(cls: type) -> None:
    """Let the hooks of a class take `pl_module`, but for those that it leaves to a base that has them already."""
    for name in CALLBACK_HOOKS:
        found = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        if not isinstance(found, Hook):
            setattr(cls, name, Hook(found))


name_module(Callback)
