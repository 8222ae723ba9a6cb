"""Checks values against type annotations and converts them to paths, durations, tuples, sets and objects.

The check is strict: "yes" is not a bool, and neither true nor "3" is an int, but an int is accepted as a float.
`Annotated` with a Range or Rule narrows a type. An annotation that YAML cannot express (a protocol, a type variable, a
callable) accepts any plain value.
"""

import inspect
import math
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, TypeGuard

from .errors import nearest_name, suggestion
from .run_names import address_problem
from .targets import TARGET, misspelt_word

Key = tuple[str | int, ...]
"""The path of a value in a config: ("callbacks", "checkpoint", "monitor")."""
_DURATION = re.compile(r"(\d{1,6}):(\d\d):(\d\d):(\d\d)", re.ASCII)
_PATHS = (Path, PurePath, PathLike)
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection)
_SETS = (set, frozenset, abc.Set, abc.MutableSet)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_PLAIN = (bool, int, float, str, tuple, timedelta, None, type(None), Literal, *_PATHS, *_LISTS, *_SETS, *_MAPPINGS)
"""Types that a mapping with `_target_` cannot build."""


class Problem(NamedTuple):
    """A mistake, with its key and a sentence that says what was expected, what was found and how to correct it.

    `right_name` and `right_value` are the key and the value that the sentence suggests, and `example` is a `correction`
    to append to it; each is "" if there is none.
    """

    key: Key
    message: str
    right_name: str = ""
    right_value: str = ""
    example: str = ""


@dataclass(frozen=True)
class Range:
    """Range of accepted numbers, as in `Annotated[int, Range(1)]`. If `exclusive`, `least` itself is rejected."""

    least: float
    most: float = math.inf
    exclusive: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a number is in the range; False for NaN."""
        return bool(self.least < value if self.exclusive else self.least <= value) and bool(value <= self.most)

    def words(self, name: str) -> str:
        """Return a description of the range for the type `name`."""
        if self.exclusive:
            name = f"{name} above {self.least}"
            return name if self.most == math.inf else f"{name}, up to {self.most}"
        return (
            f"{name} of at least {self.least}" if self.most == math.inf else f"{name} from {self.least} to {self.most}"
        )


@dataclass(frozen=True)
class Rule:
    """A condition that narrows a type, with a description of the accepted values for messages."""

    description: str
    accepts: Callable[[Any], bool]

    def words(self, name: str) -> str:
        """Return a description of the accepted values."""
        return self.description


Fitted = tuple[Any, list[Problem]]
"""A converted value and the mistakes in it."""
Build = Callable[[Mapping[str, Any], Key, Any], Fitted]
"""Function that checks or builds a mapping with `_target_`. Its last argument is the expected class."""


def fit(expected: Any, value: Any, key: Key, build: Build) -> Fitted:
    """Convert a value to the type `expected`. `build` converts mappings with `_target_`."""
    origin, parts = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin is typing.Annotated:
        fitted, problems = fit(parts[0], value, key, build)
        if not problems and not all(rule.accepts(value) for rule in parts[1:] if isinstance(rule, Range | Rule)):
            problems = [Problem(key, "")]
        # messages about the value mention the range; a mistake in a list item keeps the item's message
        return fitted, [_mismatch(key, (expected,), value) if p.key == key else p for p in problems]
    if origin in (typing.Union, types.UnionType):
        return _fit_union(parts, value, key, build)
    # checked before the shape, because a mapping with `_target_` builds an object of any class
    if is_target(value):
        if origin in _PLAIN:
            return value, [Problem(key, f"must not have a `{TARGET}`: it must be {name_of(expected)}.")]
        return build(value, key, origin if isinstance(origin, type) and origin is not Any else object)
    if not _has_shape(origin, parts, value):
        return value, [_mismatch(key, (expected,), value)]
    if isinstance(value, dict):
        return _fit_mapping(origin, parts, value, key, build)
    if isinstance(value, list):
        return _fit_list(origin, parts, value, key, build)
    if origin in _PATHS:
        problem = address_problem(value)
        return (Path(value), []) if problem is None else (value, [Problem(key, problem)])
    if origin is timedelta and isinstance(value, str):
        days, hours, minutes, seconds = map(int, value.split(":"))
        return timedelta(days, seconds, minutes=minutes, hours=hours), []
    return value, []


def _fit_list(origin: Any, parts: Any, value: list[Any], key: Key, build: Build) -> Fitted:
    if _is_record(origin, parts):
        kinds = parts
    else:
        kinds = (parts[0] if parts and origin in (*_LISTS, *_SETS, tuple) else Any,) * len(value)
    fitted = [
        fit(kind, item, (*key, index), build) for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    ]
    problems = [problem for _, inner in fitted for problem in inner]
    # YAML only has lists, which the annotation may turn into a tuple or set
    kind = tuple if origin is tuple else set if origin in _SETS else list
    return (value if problems else kind(item for item, _ in fitted)), problems


def _fit_mapping(origin: Any, parts: Any, value: dict[Any, Any], key: Key, build: Build) -> Fitted:
    if origin not in _MAPPINGS and (fault := _nearly_a_target(value)):
        return value, [Problem(key, fault)]
    of_name, of_value = parts if len(parts) == 2 and origin in _MAPPINGS else (Any, Any)
    problems = [
        Problem((*key, name), f"the key must be {name_of(of_name)}, not {describe(name)}.")
        for name in value
        if fit(of_name, name, key, build)[1]
    ]
    fitted = {name: fit(of_value, item, (*key, name), build) for name, item in value.items()}
    problems += [problem for _, inner in fitted.values() for problem in inner]
    return (value if problems else {name: item for name, (item, _) in fitted.items()}), problems


def _fit_union(members: tuple[Any, ...], value: Any, key: Key, build: Build) -> Fitted:
    if Any in members:  # keep the value, which another member might convert
        return fit(Any, value, key, build)
    inner: list[Problem] = []
    # members that convert come last, so that a str stays a str in `str | Path`
    for member in sorted(members, key=lambda kind: kind in (*_PATHS, timedelta)):
        fitted, problems = fit(member, value, key, build)
        if not problems:
            return fitted, []
        # reporting a mistake inside a mapping, list or path of the right shape is more helpful than listing all types
        within = isinstance(value, dict | list) and any(problem.key != key for problem in problems)
        if within or (member in _PATHS and isinstance(value, str)):
            inner = inner or problems
    return value, inner or [_mismatch(key, members, value)]


def _has_shape(origin: Any, parts: Any, value: Any) -> bool:
    """Return whether a value matches a type, ignoring its items."""
    if origin is Literal:
        return any(same(value, word) for word in parts)
    if origin in (None, type(None)):
        return value is None
    if origin in (bool, int, float, str):
        # not type(), because a value may be an enum derived from str; but isinstance() accepts a bool as an int
        accepted = (int, float) if origin is float else origin
        return isinstance(value, accepted) and (origin is bool or not isinstance(value, bool))
    if origin in _PATHS:
        return isinstance(value, str | PathLike)
    if origin is timedelta:
        return isinstance(value, timedelta) or (isinstance(value, str) and _DURATION.fullmatch(value) is not None)
    if origin in _SETS:  # items must be hashable
        return isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if origin is tuple:
        return isinstance(value, list) and (not _is_record(origin, parts) or len(parts) == len(value))
    if origin in _LISTS:
        return isinstance(value, list)
    if origin in _MAPPINGS:
        return isinstance(value, Mapping)
    return not _needs_object(origin)


def _is_record(origin: Any, parts: Any) -> bool:
    """Return whether an annotation is a tuple with one type per item."""
    return origin is tuple and bool(parts) and ... not in parts


def _needs_object(origin: Any) -> bool:
    """Return whether a class rejects all plain values. Protocols, enums, typed dicts and type variables don't."""
    return (
        inspect.isclass(origin)
        and origin not in (object, Any)
        and origin.__module__.partition(".")[0] not in sys.stdlib_module_names
        and not issubclass(origin, (str, int, float, dict, list, tuple))
        and typing.Protocol not in origin.__bases__
        and not hasattr(origin, "__members__")
    )


def is_target(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is a mapping that specifies an object to build."""
    return isinstance(value, dict) and TARGET in value


def _nearly_a_target(value: Mapping[Any, Any]) -> str:
    """Return a message if a plain mapping was probably meant to build an object, otherwise ""."""
    if "class_path" in value and value.keys() <= {"class_path", "init_args", "dict_kwargs"}:
        return f"uses LightningCLI's format. Write {{{TARGET}: {value['class_path']}}} and put the arguments beside it."
    return next((f"has {name!r}.{suggestion(word)}" for name in value if (word := misspelt_word(name))), "")


def same(left: Any, right: Any) -> bool:
    """Return whether two plain values are equal and have the same types."""
    return type(left) is type(right) and repr(left) == repr(right)  # repr: [1] == [True], and nan != nan


# --- words of messages ------------------------------------------------------------------------------------------------
def name_of(expected: Any) -> str:
    """Return a description of a type for messages."""
    origin, parts = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin is typing.Annotated:
        rules = [rule for rule in parts[1:] if isinstance(rule, Range | Rule)]
        return rules[0].words(name_of(parts[0])) if rules else name_of(parts[0])
    if origin in (typing.Union, types.UnionType):
        return _either(parts)
    if origin is Literal:
        shown = [repr(word) if isinstance(word, str) else describe(word).removeprefix("the number ") for word in parts]
        return "one of " * (len(parts) > 1) + ", ".join(shown)
    if _is_record(origin, parts):
        return f"a list of {len(parts)} ({', '.join(map(name_of, parts))})"
    if origin in (*_LISTS, *_SETS, tuple):
        return f"a list of {name_of(parts[0])}" if parts else "a list"
    if origin in _MAPPINGS:
        return "a mapping" + (f" of {name_of(parts[0])} to {name_of(parts[1])}" if parts else "")
    words = {type(None): "null", None: "null", Any: "anything", timedelta: "a time 'DD:HH:MM:SS'"}
    if origin in words or origin in _PATHS:
        return words.get(origin, "a path")
    if _needs_object(origin):
        return f"a mapping with `{TARGET}`: a subclass of {origin.__module__}.{origin.__qualname__}"
    return str(origin.__name__) if origin in (bool, int, float, str) else "anything"


def _either(members: Iterable[Any]) -> str:
    *names, last = dict.fromkeys(map(name_of, members))
    return f"{', '.join(names)} or {last}" if names else last


def describe(value: Any) -> str:
    """Return a description of a value for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    kind = "the string " if isinstance(value, str) else "the number " if isinstance(value, int | float) else ""
    return f"{kind}{text if len(text) <= 60 else text[:57] + '...'}"


def _mismatch(key: Key, members: tuple[Any, ...], value: Any) -> Problem:
    """Return the problem with a value that has none of the expected types, with a correction if possible."""
    message = f"must be {_either(members)}, not {describe(value)}."
    bare = [typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind for kind in members]
    kinds = {typing.get_origin(kind) or kind for kind in bare}
    if isinstance(value, str):
        if bool in kinds and value.lower() in ("true", "false", "yes", "no", "on", "off"):
            right = "true" if value.lower() in ("true", "yes", "on") else "false"
            return Problem(key, f"{message} Write {right}.", right_value=right)
        if value == "None" and type(None) in kinds:
            return Problem(key, f"{message} Write null.", right_value="null")
        if float in kinds and re.fullmatch(r"[-+]?[0-9]+\.[0-9]+(e[-+]?[0-9]+)?", value):
            return Problem(key, f"{message} Write {value} without quotes.", right_value=value)
        if kinds & {int, float} and re.fullmatch(r"[-+]?[0-9]{1,18}", value):
            return Problem(key, f"{message} Write {int(value)} without quotes.", right_value=str(int(value)))
        words = [word for kind in bare if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
        near = nearest_name(value, [word for word in words if isinstance(word, str)])
        return Problem(key, message + suggestion(near), right_value=near)
    # floats above 2^53 skip integers, so the suggestion could differ from the number in the file
    if int in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return Problem(key, f"{message} Write {int(value)}.", right_value=str(int(value)))
    if kinds & {str, *_PATHS} and type(value) in (int, float):
        message += " Put it in quotes."
    return Problem(key, message)
