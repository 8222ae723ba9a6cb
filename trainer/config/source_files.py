"""Modules as source text: found as an import would find them, parsed with `ast`, never run."""

import ast
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import cast

from ..errors import did_you_mean


@dataclass(frozen=True)
class Imported:
    """A name that an import statement binds: a module (`name` empty) or a name of a module."""

    module: str
    name: str = ""


Binding = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr | Imported


@dataclass(frozen=True, eq=False)
class Module:
    """The names that one source file binds at its top level."""

    name: str
    package: str
    names: dict[str, Binding]
    stars: tuple[str, ...] = ()
    dynamic: bool = False


ABSOLUTE = Module(name="", package="", names={})
"""The scope of annotations that were read from a living class: every name in it is absolute, or typing's."""


def find_module(name: str) -> ModuleSpec | None:
    """Find a module as an import would, but without importing its parents."""
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        above = find_module(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = list(above.submodule_search_locations)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def parse_expression(text: str) -> ast.expr | None:
    """Parse the text of an annotation; None where it is no expression."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parse_module(name: str, spec: ModuleSpec) -> Module:
    """Parse the source file of a module.

    Raises:
        LookupError: the file is no Python, or cannot be read.
    """
    file = Path(cast(str, spec.origin))
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise LookupError(f"{file}:{error.lineno} is not Python: {error.msg}.") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise LookupError(f"{file} cannot be read: {error}.") from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    names = _bindings(tree.body, package)
    stars = [value.module for key, value in names.items() if key.startswith("*") and isinstance(value, Imported)]
    lazy = _lazy_names(names, package)
    dynamic = "__getattr__" in names and not lazy
    dynamic = dynamic or any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "exec", "vars")
        for node in ast.walk(tree)
    )
    names = {**lazy, **names}
    return Module(name, package, names, tuple(stars), dynamic)


def _lazy_names(names: dict[str, Binding], package: str) -> dict[str, Binding]:
    """The names that this package's own `__init__` files import when first used: `_HOMES` tells from where."""
    homes = names.get("_HOMES")
    if "__getattr__" not in names or not isinstance(homes, ast.Dict):
        return {}
    try:
        return {name: Imported(package + home, name) for name, home in ast.literal_eval(homes).items()}
    except (ValueError, TypeError):
        return {}


def _bindings(body: Sequence[ast.stmt], package: str) -> dict[str, Binding]:
    names: dict[str, Binding] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    names[target.id] = node.value
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = Imported(alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                key = f"*{origin}" if alias.name == "*" else alias.asname or alias.name
                names[key] = Imported(origin, alias.name)
        else:
            # What stands first in an `if` or `try` is what usually holds.
            for part in ("finalbody", "handlers", "orelse", "body"):
                for inner in getattr(node, part, []):
                    names |= _bindings(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], package)
    return names


def submodules(package: str) -> list[str]:
    """The modules in a package, or at the top level where `package` is empty."""
    spec = find_module(package) if package else None
    path = None if not package else list((spec and spec.submodule_search_locations) or [])
    found = [one.name for one in pkgutil.iter_modules(path)]
    if package:
        return found
    # Nobody means opcode; an editable install of this package is not on the path.
    return [name for name in found if name not in sys.stdlib_module_names] + [__name__.partition(".")[0]]


def no_module(owner: str, name: str) -> str:
    """Say that a package has no such module, and which one may be meant."""
    missing = f"{owner}.{name}" if owner else name
    return f"there is no module {missing!r}.{did_you_mean(name, submodules(owner))}"
