"""Placeholders: names that can be imported, used as types and subclassed, and whose use raises the way out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...base.errors import LegatoError


class UnsupportedError(LegatoError, NotImplementedError):
    """A part of Lightning that Legato does without; the message says what to do instead."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """An attribute of a part of Lightning that Legato does without; `hasattr` answers False."""


class Placeholder(type):
    """The class of placeholders: calling one, or reading an attribute of it, raises UnsupportedError."""

    way_out: str

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Raise UnsupportedError, also for a subclass."""
        raise UnsupportedError(f"{cls.__name__}: {cls.way_out}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise UnsupportedAttributeError(f"{cls.__name__}.{name}: {cls.way_out}")


def make_placeholder(module: str, name: str, way_out: str) -> Placeholder:
    """Return a placeholder for a name of `module`; `way_out` is the sentence that its use raises."""
    return Placeholder(name, (), {"__module__": module, "__doc__": f"Placeholder: {way_out}", "way_out": way_out})


def inner_part_missing(owner: object, name: str) -> str:
    """Return the message of an AttributeError for an inner part of Lightning's."""
    return (
        f"{type(owner).__name__!r} object has no attribute {name!r}: it is an inner part of Lightning, and Legato has "
        "other ones. Use the public attributes and hooks (docs/from-lightning.md); a package that needs this one runs "
        "under Lightning itself."
    )


def overridden(given: object, names: Iterable[str]) -> list[str]:
    """Return the methods of these names that a program's own class overrides."""
    room = __name__.partition(".")[0]
    own = {name for kind in type(given).__mro__ if kind.__module__.partition(".")[0] != room for name in vars(kind)}
    return sorted(own.intersection(names))


def refuse_overrides(given: object, names: Iterable[str], way_out: str) -> None:
    """Raise UnsupportedError if a program's own class overrides methods that Lightning calls and Legato does not."""
    ignored = overridden(given, names)
    if ignored:
        raise UnsupportedError(f"{type(given).__name__}.{', '.join(ignored)} would never be called: {way_out}")


class OwnParts:
    """An object whose private parts in Lightning have no counterpart; who asks for one is told what to do instead."""

    if not TYPE_CHECKING:  # to a type checker every name would be there

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError for a name that is not there."""
            inner = name.startswith("_") and not name.startswith("__")
            plain = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(inner_part_missing(self, name) if inner else plain, name=name, obj=self)
