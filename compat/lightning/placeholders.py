"""Placeholders: names that programs can import, subclass or use as types. Any other use raises an error."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...base.errors import LegatoError


class UnsupportedError(LegatoError, NotImplementedError):
    """Raised for a Lightning feature that Legato does not have. The message suggests an alternative."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """Raised for an attribute of a feature that Legato does not have, so that `hasattr` returns False."""


class Placeholder(type):
    """The metaclass for placeholders. Calling a placeholder or reading its attributes raises UnsupportedError."""

    way_out: str

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Raise UnsupportedError if a program instantiates a placeholder or a subclass of a placeholder."""
        raise UnsupportedError(f"{cls.__name__}: {cls.way_out}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise UnsupportedAttributeError(f"{cls.__name__}.{name}: {cls.way_out}")


def make_placeholder(module: str, name: str, way_out: str) -> Placeholder:
    """Return a placeholder for a name in `module`. Using it raises an error that ends with `way_out`."""
    return Placeholder(name, (), {"__module__": module, "__doc__": f"Placeholder: {way_out}", "way_out": way_out})


def internal_name_message(owner: object, name: str) -> str:
    """Return the message for an AttributeError about a name that is internal to Lightning."""
    return (
        f"{type(owner).__name__!r} object has no attribute {name!r}, which is internal to Lightning and has no "
        "equivalent in Legato. Use the public attributes and hooks (docs/from-lightning.md), or use Lightning to "
        "run packages that need this attribute."
    )


def overridden(owner: object, names: Iterable[str]) -> list[str]:
    """Return the methods in `names` that one of the program's classes overrides."""
    room = __name__.partition(".")[0]
    defined = {name for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] != room for name in vars(kind)}
    return sorted(defined.intersection(names))


def refuse_overrides(instance: object, names: Iterable[str], way_out: str) -> None:
    """Raise UnsupportedError if a program's class overrides methods that Lightning calls but Legato does not."""
    ignored = overridden(instance, names)
    if ignored:
        raise UnsupportedError(f"{type(instance).__name__}.{', '.join(ignored)} would never be called: {way_out}")


class OwnParts:
    """Makes reading a private Lightning attribute raise an AttributeError that says what to use instead."""

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError for an unknown name."""
            inner = name.startswith("_") and not name.startswith("__")
            plain = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(internal_name_message(self, name) if inner else plain, name=name, obj=self)
