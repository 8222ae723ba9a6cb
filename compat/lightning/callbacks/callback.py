"""Callback, as programs for Lightning subclass it."""

from typing import TYPE_CHECKING, Any

from ....callbacks import callback

if TYPE_CHECKING:
    from ....tasks.task import Task


class Callback(callback.Callback):
    """A Legato callback with what programs for Lightning find on one: `log` and `log_dict` while a run is under way."""

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
