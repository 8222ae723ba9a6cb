"""Helpers for the modules in Lightning's module tree: module paths, internal names and placeholders."""

import operator
import platform
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from logging import getLogger
from types import ModuleType
from typing import Any

from .placeholders import make_placeholder

ROOT = __package__ or ""
"""The name of this package. For example, `ROOT.pytorch.callbacks` replaces `lightning.pytorch.callbacks`."""
VERSION = "2.6.6"
"""The version of Lightning that defines these names."""
VERSION_CONSTANT = re.compile(r"_([A-Z]+)_(GREATER_EQUAL|LESS_EQUAL|EQUAL)_(\d+(?:_\d+)*)")
"""Private constants for versions, such as _TORCH_GREATER_EQUAL_2_1."""
WAY_OUT = "It is internal to Lightning, and Legato has no equivalent. Use the public names."
CONSTANTS = {"_IS_INTERACTIVE": hasattr(sys, "ps1"), "_IS_WINDOWS": sys.platform == "win32"}
PASSED_ON = "pytorch", "pytorch.utilities"
"""Packages whose public names programs also import from many other modules of Lightning."""
HELPERS = {"alias_below", "inner_name", "placeholders"}


def alias_below(package: str, paths: str) -> None:
    """Register a package in sys.modules in place of the Lightning modules at the given paths relative to it.

    The package can replace those modules because it defines all of their names without conflicts. This function also
    sets the package's `__all__` to its public names.
    """
    module = sys.modules[package]
    names = [name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    vars(module)["__all__"] = [name for name in names if name not in HELPERS]
    for path in paths.split():
        sys.modules[f"{package}.{path}"] = module
        for name in path.split("."):
            vars(module).setdefault(name, module)


def inner_name(package: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which provides version constants, common names and placeholders.

    Private names become placeholders, as do all names in lightning.fabric, because Legato lacks those classes.
    """
    # programs import many classes of Fabric only for annotations
    any_name = package.startswith(f"{ROOT}.fabric")

    def get(name: str) -> Any:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "pl":
            return import_module(f"{ROOT}.pytorch")
        if name == "log":
            return getLogger("lightning.pytorch")
        if name == "warning_cache":
            return import_module(".rank_zero", ROOT).WarningCache()
        if name.endswith("_AVAILABLE"):
            return find_spec(name.removesuffix("_AVAILABLE").strip("_").lower()) is not None
        constant = VERSION_CONSTANT.fullmatch(name)
        if constant is not None:
            return _compare(*constant.groups())
        for home in PASSED_ON:
            names = vars(import_module(f"{ROOT}.{home}"))
            if name in names.get("__all__", ()):
                return names[name]
        # Python and pickle look up dunder names, and a placeholder class cannot replace other constants
        if name.startswith("__") or name.isupper() or not (any_name or name.startswith("_")):
            raise AttributeError(f"module {package!r} has no public name {name!r}")
        return make_placeholder(package, name, WAY_OUT)

    return get


def placeholders(package: str, names: str, way_out: str) -> list[Any]:
    """Return placeholders for names in a package. Using one raises an error that ends with `way_out`."""
    return [make_placeholder(package, name, way_out) for name in names.split()]


def _compare(package: str, relation: str, number: str) -> bool:
    """Compare the installed version of a package or Python against a version such as "2_1_0"."""
    try:
        installed = platform.python_version() if package == "PYTHON" else version(package.lower())
    except PackageNotFoundError:
        return False
    limit = [int(digits) for digits in number.split("_")]
    parts = [int(digits) for digits in re.findall(r"\d+", installed)[: len(limit)]]
    compare = {"GREATER_EQUAL": operator.ge, "LESS_EQUAL": operator.le, "EQUAL": operator.eq}[relation]
    return bool(compare(parts, limit))
