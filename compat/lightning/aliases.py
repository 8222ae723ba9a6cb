"""Properties that map private attributes of Lightning, which programs read and set, to attributes of Legato."""

from typing import Any


def alias(path: str) -> Any:
    """Return a property that reads and sets another attribute; a dotted path names an attribute of a member."""
    *owners, name = path.split(".")

    def owner_of(given: Any) -> Any:
        for owner in owners:
            given = getattr(given, owner)
        return given

    def assign(given: Any, value: Any) -> None:
        setattr(owner_of(given), name, value)

    return property(lambda given: getattr(owner_of(given), name), assign)
