"""What the modules of Lightning's tree share: the paths below them, names of inner parts, and placeholders."""

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
"""Name of this package: the module `ROOT.pytorch.callbacks` stands for `lightning.pytorch.callbacks`."""
VERSION = "2.6.6"
"""The version of Lightning whose names these are."""
VERSION_CONSTANT = re.compile(r"_([A-Z]+)_(GREATER_EQUAL|LESS_EQUAL|EQUAL)_(\d+(?:_\d+)*)")
"""Private constants that tell of a version, such as _TORCH_GREATER_EQUAL_2_1."""
WAY_OUT = "It is a part of Lightning's inner workings, and Legato has other ones; use the public names."
CONSTANTS = {"_IS_INTERACTIVE": hasattr(sys, "ps1"), "_IS_WINDOWS": sys.platform == "win32"}
PASSED_ON = "pytorch", "pytorch.utilities"
"""Packages whose public names many modules of Lightning import, so that programs import them from there."""
HELPERS = {"alias_below", "inner_name", "placeholders"}


def alias_below(package: str, paths: str) -> None:
    """Enter a package in sys.modules under the paths of the modules that Lightning has below it.

    The package has the names of all of them, and no two differ, so that one module stands for each. Also sets the
    package's `__all__` to its public names.
    """
    module = sys.modules[package]
    names = [name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    vars(module)["__all__"] = [name for name in names if name not in HELPERS]
    for path in paths.split():
        sys.modules[f"{package}.{path}"] = module
        for name in path.split("."):
            vars(module).setdefault(name, module)


def inner_name(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: constants about versions and packages, common names, and placeholders.

    Private names become placeholders; so does every name below lightning.fabric, whose classes Legato does not have.
    """
    # programs import many classes of Fabric for annotations alone
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
        # Python and pickle ask for dunders, and a constant that is no class cannot stand for one
        if name.startswith("__") or name.isupper() or not (any_name or name.startswith("_")):
            raise AttributeError(f"module {package!r} has no public name {name!r}")
        return make_placeholder(package, name, WAY_OUT)

    return get


def placeholders(package: str, names: str, way_out: str) -> list[Any]:
    """Return a placeholder for each of a package's names; `way_out` is the sentence that its use raises."""
    return [make_placeholder(package, name, way_out) for name in names.split()]


def _compare(package: str, relation: str, number: str) -> bool:
    """Return whether a package's version, or Python's, stands in a relation to a number such as "2_1_0"."""
    try:
        installed = platform.python_version() if package == "PYTHON" else version(package.lower())
    except PackageNotFoundError:
        return False
    limit = [int(digits) for digits in number.split("_")]
    parts = [int(digits) for digits in re.findall(r"\d+", installed)[: len(limit)]]
    compare = {"GREATER_EQUAL": operator.ge, "LESS_EQUAL": operator.le, "EQUAL": operator.eq}[relation]
    return bool(compare(parts, limit))
