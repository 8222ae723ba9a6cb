"""Modules as source text: found as an import would find them, parsed with `ast`, never run."""

import ast
import builtins
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, cast

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


# Their sources are large, and nothing that a config needs to know before the run stands in them.
_UNREAD = frozenset(sys.stdlib_module_names) | {"numpy", "torch", "torchmetrics", "torchvision"}
# Bases whose __init__ takes nothing that a config could give.
_ROOTS = {
    "object",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
    "torch.nn.Module",
    "torch.nn.modules.module.Module",
}
_HARMLESS_DECORATORS = {"typing.final", "typing.runtime_checkable", "functools.total_ordering"}
_MAX_BASES = 30  # of imports of imports; more is a circle


@dataclass(frozen=True, eq=False)
class Definition:
    """What a name stands for. `dotted` is where it was defined; "foreign" is what no source was read for."""

    kind: Literal["class", "function", "module", "value", "foreign", "missing"]
    dotted: str
    module: Module = ABSOLUTE
    node: ast.AST | None = None

    @property
    def body(self) -> Sequence[ast.stmt]:
        """The statements of a class."""
        return cast(ast.ClassDef, self.node).body


@dataclass(frozen=True)
class Parameter:
    """One argument of a class: `annotation` and `default` are expressions in the scope of `module`."""

    name: str
    annotation: ast.expr | None
    default: ast.expr | None
    required: bool
    module: Module
    doc: str = ""


@dataclass
class Signature:
    """The arguments of a class. `open`: it takes others too, which the source does not tell."""

    parameters: dict[str, Parameter] = field(default_factory=dict)
    open: bool = False


class Sources:
    """The source files read so far; make a new one for each config, since files change."""

    def __init__(self) -> None:
        self._modules: dict[str, Module | None] = {}

    def locate(self, path: str) -> Definition:
        """Find the class at a dotted path; kind "foreign" where the source does not tell.

        Raises:
            LookupError: nothing is there, or it is no class; the message says why.
        """
        parts = path.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise LookupError(f"{path!r} is not a dotted path to a class, such as 'package.module.Class'.")
        depth = 0
        while depth < len(parts) and find_module(".".join(parts[: depth + 1])) is not None:
            depth += 1
        owner, rest = ".".join(parts[:depth]), parts[depth:]
        if depth == 0 or (len(rest) > 1 and self.read(owner) is None and parts[0] not in _UNREAD):
            raise LookupError(no_module(owner, rest[0]))
        if not rest:
            raise LookupError(f"{path!r} is a module, not a class.")
        found = self._follow(self._member(owner, rest[0]))
        for name in rest[1:]:
            found = self._follow(self._attribute(found, name))
        if found.kind == "missing":
            if len(rest) > 1:
                raise LookupError(no_module(owner, rest[0]))
            known = (self.read(owner) or ABSOLUTE).names.keys() | set(submodules(owner))
            raise LookupError(f"module {owner!r} has no {rest[0]!r}.{did_you_mean(rest[0], known)}")
        if found.kind not in ("class", "foreign"):
            raise LookupError(f"{path!r} is a {found.kind}, not a class.")
        return found

    def read(self, name: str) -> Module | None:
        """Parse a module; None where it has no source to read.

        Raises:
            LookupError: the source is no Python.
        """
        if name not in self._modules:
            self._modules[name] = None
            spec = None if name.partition(".")[0] in _UNREAD else find_module(name)
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                self._modules[name] = parse_module(name, spec)
        return self._modules[name]

    def resolve(self, module: Module, expression: ast.AST, depth: int = 0) -> Definition:
        """What a name, a dotted name or a generic such as `Base[int]` stands for in a module."""
        if isinstance(expression, ast.Name):
            return self._name(module, expression.id, depth)
        if isinstance(expression, ast.Attribute):
            return self._attribute(self._follow(self.resolve(module, expression.value, depth)), expression.attr, depth)
        if isinstance(expression, ast.Subscript):
            return self.resolve(module, expression.value, depth)
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            quoted = parse_expression(expression.value)
            if quoted is not None and depth < _MAX_BASES:
                return self.resolve(module, quoted, depth + 1)
        return Definition("foreign", "?")

    def lineage(self, found: Definition, depth: int = 0) -> list[Definition]:
        """The class and all its bases in the order in which Python asks them (diamonds: as C3 in the usual cases)."""
        if found.kind != "class" or depth > _MAX_BASES:
            return [found]
        line = [found]
        for base in cast(ast.ClassDef, found.node).bases:
            line += self.lineage(self._follow(self.resolve(found.module, base)), depth + 1)
        return [
            one for index, one in enumerate(line) if one.dotted not in {later.dotted for later in line[index + 1 :]}
        ]

    def is_subclass(self, found: Definition, expected: str) -> bool | None:
        """Whether a class descends from the one at the dotted path `expected`; None where the source does not tell."""
        line = self.lineage(found)
        if any(one.dotted == expected for one in line):
            return True
        return False if all(one.kind == "class" or one.dotted in _ROOTS for one in line) else None

    def signature(self, found: Definition) -> Signature | None:
        """The arguments of a class; None where the source does not tell."""
        return self._signature(self.lineage(found))

    def _signature(self, line: Sequence[Definition]) -> Signature | None:
        for index, one in enumerate(line):
            if one.kind != "class":
                if one.dotted in _ROOTS:
                    continue
                return None
            decorators = [self._follow(self.resolve(one.module, _callee(node))).dotted for node in _decorators(one)]
            if not set(decorators) <= _HARMLESS_DECORATORS | {"dataclasses.dataclass"}:
                return None
            methods = {node.name: node for node in one.body if isinstance(node, ast.FunctionDef)}
            if "__init__" in methods:
                return self._of_function(one, methods["__init__"], line[index + 1 :])
            if "__new__" in methods:
                return None
            if "dataclasses.dataclass" in decorators:
                return self._of_dataclass(line[index:])
        return Signature()

    def _of_function(self, owner: Definition, node: ast.FunctionDef, bases: Sequence[Definition]) -> Signature | None:
        arguments = node.args
        plain = arguments.posonlyargs + arguments.args
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
        pairs = list(zip(plain, defaults, strict=True))[1:] + list(
            zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        )
        own = {
            one.arg: Parameter(one.arg, one.annotation, default, default is None, owner.module)
            for one, default in pairs
        }
        if arguments.kwarg is None:
            return Signature(own)
        call = _passed_on(node, arguments.kwarg.arg)
        if call is None:
            return Signature(own, open=True)
        inherited = self._signature(bases)
        if inherited is None:
            return None
        given = {keyword.arg for keyword in call.keywords} | set(list(inherited.parameters)[: len(call.args)])
        passed = {name: one for name, one in inherited.parameters.items() if name not in given and name not in own}
        return Signature(own | passed, inherited.open)

    def _of_dataclass(self, line: Sequence[Definition]) -> Signature | None:
        parameters: dict[str, Parameter] = {}
        for one in reversed(line):
            if one.kind != "class" and one.dotted not in _ROOTS:
                return None
            if one.kind == "class":
                for parameter in self._fields(one):
                    parameters[parameter.name] = parameter
        return Signature(parameters)

    def _fields(self, owner: Definition) -> Iterator[Parameter]:
        body = list(owner.body)
        for node, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if self.resolve(owner.module, node.annotation).dotted == "typing.ClassVar":
                continue
            default, required = node.value, node.value is None
            if isinstance(default, ast.Call) and self.resolve(owner.module, default.func).dotted == "dataclasses.field":
                options = {keyword.arg: keyword.value for keyword in default.keywords}
                if isinstance(options.get("init"), ast.Constant) and not cast(ast.Constant, options["init"]).value:
                    continue
                default, required = options.get("default"), not options.keys() & {"default", "default_factory"}
            doc = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                doc = inspect.cleandoc(str(following.value.value))
            yield Parameter(node.target.id, node.annotation, default, required, owner.module, doc)

    def _name(self, module: Module, name: str, depth: int) -> Definition:
        if module is ABSOLUTE:
            if hasattr(builtins, name):
                return Definition("foreign", name)
            return Definition("foreign", f"typing.{name}") if name in typing.__all__ else Definition("module", name)
        found = self._bound(module, name, depth)
        return Definition("foreign", name) if found.kind == "missing" and hasattr(builtins, name) else found

    def _bound(self, module: Module, name: str, depth: int = 0) -> Definition:
        binding, dotted = module.names.get(name), f"{module.name}.{name}"
        if depth > _MAX_BASES:
            return Definition("foreign", dotted)
        if isinstance(binding, Imported):
            if not binding.name:
                return Definition("module", binding.module)
            return self._member(binding.module, binding.name, depth + 1)
        if binding is not None:
            kind: Any = "class" if isinstance(binding, ast.ClassDef) else "function"
            return Definition("value" if isinstance(binding, ast.expr) else kind, dotted, module, binding)
        if find_module(dotted) is not None:
            return Definition("module", dotted)
        for star in module.stars:
            found = self._member(star, name, depth + 1)
            if found.kind != "missing":
                return found
        return Definition("foreign" if module.dynamic else "missing", dotted)

    def _member(self, owner: str, name: str, depth: int = 0) -> Definition:
        module = self.read(owner)
        return Definition("foreign", f"{owner}.{name}") if module is None else self._bound(module, name, depth)

    def _attribute(self, owner: Definition, name: str, depth: int = 0) -> Definition:
        dotted = f"{owner.dotted}.{name}"
        if owner.kind == "module":
            return self._member(owner.dotted, name, depth)
        if owner.kind == "class":
            for node in owner.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return Definition("class", dotted, owner.module, node)
        return Definition("missing" if owner.kind == "missing" else "foreign", dotted)

    def _follow(self, found: Definition) -> Definition:
        """Go through aliases such as `Base = other.Base`; another value may be anything."""
        for _ in range(_MAX_BASES):
            if found.kind != "value" or found.node is None:
                return found
            if isinstance(found.node, ast.Constant):
                return found
            found = self.resolve(found.module, found.node)
        return Definition("foreign", found.dotted)


def signature_of_class(cls: type) -> Signature:
    """The arguments of a class that had to be imported, since its source did not tell them."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return Signature(open=True)
    signature = Signature(open=any(one.kind is one.VAR_KEYWORD for one in parameters))
    for one in parameters:
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            text = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
            known = one.annotation is not one.empty
            signature.parameters[one.name] = Parameter(
                one.name,
                parse_expression(text) if known else None,
                None if one.default is one.empty else parse_expression(repr(one.default)),
                one.default is one.empty,
                ABSOLUTE,
            )
    return signature


def _decorators(owner: Definition) -> list[ast.expr]:
    return cast(ast.ClassDef, owner.node).decorator_list


def _callee(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _passed_on(node: ast.FunctionDef, name: str) -> ast.Call | None:
    """The call of a base's `__init__` that receives `**name`, if that is the only thing done with it."""
    uses = [one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name]
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
            owner = call.func.value
            is_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if is_super and any(one.arg is None and one.value in uses for one in call.keywords) and len(uses) == 1:
                return call
    return None
