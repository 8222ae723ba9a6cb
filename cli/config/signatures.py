"""Parameters of classes and functions, read from source files that are found as an import finds them and only parsed.

Where the source does not determine them (a decorated class, a class made by a function), the class is imported.
"""

import ast
import builtins
import functools
import inspect
import pkgutil
import re
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, Optional, cast

from ...base.arguments import argument_texts
from ...base.errors import ConfigError, did_you_mean
from .check import class_path

_PACKAGE = __name__.partition(".")[0]
NO_DEFAULT: Any = object()
"""Default of a parameter without one, or whose default is not plain data."""
# Large packages, none of which defines a Task, DataModule, Callback or Logger.
_UNREAD = frozenset(sys.stdlib_module_names) | {"numpy", "torch", "torchmetrics", "torchvision"}
# Bases whose __init__ has no parameters that a config could set.
_ROOTS = {
    "object",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
    "torch.nn.Module",
    "torch.nn.modules.module.Module",
}
_HARMLESS_DECORATORS = {"typing.final", "typing.runtime_checkable", "functools.total_ordering", "dataclasses.dataclass"}
_NOT_BUILT = {"typing.TypedDict", "typing.Protocol", "typing.NamedTuple", "enum.Enum", "enum.IntEnum", "enum.StrEnum"}
ANYTHING = "object"
"""Path of the class that every `_target_` descends from: an argument without an annotation takes any."""
_MAX_ALIASES = 30  # of aliases; more is a circle
_NAME_MAKERS = frozenset({"globals", "exec", "vars"})
"""Functions that can define a module's names at run time."""
_WRAPPERS = (typing.Annotated, typing.Final, typing.ClassVar)


class Named:
    """Placeholder for a class that was not imported. `exact`: its source was read, so plain values are rejected."""

    path = ""
    exact = False


@functools.cache
def placeholder(path: str, exact: bool) -> type[Named]:
    """Return the placeholder for the class at a dotted path."""
    return type(path, (Named,), {"path": path, "exact": exact})


Binding = ast.stmt | ast.expr | tuple[str, str]
"""The statement or expression that a name is bound to; for an import, the module and the name in it (or "")."""


@dataclass(frozen=True, eq=False)
class Module:
    """Top-level names of one source file; `dynamic`: it may define others at run time."""

    name: str
    names: dict[str, Binding]
    stars: Sequence[str]
    dynamic: bool


@dataclass(frozen=True, eq=False)
class Definition:
    """Definition of a name. `path` is where it is defined; "foreign" means that its source was not read."""

    kind: Literal["class", "function", "module", "value", "foreign", "missing"]
    path: str
    module: Module | None = None
    node: Any = None

    @property
    def docstring(self) -> str:
        """Docstring of a class, without its indentation."""
        return ast.get_docstring(self.node) or "" if self.kind == "class" else ""


@dataclass(frozen=True)
class Parameter:
    """Parameter of a class. `annotation` is an expression in `module`, or a type where there is no module."""

    name: str
    annotation: Any
    default: Any
    required: bool
    module: Module | None = None
    doc: str = ""

    def __str__(self) -> str:
        kind = ast.unparse(self.annotation).strip("'") if isinstance(self.annotation, ast.expr) else "Any"
        kind = re.sub(r"Annotated\[(\w+), Range\([^)]*\)\]", r"\1", kind)
        return f"{self.name}: {kind} = {'none' if self.default is NO_DEFAULT else repr(self.default)}"


@dataclass
class Signature:
    """Parameters of a class. `open`: it accepts other keyword arguments, too."""

    parameters: dict[str, Parameter] = field(default_factory=dict)
    open: bool = False


class Sources:
    """Cache of parsed source files and signatures; each config has its own, since files change between configs."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}
        self._modules: dict[str, Module | None] = {}
        self._signatures: dict[str, Signature | None] = {}

    def spec(self, name: str) -> ModuleSpec | None:
        """Find a module as an import would, but without importing its parents."""
        if name not in self._specs:
            parent = name.rpartition(".")[0]
            above = self.spec(parent) if parent else None
            path = list(above.submodule_search_locations or []) if above is not None else None
            # a finder asked with path None searches sys.path, and would find a top-level module of the submodule's last
            # name
            finders = sys.meta_path if path or not parent else []
            self._specs[name] = next((one for each in finders if (one := each.find_spec(name, path)) is not None), None)
        return self._specs[name]

    def split(self, path: str) -> tuple[str, list[str]]:
        """Split a dotted path into the module that it begins with and the names in it."""
        parts = path.split(".")
        depth = 0
        while depth < len(parts) and self.spec(".".join(parts[: depth + 1])) is not None:
            depth += 1
        return ".".join(parts[:depth]), parts[depth:]

    def read(self, name: str) -> Module | None:
        """Parse a module; None where it has no source to read. Raises LookupError where the source is not Python."""
        if name not in self._modules:
            self._modules[name] = None
            spec = None if name.partition(".")[0] in _UNREAD else self.spec(name)
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                self._modules[name] = _parse_module(name, spec)
        return self._modules[name]

    def locate(self, path: str, functions: bool = False) -> Definition:
        """Find the class at a dotted path; kind "foreign" where its source was not read.

        functions: find a function, too. Raises LookupError where there is nothing of the kind; the message says why.
        """
        if "." not in path or not all(part.isidentifier() for part in path.split(".")):
            raise LookupError(f"{path!r} is not a dotted path to a class, such as 'package.module.Class'.")
        (owner, names), found = self.split(path), self._follow(self.find(path))
        if not names:
            raise LookupError(f"{path!r} is a module, not a class.")
        module = self.read(owner) if owner else None
        lost = found.kind == "missing" or (module is None and owner.partition(".")[0] not in _UNREAD)
        if not owner or (lost and len(names) > 1):
            missing = f"{owner}.{names[0]}" if owner else names[0]
            raise LookupError(f"there is no module {missing!r}.{did_you_mean(names[0], self._submodules(owner))}")
        if found.kind == "missing":
            known = {*(module.names if module is not None else ()), *self._submodules(owner)}
            raise LookupError(f"module {owner!r} has no {names[0]!r}.{did_you_mean(names[0], known)}")
        if found.kind not in ("class", "foreign", *(["function"] if functions else [])):
            raise LookupError(f"{path!r} is a {found.kind}, not a class{' or function' if functions else ''}.")
        return found

    def _submodules(self, package: str) -> list[str]:
        """Return the modules in a package, or at the top level where `package` is empty."""
        if package:
            spec = self.spec(package)
            return [one.name for one in pkgutil.iter_modules((spec and spec.submodule_search_locations) or [])]
        # Nobody means opcode; an editable install of this package is not on the path.
        return sorted({_PACKAGE, *(one.name for one in pkgutil.iter_modules())} - sys.stdlib_module_names)

    def find(self, path: str) -> Definition:
        """Return the definition at a dotted path, without following aliases."""
        owner, names = self.split(path)
        if not names:
            return Definition("module", path)
        module = self.read(owner) if owner else None
        return Definition("foreign", path) if module is None else self._find_in(module, names)

    def _find_in(self, module: Module, names: Sequence[str]) -> Definition:
        """Return the definition of `names`, joined by dots, in a module."""
        path, binding, inner = ".".join([module.name, *names]), module.names.get(names[0]), names[1:]
        if isinstance(binding, tuple):
            try:
                return self.find(".".join([*filter(None, binding), *inner]))
            except RecursionError:  # modules that import a name from each other
                return Definition("foreign", path)
        if binding is None:
            if self.spec(f"{module.name}.{names[0]}") is not None:
                return self.find(path)
            found = (self.find(".".join([star, *names])) for star in module.stars)
            missing = Definition("foreign" if module.dynamic else "missing", path)
            return next((one for one in found if one.kind != "missing"), missing)
        if isinstance(binding, ast.expr) and inner:
            owner = self._follow(self._resolve(module, binding)).path
            return self.find(".".join([owner, *inner]))
        node: Any = binding
        for name in inner:
            nested = [one for one in node.body if isinstance(one, ast.ClassDef) and one.name == name]
            if not nested:
                return Definition("foreign", path)
            node = nested[0]
        kinds: Any = {ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
        return Definition(kinds.get(type(node), "value"), path, module, node)

    def _resolve(self, module: Module, node: ast.AST) -> Definition:
        """Return the definition of an expression in a module: a name, a dotted name, a generic such as `Base[int]`."""
        if isinstance(node, ast.Subscript):
            return self._resolve(module, node.value)
        if isinstance(node, ast.Constant) and (quoted := _parsed(node.value)) is not None:
            return self._resolve(module, quoted)
        if not isinstance(node, ast.Name | ast.Attribute):
            return Definition("foreign", "?")
        names = ast.unparse(node).split(".")
        found = self._find_in(module, names)
        builtin = found.kind == "missing" and hasattr(builtins, names[0])
        return Definition("foreign", ".".join(names)) if builtin else found

    def _follow(self, found: Definition) -> Definition:
        """Follow aliases such as `Base = other.Base` to a definition; any other value is "foreign"."""
        for _ in range(_MAX_ALIASES):
            if found.kind != "value" or isinstance(found.node, ast.Constant):
                return found
            found = self._resolve(cast(Module, found.module), found.node)
        return Definition("foreign", found.path)

    def lineage(self, found: Definition) -> list[Definition]:
        """Return the class and all its bases in method resolution order (diamonds: as C3 in the usual cases)."""
        line = [found]
        for base in found.node.bases if found.kind == "class" else ():
            above = self._follow(self._resolve(cast(Module, found.module), base))
            # `class Task(Task)` hides the name that it was imported by.
            line += self.lineage(above) if above.path != found.path else [Definition("foreign", "?")]
        return [one for index, one in enumerate(line) if one.path not in {later.path for later in line[index + 1 :]}]

    def is_subclass(self, path: str, expected: str, functions: bool = False) -> bool | None:
        """Return whether a class is a subclass of `expected`; None if unknown. Raises LookupError for no class."""
        line = self.lineage(self.locate(path, functions))
        if expected == ANYTHING or any(one.path == expected for one in line):
            return True
        if line[0].kind == "function":
            return None
        ours, top = expected.startswith(f"{_PACKAGE}."), line[0].path.partition(".")[0]
        known = all(one.kind == "class" or one.path in _ROOTS for one in line) or (ours and top in _UNREAD)
        return False if known else None

    def signature(self, path: str, may_import: bool = False) -> Signature | None:
        """Return the parameters of what is at a path; None where only an import can tell, and it is not allowed.

        Raises LookupError where there is no class or function, ConfigError where its module cannot be imported.
        """
        # None is not kept: an import may be allowed the next time
        if self._signatures.get(path) is None:
            found = self._signature(self.lineage(self.locate(path, functions=True)))
            self._signatures[path] = inspected(load_target(path)) if found is None and may_import else found
        return self._signatures[path]

    def _signature(self, line: Sequence[Definition]) -> Signature | None:
        for index, one in enumerate(line):
            if one.kind == "function" and not one.node.decorator_list:
                return self._of_function(cast(Module, one.module), one.node)
            if one.kind != "class":
                if one.path in _ROOTS:
                    continue
                return None
            module = cast(Module, one.module)
            decorators = {
                self._follow(self._resolve(module, node.func if isinstance(node, ast.Call) else node)).path
                for node in one.node.decorator_list
            }
            methods = {node.name: node for node in one.node.body if isinstance(node, ast.FunctionDef)}
            if not decorators <= _HARMLESS_DECORATORS or ("__new__" in methods and "__init__" not in methods):
                return None
            if "__init__" in methods:
                return self._of_function(module, methods["__init__"], line[index + 1 :], own=1)
            if "dataclasses.dataclass" in decorators:
                return self._of_dataclass(line[index:])
        return Signature()

    def _of_function(
        self, module: Module, node: ast.FunctionDef, bases: Sequence[Definition] = (), own: int = 0
    ) -> Signature | None:
        """Return the parameters of a function without the first `own`; it may pass more to `__init__` of `bases`."""
        given = node.args
        plain = [*given.posonlyargs, *given.args]
        defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults, *given.kw_defaults]
        found = {
            one.arg: Parameter(one.arg, one.annotation, _plain_of(default), default is None, module)
            for one, default in list(zip([*plain, *given.kwonlyargs], defaults, strict=True))[own:]
        }
        if given.kwarg is None:
            return Signature(found)
        call = _passed_on(node, given.kwarg.arg)
        if call is None:
            return Signature(found, open=True)
        inherited = self._signature(bases)
        if inherited is None:
            return None
        set_here = {keyword.arg for keyword in call.keywords} | {*list(inherited.parameters)[: len(call.args)], *found}
        passed = {name: one for name, one in inherited.parameters.items() if name not in set_here}
        return Signature(found | passed, inherited.open)

    def _of_dataclass(self, line: Sequence[Definition]) -> Signature | None:
        if any(one.kind != "class" and one.path not in _ROOTS for one in line):
            return None
        owners = [one for one in reversed(line) if one.kind == "class"]
        return Signature({one.name: one for owner in owners for one in self._fields(owner)})

    def _fields(self, owner: Definition) -> Iterator[Parameter]:
        module, body = cast(Module, owner.module), owner.node.body
        for node, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if self._resolve(module, node.annotation).path == "typing.ClassVar":
                continue
            default, required = node.value, node.value is None
            if isinstance(default, ast.Call) and self._resolve(module, default.func).path == "dataclasses.field":
                options = {keyword.arg: keyword.value for keyword in default.keywords}
                if _plain_of(options.get("init")) is False:
                    continue
                default, required = options.get("default"), not options.keys() & {"default", "default_factory"}
            text = following.value if isinstance(following, ast.Expr) else None
            doc = inspect.cleandoc(str(text.value)) if isinstance(text, ast.Constant) else ""
            yield Parameter(node.target.id, node.annotation, _plain_of(default), required, module, doc)

    # --- annotations ---
    def type_of(self, parameter: Parameter) -> Any:
        """Return the type of a parameter, Any if unknown; optional where the default is None."""
        found = Any if parameter.annotation is None else parameter.annotation
        if isinstance(found, ast.expr):
            found = self._type(found, cast(Module, parameter.module), frozenset())
        try:
            hash(found)
            return Optional[found] if parameter.default is None and found is not Any else found  # noqa: UP045
        except TypeError:  # it is not a type
            return Any

    def _type(self, node: ast.expr, module: Module, aliases: frozenset[str]) -> Any:
        """Evaluate an annotation, with placeholders for all classes outside the standard library."""
        inner = functools.partial(self._type, module=module, aliases=aliases)
        try:
            if isinstance(node, ast.Constant):
                quoted = _parsed(node.value)
                return node.value if node.value in (None, ...) else Any if quoted is None else inner(quoted)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                return typing.Union[inner(node.left), inner(node.right)]  # noqa: UP007
            if isinstance(node, ast.Subscript):
                generic = inner(node.value)
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                if generic is Literal:
                    values = tuple(value for one in parts if (value := _plain_of(one)) is not NO_DEFAULT)
                    return Literal[values] if values else Any
                if generic in _WRAPPERS:
                    return inner(parts[0])
                if generic is Any or (isinstance(generic, type) and issubclass(generic, Named)):
                    return generic
                arguments = tuple(map(inner, parts))
                return generic[arguments[0] if len(arguments) == 1 else arguments]
            if not isinstance(node, ast.Name | ast.Attribute):
                return Any
            found = self._resolve(module, node)
            if found.kind == "value":
                known = found.path in aliases
                return Any if known else self._type(found.node, cast(Module, found.module), aliases | {found.path})
            if found.kind == "class":
                not_built = {one.path for one in self.lineage(found)} & _NOT_BUILT
                return Any if not_built else placeholder(found.path, True)
            return _known_type(found.path) if found.kind == "foreign" else Any
        except (TypeError, LookupError):  # no type; or of a module that cannot be read
            return Any


def _known_type(path: str) -> Any:
    """Return a type of the standard library, Any for one that no config value can have; else a placeholder."""
    home, _, name = path.rpartition(".")
    home = "typing" if home == "typing_extensions" else home or "builtins"
    if home in ("builtins", "typing", "collections", "collections.abc", "pathlib", "datetime", "os"):
        found = getattr(import_module(home), name, Any)
        return found if isinstance(found, type) or home == "typing" else Any
    return Any if path.partition(".")[0] in sys.stdlib_module_names else placeholder(path, False)


# --- modules ----------------------------------------------------------------------------------------------------------
def load_class(path: str) -> type:
    """Import the class at a dotted path. Raises ConfigError where there is none; the message says why."""
    found = load_target(path)
    if not isinstance(found, type):
        raise ConfigError(f"{path!r} is not a class.")
    return found


def load_target(path: str) -> Any:
    """Import what is at a dotted path.

    Raises ConfigError where there is nothing, or its module cannot be imported; the message says why.
    """
    module, names = Sources().split(path)
    if not module:
        raise ConfigError(f"there is no module {path.partition('.')[0]!r}.")
    try:
        found: Any = functools.reduce(getattr, names, import_module(module))
    except (Exception, SystemExit) as error:  # module-level code raises any kind
        loaded = sys.modules.get(module)
        if isinstance(error, AttributeError) and loaded is not None and not hasattr(loaded, names[0]):
            hint = did_you_mean(names[0], dir(loaded))
            raise ConfigError(f"module {module!r} has no {names[0]!r}.{hint}") from error
        raise ConfigError(f"importing {module!r} failed: {_blame(error)}") from error
    return found


def _blame(error: BaseException) -> str:
    """Return the error and the line that raised it."""
    places = [f" ({one.filename}:{one.lineno})" for one in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places = [f" ({error.filename}:{error.lineno})"]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{''.join(places[-1:])}."


def _parse_module(name: str, spec: ModuleSpec) -> Module:
    file = Path(cast(str, spec.origin))
    try:
        source = file.read_bytes()
        tree = ast.parse(source, str(file))
    except SyntaxError as error:
        raise LookupError(f"{file}:{error.lineno} is not Python: {error.msg}.") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise LookupError(f"{file} cannot be read: {error}.") from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    names = _bindings(tree.body, package)
    stars = [binding[0] for key, binding in names.items() if key.startswith("*") and isinstance(binding, tuple)]
    # This package's own __init__ files import names when they are first used: _HOMES tells from where.
    homes = _plain_of(names.get("_HOMES"))
    lazy = {one: (package + home, one) for one, home in homes.items()} if isinstance(homes, dict) else {}
    # a walk takes as long as the parsing, and few sources have such a word
    nodes = ast.walk(tree) if any(maker.encode() in source for maker in _NAME_MAKERS) else ()
    dynamic = ("__getattr__" in names and not lazy) or any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAME_MAKERS
        for node in nodes
    )
    return Module(name, {**lazy, **names}, stars, dynamic)


def _bindings(body: Sequence[ast.AST], package: str) -> dict[str, Binding]:
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
                names[alias.asname or top] = (alias.name if alias.asname else top, "")
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                names[f"*{origin}" if alias.name == "*" else alias.asname or alias.name] = (origin, alias.name)
        else:
            # The first branch of an `if` or `try` is the one that usually holds, so it is read last.
            for part in ("finalbody", "handlers", "orelse", "body"):
                names |= _bindings(getattr(node, part, []), package)
    return names


# --- expressions ------------------------------------------------------------------------------------------------------
def _parsed(text: object) -> ast.expr | None:
    """Parse a quoted annotation; None where it is not an expression."""
    try:
        return ast.parse(text.strip(), mode="eval").body if isinstance(text, str) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _passed_on(node: ast.FunctionDef, name: str) -> ast.Call | None:
    """Return the call of `super().__init__` that receives `**name`, if that is its only use."""
    uses = [one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name]
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super("):
            is_init = isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"
            if is_init and len(uses) == 1 and any(one.arg is None and one.value in uses for one in call.keywords):
                return call
    return None


def _plain_of(node: Any) -> Any:
    """Return the value of an expression as plain data; NO_DEFAULT where YAML cannot hold it."""
    try:
        return _as_plain(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, AttributeError):
        return NO_DEFAULT


def _as_plain(value: Any) -> Any:
    """Return a value with lists for tuples; NO_DEFAULT where YAML cannot hold it."""
    if isinstance(value, list | tuple):
        items = [_as_plain(item) for item in value]
        return NO_DEFAULT if NO_DEFAULT in items else items
    if isinstance(value, dict):
        pairs = {name: _as_plain(item) for name, item in value.items()}
        fits = all(isinstance(name, str) for name in pairs) and NO_DEFAULT not in pairs.values()
        return pairs if fits else NO_DEFAULT
    return value if value is None or isinstance(value, bool | int | float | str) else NO_DEFAULT


def inspected(target: Any) -> Signature:
    """Return the parameters of an imported class or function."""
    try:
        parameters = inspect.signature(target, eval_str=True).parameters.values()
    except Exception:  # a class without a signature; a quoted annotation that cannot be evaluated
        return Signature(open=True)
    found = {}
    for one in parameters:
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            required = one.default is one.empty
            annotation = None if one.annotation is one.empty else one.annotation
            default = NO_DEFAULT if required else _as_plain(one.default)
            found[one.name] = Parameter(one.name, annotation, default, required)
    return Signature(found, open=any(one.kind is one.VAR_KEYWORD for one in parameters))


def trainer_arguments() -> list[Parameter]:
    """Return every argument of Trainer with its type, default and meaning, as `base/arguments.py` has them."""
    found = Sources().signature(f"{_PACKAGE}.base.arguments.TrainerArguments")
    assert found is not None, "TrainerArguments is a plain dataclass"
    return [replace(one, doc=argument_texts()[name]) for name, one in found.parameters.items()]


def launcher_arguments(name: str) -> list[Parameter]:
    """Return every key under `launcher:` for the launcher of that name."""
    return list((Sources().signature(class_path("launcher", name)) or Signature()).parameters.values())
