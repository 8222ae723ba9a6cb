"""Compares config values with type annotations, and converts them: paths, durations, tuples, sets, objects.

The check is strict: "yes" is no bool, true is no int, "3" is no int; an int is accepted for a float. Annotations that
YAML values cannot be compared with (a protocol, a type variable, a callable) accept every plain value.
"""

import collections
import enum
import os
import pathlib
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..cli.config.read import Key
from ..cli.config.signatures import ANYTHING, Named
from .errors import did_you_mean
from .run_names import address_problem
from .targets import TARGET, misspelt_word

_KINDS: dict[Any, str] = {
    Any: "any", bool: "bool", int: "int", float: "float", str: "str", type(None): "none", None: "none",
    pathlib.Path: "path", pathlib.PurePath: "path", os.PathLike: "path", timedelta: "timedelta",
    typing.Union: "union", types.UnionType: "union", typing.Literal: "literal", tuple: "tuple",
    **dict.fromkeys((list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), "list"),
    **dict.fromkeys((set, frozenset, abc.Set, abc.MutableSet), "set"),
    **dict.fromkeys((dict, abc.Mapping, abc.MutableMapping, collections.OrderedDict), "mapping"),
}  # fmt: skip
_TYPES: dict[str, Any] = {
    "int": int, "float": int | float, "str": str, "path": str,
    "list": list, "tuple": list, "set": list, "mapping": dict,
}  # fmt: skip
_CLASSES = ("class", "opaque")  # an opaque one, whose source was not read, may accept plain values
_BUILT = ("any", *_CLASSES)
"""Kinds of annotations whose argument may be built from a mapping with `_target_`."""
_CONVERTED = ("path", "timedelta", "tuple", "set")
_DURATION = re.compile(r"([0-9]{1,6}):([0-9]{2}):([0-9]{2}):([0-9]{2})")


@dataclass(frozen=True)
class Problem:
    """Mistake in a config: the key, and a sentence with the expected value, the one found, and the remedy."""

    key: Key
    message: str


Fitted = tuple[Any, list[Problem]]
"""A converted value, and every mistake in it."""
OnTarget = Callable[[Mapping[str, Any], Key, str], Fitted]
"""Checks, or builds, a mapping with `_target_` that must name a subclass of the class at a dotted path."""


def fit_value(expected: Any, value: Any, key: Key, on_target: OnTarget) -> Fitted:
    """Convert a value to the type `expected`; `on_target` converts mappings that name a class."""
    kind, parts = kind_of(expected), typing.get_args(expected)
    if kind == "annotated":
        return fit_value(parts[0], value, key, on_target)
    if kind == "union":
        return _fit_union(expected, value, key, on_target)
    if is_target(value):
        if kind in _BUILT:
            return on_target(value, key, ANYTHING if kind == "any" else _path(expected))
        return value, [Problem(key, f"may not hold a `{TARGET}`: it must be {describe_type(expected)}.")]
    if kind in ("any", "opaque"):
        parts = ()
        if fault := _nearly_a_target(value):
            return value, [Problem(key, fault)]
    elif not _has_shape(kind, parts, value):
        return value, [Problem(key, _wrong([expected], value))]
    if kind == "path":
        if (problem := address_problem(value)) is not None:
            return value, [Problem(key, problem)]
        return pathlib.Path(value), []
    if kind == "timedelta":
        days, hours, minutes, seconds = map(int, value.split(":"))
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds), []
    found: list[Problem] = []

    def inner(part: Any, item: Any, name: Any) -> Any:
        result, problems = fit_value(part, item, (*key, name), on_target)
        found.extend(problems)
        return result

    if isinstance(value, list):
        of_items = parts if is_record(kind, parts) else (parts[0] if parts else Any,) * len(value)
        items = [inner(part, item, index) for index, (part, item) in enumerate(zip(of_items, value, strict=True))]
        return {"tuple": tuple, "set": set}.get(kind, list)(items) if not found else value, found
    if isinstance(value, dict):
        of_name, of_value = parts or (Any, Any)
        for name in value:
            if fit_value(of_name, name, key, on_target)[1]:
                found.append(Problem((*key, name), f"the key must be {describe_type(of_name)}, not {describe(name)}."))
        return {name: inner(of_value, item, name) for name, item in value.items()}, found
    return value, []


def _fit_union(expected: Any, value: Any, key: Key, on_target: OnTarget) -> Fitted:
    # Members that need no conversion come first, so that a str stays one in `str | Path`.
    members = sorted(typing.get_args(expected), key=lambda one: kind_of(one) in _CONVERTED)
    if Any in members:
        return fit_value(Any, value, key, on_target)
    shaped: list[Problem] = []
    wanted = _BUILT if is_target(value) else ("mapping", "list", "tuple", "set")
    for one in members:
        result, problems = fit_value(one, value, key, on_target)
        if not problems:
            return result, []
        kind = kind_of(one)
        # If the value has the shape of a member, the mistakes within are more useful than a list of all members.
        if kind in wanted and (kind in _BUILT or _has_shape(kind, typing.get_args(one), value)):
            shaped = shaped or problems
    return value, shaped or [Problem(key, _wrong(typing.get_args(expected), value))]


def _nearly_a_target(value: Any) -> str:
    """Return why a mapping that is to be plain data was meant to be built; "" for any other value."""
    if not isinstance(value, dict):
        return ""
    if "class_path" in value and value.keys() <= {"class_path", "init_args", "dict_kwargs"}:
        return f"is in LightningCLI's form. Write {{{TARGET}: {value['class_path']}}}, with the arguments beside it."
    return next((f"has {name!r}.{hint}" for name in value if (hint := misspelt_word(name))), "")


def is_target(value: Any) -> bool:
    """Return whether a value is a mapping that names a class to build."""
    return isinstance(value, dict) and TARGET in value


def describe_type(expected: Any) -> str:
    """Describe a type for a message."""
    kind, parts = kind_of(expected), typing.get_args(expected)
    if kind == "union":
        return _either(parts)
    names = [describe_type(one) for one in parts] if kind in ("list", "tuple", "set", "mapping") else []
    if kind == "literal":
        return ("one of " if len(parts) > 1 else "") + ", ".join(map(_quoted, parts))
    if is_record(kind, parts):
        return f"a list of {len(names)} ({', '.join(names)})"
    if kind in ("list", "tuple", "set"):
        return f"a list of {names[0]}" if names else "a list"
    if kind == "mapping":
        return f"a mapping of {' to '.join(names)}" if names else "a mapping"
    if kind in _CLASSES:
        return f"a mapping with `{TARGET}`: a subclass of {_path(expected)}"
    words = {"none": "null", "any": "anything", "path": "a path", "timedelta": "a time 'DD:HH:MM:SS'"}
    return words.get(kind, kind)


def _either(members: Sequence[Any]) -> str:
    *names, last = dict.fromkeys(map(describe_type, members))
    return f"{', '.join(names)} or {last}" if names else last


def describe(value: Any) -> str:
    """Describe a value for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return f"the {'string' if isinstance(value, str) else 'number'} {text if len(text) <= 60 else text[:57] + '...'}"


def same(left: Any, right: Any) -> bool:
    """Return whether two plain values are equal and of the same types."""
    # repr, since [1] == [True], and NaN is not equal to itself
    return type(left) is type(right) and repr(left) == repr(right)


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else describe(value).removeprefix("the number ")


def kind_of(expected: Any) -> str:
    """Return the kind of an annotation, a word such as "int", "union" or "class"; "any" for an unknown one."""
    origin = typing.get_origin(expected) or expected
    if origin is typing.Annotated:
        return "annotated"
    if origin in _KINDS:
        return _KINDS[origin]
    if not isinstance(origin, type) or origin.__module__.partition(".")[0] in sys.stdlib_module_names:
        return "any"
    if issubclass(origin, Named):
        return "class" if origin.exact else "opaque"
    may_be_plain = issubclass(origin, (enum.Enum, str, int, float, dict, list, tuple))
    return "opaque" if may_be_plain or typing.Protocol in origin.__bases__ else "class"


def _path(expected: Any) -> str:
    """Return the dotted path of the class that an annotation names."""
    cls = typing.get_origin(expected) or expected
    return cls.path if issubclass(cls, Named) else f"{cls.__module__}.{cls.__qualname__}"


def is_record(kind: str, parts: Sequence[Any]) -> bool:
    """Return whether an annotation is a tuple with a type for each item."""
    return kind == "tuple" and bool(parts) and ... not in parts


def _has_shape(kind: str, parts: Sequence[Any], value: Any) -> bool:
    """Return whether a value is of a type, apart from its items."""
    if kind == "literal":
        return any(same(value, one) for one in parts)
    if kind == "none" or value is None:
        return kind == "none" and value is None
    # first, since a bool is an int
    if isinstance(value, bool):
        return kind == "bool"
    if kind == "timedelta":
        return isinstance(value, str) and _DURATION.fullmatch(value) is not None
    if kind == "set" and isinstance(value, list):
        return not any(isinstance(item, dict | list) for item in value)
    fits = kind in _TYPES and isinstance(value, _TYPES[kind])
    return fits and (not is_record(kind, parts) or len(value) == len(parts))


def _wrong(members: Sequence[Any], value: Any) -> str:
    """Return a message with the expected types, the value, and a correction where one is likely."""
    message = f"must be {_either(members)}, not {describe(value)}."
    kinds = {kind_of(one) for one in members}
    if isinstance(value, str):
        if "bool" in kinds and value.lower() in ("true", "false", "yes", "no", "on", "off"):
            return f"{message} Write {'true' if value.lower() in ('true', 'yes', 'on') else 'false'}."
        if kinds & {"int", "float"} and re.fullmatch(r"[-+]?[0-9]{1,18}", value):
            return f"{message} Write {int(value)} without quotes."
        literals = [word for one in members if kind_of(one) == "literal" for word in typing.get_args(one)]
        return message + did_you_mean(value, [word for word in literals if isinstance(word, str)])
    if "int" in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return f"{message} Write {int(value)}."
    if kinds & {"str", "path"} and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{message} Put it in quotes."
    return message
