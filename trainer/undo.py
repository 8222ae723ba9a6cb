"""Undo actions of a run, and its errors: every action runs, and the first error is kept."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from ..base.errors import add_note

T = TypeVar("T")
log = logging.getLogger("legato")


class Errors:
    """The first error of a run; those that come after it are added to it as notes."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def attempt(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` and record what it raises, interrupts and exits included."""
        try:
            function(*arguments)
        except BaseException as error:  # each of the others still has to be called
            self.add(error, f"while {name_of(function)} was called")

    def add(self, error: BaseException, when: str) -> None:
        """Record an error."""
        if self.first is None:
            self.first = error
        elif error is not self.first:
            note = f"After that, {when}: {type(error).__name__}: {error}"
            add_note(self.first, note)
            if not isinstance(self.first, Exception):  # an exit or an interrupt is shown without its notes
                log.warning("%s", note)


def name_of(function: Callable[..., object]) -> str:
    """Return a function's qualified name; of a method with the class of its object."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", repr(function))
    return name if owner is None else f"{type(owner).__name__}.{name}"


class Undo:
    """Undoes what a run changed, in reverse order; unlike ExitStack it keeps the first error and not the last."""

    def __init__(self) -> None:
        self.actions: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` when the run is closed."""
        self.actions.append((function, arguments))

    def enter_context(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that is left when the run is closed."""
        entered = context.__enter__()
        # without the run's error: a context must undo, not suppress it
        self.actions.append((context.__exit__, (None, None, None)))
        return entered

    def close(self, errors: Errors) -> None:
        """Run all actions; record failures in `errors`."""
        while self.actions:
            function, arguments = self.actions.pop()
            errors.attempt(function, *arguments)
