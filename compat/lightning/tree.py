"""Modules made from the table of names, so that each of Lightning's public modules can be imported."""

import operator
import platform
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from types import ModuleType
from typing import Any

from .names import EXPORTS, IMPORTED, IMPORTED_BY, INTERNAL, NAMES, VERSION, Entry
from .placeholders import make_placeholder

ROOT = __package__ or ""
"""Name of this package: the module `ROOT.pytorch.callbacks` replaces `lightning.pytorch.callbacks`."""
_INTERNAL = frozenset(INTERNAL.split())
_FILLED = {*NAMES, *EXPORTS, *_INTERNAL} - {""}
ABOVE = {path.rsplit(".", depth)[0] for path in _FILLED for depth in range(1, path.count(".") + 1)}
"""Modules that have modules below them, as paths below ROOT."""
MODULES = _FILLED | ABOVE

CONSTANTS = {"_IS_INTERACTIVE": hasattr(sys, "ps1"), "_IS_WINDOWS": sys.platform == "win32"}
"""Private constants that several modules of Lightning's have."""
VERSION_ASKED = re.compile(r"_([A-Z]+)_(GREATER_EQUAL|LESS_EQUAL|EQUAL)_(\d+(?:_\d+)*)")
"""Private constants that tell of a version, such as _TORCH_GREATER_EQUAL_2_1."""

resolved: dict[str, Entry] = {}
"""The names that the program has asked for, by full path: `pytorch.callbacks.timer.Timer`."""


def find_entry(path: str, name: str) -> tuple[str, Entry] | None:
    """Return the module that defines a name, as a path below ROOT, and the name's entry; None if there is none."""
    if name in NAMES.get(path, {}):
        return path, NAMES[path][name]
    if name not in EXPORTS.get(path, "").split():
        return None
    homes = [home for home, entries in NAMES.items() if name in entries]
    below = [home for home in homes if home.startswith(f"{path}.")] or homes
    return below[0], NAMES[below[0]][name]


def stands_for_lightning() -> bool:
    """Return whether `lightning` means this package in this process."""
    return getattr(sys.modules.get("lightning"), "__name__", None) == ROOT


def lightnings_path(path: str) -> str:
    """Return the shortest path below `lightning` of a public name of this package; any other path as it is."""
    name = path.rpartition(".")[2]
    places = [place for place in {**NAMES, **EXPORTS} if name in names_of(place)]
    public = sorted((place for place in places if place.startswith("pytorch")), key=lambda place: (len(place), place))
    return f"lightning.{public[0]}.{name}" if public else path


def names_of(path: str) -> list[str]:
    """Return the public names of a module, given as a path below ROOT."""
    return sorted({*NAMES.get(path, {}), *EXPORTS.get(path, "").split()})


def resolve(path: str, name: str) -> Any:
    """Return the object of a module's name. Raises AttributeError if the module has no such name."""
    found = find_entry(path, name)
    if found is None:
        inner = f"{path}.{name}" if path else name
        if inner in MODULES:
            return import_module(f"{ROOT}.{inner}")
        found = _passed_on(path, name)
        if found is None:
            module = _imported_from(path, name)
            return _internal(path, name) if module is None else _import(module, name)
    home, entry = found
    resolved[f"{home}.{name}"] = entry
    if not entry.home:
        return make_placeholder(f"{ROOT}.{home}", name, entry.text)
    module, _, attribute = entry.home.partition(":")
    value = getattr(import_module(module, ROOT), attribute or name)
    # not where a program merely imports a name of this package: torch's functions are those of the whole process
    if "torch" in sys.modules and import_module(".stand_in", ROOT).is_installed():
        import_module(".checkpoint_files", ROOT).open_directories()
    return value


def _passed_on(path: str, name: str) -> tuple[str, Entry] | None:
    """Return where a name is defined that a module of Lightning's has only since it imports it; None for others."""
    if path in ABOVE or path.startswith("fabric"):
        return None  # packages list what they pass on; Fabric has classes of its own under the same names
    homes = [home for home, entries in NAMES.items() if name in entries]
    return (homes[0], NAMES[homes[0]][name]) if homes else None


def _imported_from(path: str, name: str) -> str | None:
    """Return the module that defines a name which Lightning's module imports; "" for a module, None for other names."""
    if path in ABOVE:
        return None
    tables = IMPORTED_BY.get(path, {}), IMPORTED
    return next((module for table in tables for module, names in table.items() if name in names.split()), None)


def _import(module: str, name: str) -> Any:
    return getattr(import_module(module), name) if module else import_module(name)


def _internal(path: str, name: str) -> Any:
    """Return the object of a private name, or of any name of an internal module. Raises AttributeError for others."""
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name == "pl":
        return import_module(f"{ROOT}.pytorch")
    if name == "log":
        return getLogger(f"lightning.{path}")
    if name.endswith("_AVAILABLE"):
        return find_spec(name.removesuffix("_AVAILABLE").strip("_").lower()) is not None
    asked = VERSION_ASKED.fullmatch(name)
    if asked is not None:
        return _compare(*asked.groups())
    if name == "warning_cache":
        return import_module(".rank_zero", ROOT).WarningCache()
    inner = path in _INTERNAL or path.startswith("fabric")
    if not inner and (not name.startswith("_") or name.isupper()):
        raise AttributeError(f"module 'lightning{path and '.' + path}' has no public name {name!r}")
    way_out = "It is a part of Lightning's inner workings, and Legato has other ones; use the public names."
    return make_placeholder(f"{ROOT}.{path}", name, way_out)


def _compare(package: str, relation: str, number: str) -> bool:
    """Return whether a package's version, or Python's, stands in a relation to a number such as "2_1_0"."""
    try:
        own = platform.python_version() if package == "PYTHON" else version(package.lower())
    except PackageNotFoundError:
        return False
    wanted = [int(part) for part in number.split("_")]
    found = [int(part) for part in re.findall(r"\d+", own)[: len(wanted)]]
    compare = {"GREATER_EQUAL": operator.ge, "LESS_EQUAL": operator.le, "EQUAL": operator.eq}[relation]
    return bool(compare(found, wanted))


def fill(module_name: str) -> None:
    """Give a module the names that the table has for it, each resolved when it is first used."""
    module, path = sys.modules[module_name], module_name.removeprefix(ROOT).removeprefix(".")

    def get(name: str) -> Any:
        if name.startswith("__") and find_entry(path, name) is None:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value = resolve(path, name)
        setattr(module, name, value)
        return value

    lazy: Callable[[str], Any] = get
    public = [name for name in names_of(path) if not name.startswith("_")]
    module.__dict__.update(__getattr__=lazy, __all__=public, __dir__=lambda: names_of(path), __version__=VERSION)


class Tree(MetaPathFinder, Loader):
    """Finds and fills the modules below ROOT that the table has and that no file defines."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table, else None."""
        below = fullname.removeprefix(f"{ROOT}.")
        if below == fullname or below not in MODULES:
            return None
        return ModuleSpec(fullname, self, origin="legato.compat.lightning.names", is_package=below in ABOVE)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the creation of modules to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a new module."""
        module.__doc__ = f"What `{module.__name__.removeprefix(ROOT.removesuffix('lightning'))}` is on Legato."
        module.__file__ = str(Path(__file__).with_name("__init__.py"))  # programs ask where the package lies
        fill(module.__name__)


if not any(isinstance(finder, Tree) for finder in sys.meta_path):
    sys.meta_path.append(Tree())
