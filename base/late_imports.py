"""Late imports: packages whose public names are imported when they are first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports a name from its module, relative to the package, in `homes`."""

    def get(name: str) -> Any:
        # the import system keeps the module, so a second look-up costs a dictionary's
        if name in homes:
            return getattr(import_module(homes[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
