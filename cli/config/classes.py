"""Finds the arguments of the classes and functions in a config by parsing their source or importing them.

Parsing takes a millisecond per file, so a misspelled key is reported before torch is imported. Finding types, defaults
and the effects of decorators requires an import.
"""

import ast
import inspect
import pkgutil
import sys
import traceback
import typing
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import ConfigError, describe_import, did_you_mean

NO_DEFAULT: Any = object()
"""Placeholder for a missing default, or for a default that is not plain data."""
_UNREAD = frozenset(sys.stdlib_module_names) | {"numpy", "torch", "torchmetrics", "torchvision"}
"""Packages that are too large to parse or have no source."""
_UNREADABLE = (ImportError, AttributeError, ValueError, SyntaxError, OSError, RecursionError, MemoryError)


# --- from source files ------------------------------------------------------------------------------------------------
def argument_names(path: str) -> list[str] | None:
    """Return the argument names of the class or function at a dotted path, or None if the source does not show them."""
    try:
        return _arguments_in(*_locate(path))
    except _UNREADABLE:
        return None


def _arguments_in(file: Path, module: str, name: str) -> list[str] | None:
    # parsed, not imported: none of the module's code runs
    names = _bindings(ast.parse(file.read_bytes()).body, module, file.name == "__init__.py")
    bound = names.get(name)
    if isinstance(bound, str):  # imported from elsewhere
        return argument_names(bound)
    if isinstance(bound, ast.FunctionDef):
        return None if bound.decorator_list or bound.args.kwarg else _of_function(bound)
    if not isinstance(bound, ast.ClassDef):
        return None
    decorators = {ast.unparse(node).partition("(")[0].rpartition(".")[2] for node in bound.decorator_list}
    methods = {node.name: node for node in bound.body if isinstance(node, ast.FunctionDef)}
    # a decorator, __new__ or a metaclass may take any arguments
    if not decorators <= {"dataclass", "final"} or "__new__" in methods or bound.keywords:
        return None
    init, arguments = methods.get("__init__"), list[str]()
    if init is not None:
        arguments = _of_function(init)[1:]  # leave out self
        if init.args.kwarg is None:
            return arguments
        # otherwise the source does not show which arguments **kwargs may contain
        if f"super().__init__(**{init.args.kwarg.arg})" not in ast.unparse(init):
            return None
    elif "dataclass" in decorators:
        fields = [node for node in bound.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        kept = [node for node in fields if "ClassVar" not in ast.unparse(node.annotation)]
        arguments = [ast.unparse(node.target) for node in kept]
    if not bound.bases:
        return arguments
    # only the first base class: the arguments of other bases cannot be determined here
    top, *rest = ast.unparse(bound.bases[0]).partition("[")[0].split(".")
    home = names.get(top, f"{module}.{top}")
    if isinstance(home, ast.ClassDef):
        inherited = _arguments_in(file, module, top) if top != name else None
    else:
        inherited = argument_names(".".join([home, *rest])) if isinstance(home, str) else None
    return None if inherited is None else [*dict.fromkeys(inherited + arguments)]


def _of_function(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


_Bound = ast.ClassDef | ast.FunctionDef | str | None


def _bindings(body: Sequence[ast.stmt], module: str, is_package: bool) -> dict[str, _Bound]:
    """Map each name in a module to its class, function or imported dotted path, or to None."""
    names: dict[str, _Bound] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
            home = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names |= {alias.asname or alias.name: f"{home}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):  # includes `if TYPE_CHECKING:`, where this package's lazy imports are
            names |= _bindings(node.body, module, is_package)
    return names


def _locate(path: str) -> tuple[Path, str, str]:
    """Return a path's module file, module name and name within the module. Raises ImportError if there is no module."""
    top, *parts = path.split(".")
    spec = None if top in _UNREAD else find_spec(top)  # imports nothing for a top-level name
    for index, part in enumerate(parts):
        folders = spec.submodule_search_locations if spec is not None else None
        inner = PathFinder.find_spec(f"{spec.name}.{part}", folders) if spec is not None and folders else None
        if inner is None:
            if spec is None or spec.origin is None or index != len(parts) - 1:
                break
            return Path(spec.origin), spec.name, part
        spec = inner
    raise ImportError(path)


# --- by an import -----------------------------------------------------------------------------------------------------
class Parameter(NamedTuple):
    """An argument of a class or function."""

    type: Any
    default: Any
    required: bool


class Signature(NamedTuple):
    """Arguments of a class or function. `open` is True if it also accepts other arguments."""

    parameters: Mapping[str, Parameter]
    open: bool = False


def signature_of(target: Any) -> Signature:
    """Return the parameters of a class or function, including those of base classes that receive its `**kwargs`."""
    try:
        arguments = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # the class is implemented in C
        return Signature({}, True)
    # hints of __init__; inspect.signature also covers __new__, partials and wrappers
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # evaluating an annotation runs arbitrary code
        hints = {}
    parameters = {}
    for arg in arguments:
        if arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY):
            required, kind = arg.default is arg.empty, hints.get(arg.name, Any)
            kind = kind if isinstance(kind, type) or typing.get_origin(kind) is not None else Any  # not a module
            if arg.default is None and kind is not Any:
                kind = typing.Optional[kind]  # noqa: UP045  (X | None fails for a quoted X)
            parameters[arg.name] = Parameter(kind, NO_DEFAULT if required else plain(arg.default), required)
    if not any(arg.kind is arg.VAR_KEYWORD for arg in arguments):
        return Signature(parameters)
    if "super().__init__(**" not in (_source_of(function) if isinstance(target, type) else ""):
        return Signature(parameters, True)
    # the class that defines __init__, since the next class above gets the **kwargs
    owner = next(index for index, base in enumerate(target.__mro__) if "__init__" in base.__dict__)
    above = next((base for base in target.__mro__[owner + 1 :] if "__init__" in base.__dict__), object)
    inherited = signature_of(above) if above is not object else Signature({})
    return Signature({**inherited.parameters, **parameters}, inherited.open)


def _source_of(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def plain(value: Any) -> Any:
    """Return a value with tuples as lists, or NO_DEFAULT if YAML cannot represent the value."""
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return NO_DEFAULT if any(item is NO_DEFAULT for item in items) else items
    if isinstance(value, dict):
        pairs = {name: plain(item) for name, item in value.items()}
        fits = all(isinstance(name, str) and item is not NO_DEFAULT for name, item in pairs.items())
        return pairs if fits else NO_DEFAULT
    return value if value is None or type(value) in (bool, int, float, str) else NO_DEFAULT


def load(path: str) -> Any:
    """Import and return the object at a dotted path. Raises ConfigError with the reason if the import fails."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{path!r} is not a dotted path to a class, such as 'package.module.Class'.")
    size, module = 0, None
    for size in range(1, len(parts) + 1):
        name = ".".join(parts[:size])
        try:
            module = import_module(name)
        except (Exception, SystemExit) as error:  # a module's code may raise any exception
            # a failed import in the module is a bug in the module, not a wrong path
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                raise ConfigError(f"importing {name!r} failed: {_blame(error)}") from error
            break
    else:
        raise ConfigError(f"{path!r} is a module, not a class.")
    if module is None:
        # omits the standard library, which is rarely meant; adds this package, which an editable install hides
        modules = {__name__.partition(".")[0], *(m.name for m in pkgutil.iter_modules())} - sys.stdlib_module_names
        raise ConfigError(f"there is no module {parts[0]!r}.{did_you_mean(parts[0], modules)}")
    rest, owner = parts[size - 1 :], module.__name__
    try:
        return reduce(getattr, rest, module)
    except AttributeError as error:
        inner = [submodule.name for submodule in pkgutil.iter_modules(getattr(module, "__path__", ()))]
        if len(rest) > 1 and hasattr(module, "__path__"):
            raise ConfigError(f"there is no module '{owner}.{rest[0]}'.{did_you_mean(rest[0], inner)}") from error
        names = [*getattr(module, "__all__", dir(module)), *inner]
        raise ConfigError(f"module {owner!r} has no {rest[0]!r}.{did_you_mean(rest[0], names)}") from error
    except (Exception, SystemExit) as error:  # from a module with lazy imports, such as transformers
        raise ConfigError(f"importing {path!r} failed: {_blame(error)}") from error


def _blame(error: BaseException) -> str:
    """Describe an error, its cause, and the line that raised it."""
    places = [f" ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places = [f" ({error.filename}:{error.lineno})"]
    return f"{describe_import(error)}{''.join(places[-1:])}."
