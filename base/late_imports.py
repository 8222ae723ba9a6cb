"""Late imports: the public names of a package are imported when they are first accessed."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package`. `homes` maps each public name to the relative name of its module."""

    def get(name: str) -> Any:
        # the import system caches the module, so later accesses cost only a dictionary lookup
        if name in homes:
            return getattr(import_module(homes[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
