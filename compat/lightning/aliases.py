"""Private names of Lightning's that programs read and set, as properties over what Legato has."""

from typing import Any


def alias(path: str) -> Any:
    """Return a property that reads and sets an attribute by another name, also one of a part: "folder.name"."""
    *owners, name = path.split(".")

    def owner_of(given: Any) -> Any:
        for owner in owners:
            given = getattr(given, owner)
        return given

    def assign(given: Any, value: Any) -> None:
        setattr(owner_of(given), name, value)

    return property(lambda given: getattr(owner_of(given), name), assign)
