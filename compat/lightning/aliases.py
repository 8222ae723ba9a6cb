"""Properties that map Lightning's private attributes, which programs read and set, to Legato's attributes."""

from typing import Any


def alias(path: str) -> Any:
    """Return a property that reads and sets another attribute, whose name may be a dotted path."""
    *owners, name = path.split(".")

    def owner_of(holder: Any) -> Any:
        for owner in owners:
            holder = getattr(holder, owner)
        return holder

    def assign(holder: Any, value: Any) -> None:
        setattr(owner_of(holder), name, value)

    return property(lambda holder: getattr(owner_of(holder), name), assign)
