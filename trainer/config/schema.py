"""Types of config values, made from annotations, and the check of a value against them.

The check is strict: "yes" is no bool, true is no int, "3" is no int; an int will do for a float. What an annotation
says that a YAML value cannot be held against (a protocol, a type variable, a callable) accepts every plain value.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from ..errors import did_you_mean
from .source_files import Module, parse_expression
from .static_signatures import Parameter, Sources

Key = tuple[str | int, ...]
"""Where a value stands in a config: ("callbacks", "checkpoint", "monitor")."""
TARGET = "_target_"
"""The key under which a mapping names the class to build."""

_Kind = Literal[
    "any", "none", "bool", "int", "float", "str", "path", "timedelta", "literal", "union", "list", "tuple", "record",
    "set", "mapping", "class", "opaque",
]  # fmt: skip
_KNOWN: dict[str, _Kind] = {
    "None": "none", "bool": "bool", "int": "int", "float": "float", "str": "str", "object": "any",
    "pathlib.Path": "path", "os.PathLike": "path", "datetime.timedelta": "timedelta",
    "list": "list", "tuple": "tuple", "set": "set", "frozenset": "set", "dict": "mapping",
    **dict.fromkeys(("List", "Sequence", "MutableSequence", "Iterable", "Collection"), "list"),
    **dict.fromkeys(("Dict", "Mapping", "MutableMapping", "OrderedDict"), "mapping"),
    "Tuple": "tuple", "Set": "set", "FrozenSet": "set", "AbstractSet": "set",
    "Union": "union", "Optional": "union", "Literal": "literal",
}  # fmt: skip
_WRAPPERS = {"Annotated", "Final", "ClassVar", "Required", "NotRequired"}
_TYPING = ("typing.", "typing_extensions.", "collections.abc.", "collections.")
_NOT_BUILT = {"typing.TypedDict", "typing.Protocol", "typing.NamedTuple", "enum.Enum", "enum.IntEnum", "enum.StrEnum"}
_TIME = re.compile(r"[0-9]{1,6}:[0-9]{2}:[0-9]{2}:[0-9]{2}")
_CONVERTED = ("path", "timedelta", "tuple", "record", "set")


@dataclass(frozen=True)
class Type:
    """What a value may be. `parts` are the members of a union or the items of a container, `name` a class's path."""

    kind: _Kind
    parts: tuple["Type", ...] = ()
    values: tuple[Any, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        if self.kind == "union":
            return " or ".join(dict.fromkeys(str(part) for part in self.parts))
        if self.kind == "literal":
            return ("one of " if len(self.values) > 1 else "") + ", ".join(_quoted(value) for value in self.values)
        if self.kind == "record":
            return f"a list of {len(self.parts)} ({', '.join(map(str, self.parts))})"
        if self.kind in ("list", "tuple", "set"):
            return "a list" + (f" of {self.parts[0]}" if self.parts else "")
        if self.kind == "mapping":
            return "a mapping" + (f" of {self.parts[0]} to {self.parts[1]}" if self.parts else "")
        if self.kind in ("class", "opaque"):
            return f"a mapping with `{TARGET}`: a subclass of {self.name}"
        return {"none": "null", "any": "anything", "path": "a path", "timedelta": "a time 'DD:HH:MM:SS'"}.get(
            self.kind, self.kind
        )


ANY = Type("any")
NONE = Type("none")


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: the key, and a sentence that says what was expected, what came, and what to do."""

    key: Key
    message: str


CheckTarget = Callable[[Mapping[str, Any], Key, str], Iterator[Problem]]
"""Checks a mapping with `_target_` that must name a subclass of the class at a dotted path."""


def type_of(parameter: Parameter, sources: Sources) -> Type:
    """The type of a parameter; a default of None lets null in, as Python does."""
    if parameter.annotation is None:
        return ANY
    found = _type(parameter.annotation, parameter.module, sources)
    no_value = isinstance(parameter.default, ast.Constant) and parameter.default.value is None
    return Type("union", (found, NONE)) if no_value and found.kind != "any" and not _takes_none(found) else found


def mismatches(expected: Type, value: Any, key: Key, check_target: CheckTarget) -> list[Problem]:
    """Everything in which a value is not what was expected."""
    if expected.kind in ("class", "opaque") and is_target(value):
        return list(check_target(value, key, expected.name))
    if expected.kind in ("any", "opaque"):
        return list(_stray_targets(value, key))
    if expected.kind == "union":
        return _union_mismatches(expected, value, key, check_target)
    if is_target(value):
        return list(_stray_targets(value, key))
    if not _fits(expected, value):
        return [Problem(key, _wrong(expected, value))]
    found: list[Problem] = []
    if isinstance(value, list):
        for index, (part, item) in enumerate(zip(_item_types(expected, value), value, strict=True)):
            found += mismatches(part, item, (*key, index), check_target)
    elif isinstance(value, dict):
        of_key, of_value = expected.parts or (ANY, ANY)
        for name, item in value.items():
            if mismatches(of_key, name, key, check_target):
                found.append(Problem((*key, name), f"the key must be {of_key}, not {describe(name)}."))
            found += mismatches(of_value, item, (*key, name), check_target)
    return found


def convert(expected: Type, value: Any, key: Key, check_target: CheckTarget, build: Callable[..., Any]) -> Any:
    """Turn a checked value into paths, times, tuples, sets, and what `build(mapping, key, class)` makes."""
    if expected.kind == "union":
        # A plain value stays as it is where the union takes it so.
        options = sorted(expected.parts, key=lambda part: part.kind in _CONVERTED)
        fitting = [part for part in options if not mismatches(part, value, key, check_target)]
        return convert(fitting[0], value, key, check_target, build) if fitting else value
    if expected.kind in ("class", "opaque") and is_target(value):
        return build(value, key, expected.name)
    if expected.kind == "path" and isinstance(value, str):
        return Path(value)
    if expected.kind == "timedelta" and isinstance(value, str):
        days, hours, minutes, seconds = (int(part) for part in value.split(":"))
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if isinstance(value, list):
        items = [
            convert(part, item, (*key, index), check_target, build)
            for index, (part, item) in enumerate(zip(_item_types(expected, value), value, strict=True))
        ]
        return {"tuple": tuple, "record": tuple, "set": set}.get(expected.kind, list)(items)
    if isinstance(value, dict) and expected.kind == "mapping" and expected.parts:
        return {
            name: convert(expected.parts[1], item, (*key, name), check_target, build) for name, item in value.items()
        }
    return value


def dotted(key: Key) -> str:
    """The key as a user writes it."""
    return ".".join(str(part) if str(part).isprintable() else ascii(part) for part in key)


def is_target(value: Any) -> bool:
    """Whether a value is a mapping that names a class to build."""
    return isinstance(value, dict) and TARGET in value


def describe(value: Any) -> str:
    """Say what came, in a few words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return f"the {'string' if isinstance(value, str) else 'number'} {text if len(text) <= 60 else text[:57] + '...'}"


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else describe(value).removeprefix("the number ")


def _item_types(expected: Type, value: list[Any]) -> Sequence[Type]:
    return expected.parts if expected.kind == "record" else (expected.parts or (ANY,)) * len(value)


def _takes_none(expected: Type) -> bool:
    return expected.kind in ("none", "any") or any(
        _takes_none(part) for part in expected.parts if expected.kind == "union"
    )


def _fits(expected: Type, value: Any) -> bool:
    kind = expected.kind
    if kind == "literal":
        return any(type(value) is type(one) and value == one for one in expected.values)
    if kind == "timedelta":
        return isinstance(value, str) and _TIME.fullmatch(value) is not None
    if kind == "record":
        return isinstance(value, list) and len(value) == len(expected.parts)
    if kind == "set":
        return isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if kind == "none":
        return value is None
    if isinstance(value, bool):
        return kind == "bool"
    types: dict[str, Any] = {
        "int": int, "float": int | float, "str": str, "path": str, "list": list, "tuple": list, "mapping": dict,
    }  # fmt: skip
    return kind in types and isinstance(value, types[kind])


def _wrong(expected: Type, value: Any) -> str:
    """Say what was expected, what came, and what would be right."""
    message = f"must be {expected}, not {describe(value)}."
    options = expected.parts if expected.kind == "union" else (expected,)
    kinds = {part.kind for part in options}
    words = [one for part in options for one in part.values]
    if isinstance(value, str):
        if "bool" in kinds and value.lower() in ("true", "false", "yes", "no", "on", "off"):
            return f"{message} Write {'true' if value.lower() in ('true', 'yes', 'on') else 'false'}."
        if kinds & {"int", "float"} and re.fullmatch(r"[-+]?[0-9]{1,18}", value):
            return f"{message} Write {int(value)} without quotes."
        return message + did_you_mean(value, [one for one in words if isinstance(one, str)])
    if "int" in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return f"{message} Write {int(value)}."
    if kinds & {"str", "path"} and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{message} Put it in quotes."
    return message


def _union_mismatches(expected: Type, value: Any, key: Key, check_target: CheckTarget) -> list[Problem]:
    found = [(part, mismatches(part, value, key, check_target)) for part in expected.parts]
    if not all(problems for _, problems in found):
        return []
    # Where one member has the shape of the value, its complaint is the useful one.
    wanted = (
        {"class", "opaque"}
        if is_target(value)
        else {"mapping"}
        if isinstance(value, dict)
        else {"list", "tuple", "record", "set"}
    )
    for part, problems in found:
        if isinstance(value, dict | list) and part.kind in wanted and (is_target(value) or _fits(part, value)):
            return problems
    return list(_stray_targets(value, key)) if is_target(value) else [Problem(key, _wrong(expected, value))]


def _stray_targets(value: Any, key: Key) -> Iterator[Problem]:
    """A `_target_` where no class is expected would let a config call anything."""
    if is_target(value):
        yield Problem(key, f"may not hold a `{TARGET}`: only an argument annotated with a class is built from one.")
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _stray_targets(item, (*key, name))


def _type(node: ast.expr, module: Module, sources: Sources, depth: int = 0) -> Type:
    if depth > 30:
        return ANY
    if isinstance(node, ast.Constant):
        if node.value is None:
            return NONE
        quoted = parse_expression(node.value) if isinstance(node.value, str) else None
        return _type(quoted, module, sources, depth + 1) if quoted is not None else ANY
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_type(side, module, sources, depth + 1) for side in (node.left, node.right)])
    try:
        found = sources.resolve(module, node)
        if found.kind == "value" and isinstance(found.node, ast.expr) and not isinstance(node, ast.Subscript):
            return _type(found.node, found.module, sources, depth + 1)
        if found.kind == "class":
            bases = {one.dotted for one in sources.lineage(found)}
            return ANY if bases & _NOT_BUILT else Type("class", name=found.dotted)
    except LookupError:
        return ANY
    name = found.dotted
    for prefix in _TYPING:
        name = name.removeprefix(prefix)
    inner = _arguments(node)
    if name in _WRAPPERS and inner:
        return _type(inner[0], module, sources, depth + 1)
    kind = _KNOWN.get(name)
    if kind is None:
        return Type("opaque", name=found.dotted) if _may_be_built(found.dotted) else ANY
    parts = [_type(one, module, sources, depth + 1) for one in inner if not _is_ellipsis(one)]
    if kind == "literal":
        return Type(kind, values=tuple(_literals(inner)))
    if kind == "union":
        return _union([*parts, NONE] if name == "Optional" else parts)
    if kind == "tuple" and parts and len(parts) == len(inner):
        return Type("record", tuple(parts))
    fits = len(parts) == (2 if kind == "mapping" else 1)
    return Type(kind, tuple(parts) if fits and kind in ("list", "tuple", "set", "mapping") else ())


def _union(parts: list[Type]) -> Type:
    flat = [one for part in parts for one in (part.parts if part.kind == "union" else (part,))]
    return ANY if any(one.kind == "any" for one in flat) else Type("union", tuple(flat))


def _arguments(node: ast.expr) -> list[ast.expr]:
    """The expressions between the brackets of a generic."""
    if not isinstance(node, ast.Subscript):
        return []
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _literals(nodes: list[ast.expr]) -> Iterator[Any]:
    for node in nodes:
        try:
            yield ast.literal_eval(node)
        except (ValueError, TypeError):  # a member of an Enum cannot be written in YAML
            continue


def _may_be_built(dotted: str) -> bool:
    """Whether an unread name may be a class for a `_target_`: the standard library's would let in too much."""
    top, dot, _ = dotted.partition(".")
    return bool(dot) and top.isidentifier() and top not in sys.stdlib_module_names
