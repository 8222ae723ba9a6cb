"""Types of config values, made from annotations, and the check of a value against them.

The check is strict: "yes" is no bool, true is no int, "3" is no int; an int will do for a float. What an annotation
says that a YAML value cannot be held against (a protocol, a type variable, a callable) accepts every plain value.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.run_names import fault_of_name, fault_of_path
from ..errors import ConfigError, did_you_mean
from ..launchers import LAUNCHERS
from ..strategies import STRATEGIES
from .signatures import (
    Definition,
    Module,
    Parameter,
    Signature,
    Sources,
    find_module,
    parse_expression,
    signature_of_class,
)

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
_DAYS_AND_TIME = re.compile(r"[0-9]{1,6}:[0-9]{2}:[0-9]{2}:[0-9]{2}")
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
                found.append(Problem((*key, name), f"the key must be {of_key}, not {describe_value(name)}."))
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


def describe_value(value: Any) -> str:
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
    return repr(value) if isinstance(value, str) else describe_value(value).removeprefix("the number ")


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
        return isinstance(value, str) and _DAYS_AND_TIME.fullmatch(value) is not None
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
    message = f"must be {expected}, not {describe_value(value)}."
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


_PACKAGE_NAME = __name__.partition(".")[0]
_ARGUMENTS = f"{_PACKAGE_NAME}.trainer.arguments.TrainerArguments"
EXPECTED = {
    "task": f"{_PACKAGE_NAME}.tasks.task.Task",
    "data": f"{_PACKAGE_NAME}.tasks.data_module.DataModule",
    "callbacks": f"{_PACKAGE_NAME}.callbacks.callback.Callback",
    "loggers": f"{_PACKAGE_NAME}.trainer.loggers.logger.Logger",
}
"""The class that every `_target_` of a section must descend from."""
SECTIONS = {
    "seed": "With config and data it makes the run: every random number follows from it.",
    "run": "name and root: the run directory is root/name/version_N.",
    "resume": '"auto": go on from the newest whole checkpoint of this run; a path: from that one; null: begin anew.',
    "checkpoint": 'What validate, test and predict load: "best", "last", a path or "none". Null: best, else last.',
    "task": "What is trained: `_target_`, a subclass of Task, and its arguments.",
    "data": "Its data: `_target_`, a subclass of DataModule, and its arguments. Absent: the task has its own loaders.",
    "trainer": "The arguments of Trainer, as listed below.",
    "callbacks": "What watches the run: names, each with `_target_`, a subclass of Callback, and its arguments.",
    "loggers": "What writes its figures, likewise. Absent: TensorBoard and metrics.jsonl; null: nothing.",
    "launcher": 'Where it runs: "slurm" or "ray", or a mapping of `name` and options. Absent: on this machine.',
}
"""The keys of a config, and what each means."""
LIGHTNING_KEYS = {
    "model": "It is `task` here: {_target_: my.Net, lr: 1}, without class_path and init_args.",
    "seed_everything": "It is `seed` here.",
    "ckpt_path": "It is `resume` for fit, `checkpoint` for validate, test and predict.",
}
"""What to write for keys of a LightningCLI's config."""
MOVED: dict[str, Key] = {"seed": ("seed",), "run_name": ("run", "name"), "default_root_dir": ("run", "root")}
"""Arguments of Trainer that have a key of their own; under `trainer:` they are taken too, but not in both places."""
SECTION_OF = {"callbacks": "callbacks", "logger": "loggers"}
"""Arguments of Trainer that are whole sections of a config."""
KIND_ROOMS = {"strategy": "strategies", "launcher": "launchers"}
"""What is chosen by a name, and the room of `trainer` that holds its classes."""
_WORDS = {"resume": ("auto",), "checkpoint": ("best", "last", "none")}
NO_DEFAULT: Any = object()
"""Stands for a default that plain data cannot hold."""
_SEED_LIMIT = 2**32


class Checker:
    """Holds a config against what it names. `may_import`: where source does not tell a signature, import the class."""

    def __init__(self, values: Mapping[str, Any], sources: Sources, may_import: bool = False) -> None:
        self.values = values
        self.sources = sources
        self.may_import = may_import
        self.unread = False
        self.signatures: dict[str, Signature | None] = {}

    def problems(self) -> Iterator[Problem]:
        """Every mistake in the config."""
        for name in self.values:
            if name not in SECTIONS:
                yield Problem((name,), f"is no key of a config.{self._section_meant(name)}")
        if self.values.get("task") is None:
            yield Problem(("task",), f"is missing: name a subclass of Task, as {{{TARGET}: my_module.MyTask}}.")
        for name in ("task", "data"):
            if self.values.get(name) is not None:
                yield from self._entry(self.values[name], (name,), EXPECTED[name])
        yield from self._trainer()
        if self.values.get("launcher") is not None:
            yield from self._named(self.values["launcher"], ("launcher",), LAUNCHERS, "launcher")
        yield from self._top()
        for name in ("callbacks", "loggers"):
            section = self.values.get(name, {})
            if not isinstance(section, dict):
                yield Problem(
                    (name,), f"must be a mapping of names to `{TARGET}` mappings, not {describe_value(section)}."
                )
                continue
            for one, value in section.items():
                yield from self._entry(value, (name, one), EXPECTED[name])

    def trainer_signature(self) -> Signature:
        """The arguments of Trainer, read from its dataclass."""
        found = self.sources.signature(self.sources.locate(_ARGUMENTS))
        assert found is not None, "TrainerArguments is a plain dataclass"
        return found

    def signature(self, path: str) -> Signature | None:
        """The arguments of the class at a path; None where only an import would tell."""
        if self.signatures.get(path) is None:
            found = self.sources.signature(self.sources.locate(path))
            if found is None and self.may_import:
                found = signature_of_class(load_class(path))
            self.signatures[path] = found
        return self.signatures[path]

    def target(self, value: Mapping[str, Any], key: Key, expected: str) -> Iterator[Problem]:
        """Every mistake in a mapping with `_target_`."""
        path = value[TARGET]
        if not isinstance(path, str):
            yield Problem((*key, TARGET), f"must be a dotted path to a class, not {describe_value(path)}.")
            return
        try:
            found = self.sources.locate(path)
            related = self._descends(found, expected)
            signature = self.signature(path) if related is not False else None
        except (LookupError, ConfigError) as error:
            yield Problem((*key, TARGET), f"cannot be imported: {error}{self._path_meant(path)}")
            return
        if related is False:
            yield Problem((*key, TARGET), f"{path!r} is not a subclass of {_short(expected)}, which this place needs.")
        elif signature is None:
            self.unread = True
        else:
            yield from self.arguments(value, key, path.rpartition(".")[2], signature)

    def arguments(self, value: Mapping[str, Any], key: Key, owner: str, signature: Signature) -> Iterator[Problem]:
        """Every mistake in the arguments that a mapping gives to a class."""
        known = signature.parameters
        for name, item in value.items():
            if name == TARGET:
                continue
            parameter = known.get(name)
            if parameter is not None:
                if not same(item, default_of(parameter)):
                    found = mismatches(type_of(parameter, self.sources), item, (*key, name), self.target)
                    yield from found or _out_of_range(key, name, item)
            elif signature.open and isinstance(name, str):
                yield from mismatches(Type("any"), item, (*key, name), self.target)
            else:
                hint = (
                    _argument_instead(key, name) or did_you_mean(str(name), known) or f" It takes {_list_names(known)}."
                )
                yield Problem((*key, name), f"is no argument of {owner}.{hint}")
        for name, parameter in known.items():
            if parameter.required and name not in value:
                wanted = type_of(parameter, self.sources)
                yield Problem(
                    (*key, name), f"is missing: {owner} needs it" + (f" ({wanted})." if wanted.kind != "any" else ".")
                )

    def _entry(self, value: Any, key: Key, expected: str) -> Iterator[Problem]:
        """Every mistake in what stands where a class must be named."""
        if is_target(value):
            yield from self.target(value, key, expected)
        elif not isinstance(value, dict):
            yield Problem(key, f"must be a mapping with `{TARGET}` and arguments, not {describe_value(value)}.")
        else:
            near = [one for one in self.values.get(str(key[0])) or () if one != key[-1]] if len(key) > 1 else []
            hint = did_you_mean(str(key[-1]), near) or f" Name a subclass of {_short(expected)}."
            yield Problem(key, f"has no `{TARGET}`.{hint}")

    def _trainer(self) -> Iterator[Problem]:
        section = self.values.get("trainer", {})
        if not isinstance(section, dict):
            yield Problem(("trainer",), f"must be a mapping of Trainer's arguments, not {describe_value(section)}.")
            return
        checked = {}
        for name, item in section.items():
            key: Key = ("trainer", name)
            if name in SECTION_OF:
                yield Problem(key, f"has a place of its own: write it under `{SECTION_OF[name]}:` at the top.")
            elif name in MOVED and _given(self.values, MOVED[name]):
                yield Problem(key, f"is set twice: {dotted(MOVED[name])} says the same. Keep that one.")
            elif name == "strategy" and not is_target(item):
                yield from self._named(item, key, {"auto": "", **STRATEGIES}, "strategy")
            else:
                checked[name] = item
        yield from self.arguments(checked, ("trainer",), "Trainer", self.trainer_signature())

    def _named(self, value: Any, key: Key, known: Mapping[str, str], kind: str) -> Iterator[Problem]:
        """Every mistake in a name, or a mapping of `name` and options, of a class that is `known` by that name."""
        name = value.get("name") if isinstance(value, dict) else value
        if not isinstance(name, str) or name not in known:
            what = "must be one of" if isinstance(value, str) else "must be, or have as its `name`, one of"
            hint = did_you_mean(name, known) if isinstance(name, str) else ""
            yield Problem(
                key, f"{what} {', '.join(known)}, not {describe_value(name if name is not None else value)}.{hint}"
            )
        elif isinstance(value, dict):
            options = {option: item for option, item in value.items() if option != "name"}
            signature = self.signature_of_named(f"{KIND_ROOMS[kind]}{known[name]}") if known[name] else Signature()
            if signature is not None:
                yield from self.arguments(options, key, f"the {kind} {name!r}", signature)

    def signature_of_named(self, home: str) -> Signature | None:
        """The arguments of the class at "room.module:Class" of the trainer."""
        try:
            return self.signature(f"{_PACKAGE_NAME}.trainer.{home.replace(':', '.')}")
        except LookupError:
            return None

    def _top(self) -> Iterator[Problem]:
        seed = self.values.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEED_LIMIT:
            yield Problem(("seed",), f"must be int from 0 to {_SEED_LIMIT - 1}, not {describe_value(seed)}.")
        run = self.values.get("run", {})
        if not isinstance(run, dict):
            yield Problem(("run",), f"must be a mapping with name and root, not {describe_value(run)}.")
        else:
            for name, item in run.items():
                if name not in ("name", "root"):
                    yield Problem(
                        ("run", name),
                        f"is no key of run.{did_you_mean(str(name), ('name', 'root'))} It has name, root.",
                    )
                elif not isinstance(item, str):
                    yield Problem(("run", name), f"must be str, not {describe_value(item)}. Put it in quotes.")
                elif (fault := (fault_of_name if name == "name" else fault_of_path)(item)) is not None:
                    yield Problem(("run", name), fault)
        for name, words in _WORDS.items():
            value = self.values.get(name)
            if value is not None and not isinstance(value, str):
                yield Problem(
                    (name,), f"must be {', '.join(map(repr, words))}, a path or null, not {describe_value(value)}."
                )

    def _descends(self, found: Definition, expected: str) -> bool | None:
        related = self.sources.is_subclass(found, expected)
        ours = expected.startswith(f"{_PACKAGE_NAME}.")
        if related is None and ours and found.dotted.partition(".")[0] in (*sys.stdlib_module_names, "torch", "numpy"):
            return False
        return related

    def _path_meant(self, name: str) -> str:
        """Return the path to the class of this name that Legato has, as a question."""
        for room in ("callbacks", "tasks", "trainer.loggers"):
            with suppress(LookupError):
                self.sources.locate(f"{_PACKAGE_NAME}.{room}.{name}")
                return f" Did you mean '{_PACKAGE_NAME}.{room}.{name}'?"
        return ""

    def _section_meant(self, name: Any) -> str:
        if name == "<<":
            return _argument_instead((), name)
        if isinstance(name, str) and name in self.trainer_signature().parameters:
            return f" Did you mean 'trainer.{name}'?"
        for section in ("task", "data"):
            with suppress(LookupError, ConfigError, KeyError, TypeError):
                signature = self.signature(self.values[section][TARGET])
                if signature is not None and name in signature.parameters:
                    return f" Did you mean '{section}.{name}'?"
        known = did_you_mean(str(name), SECTIONS) or f" The keys are {', '.join(SECTIONS)}."
        return f" {LIGHTNING_KEYS[name]}" if name in LIGHTNING_KEYS else known


def _out_of_range(key: Key, name: Any, value: Any) -> Iterator[Problem]:
    """A value of the right type that an argument of the trainer cannot be."""
    if key == ("trainer",):
        from ..arguments import ACCELERATORS, wanted

        expected = wanted(name, value)
        fault = fault_of_name(value) if name == "run_name" else None
        if fault is not None:
            yield Problem((*key, name), fault)
        elif expected is not None:
            hint = did_you_mean(value, ACCELERATORS) if name == "accelerator" else ""
            yield Problem((*key, name), f"must be {expected}, not {describe_value(value)}.{hint}")


def _argument_instead(key: Key, name: Any) -> str:
    """Return what to write for an argument of the trainer that stands elsewhere, or that Lightning's has."""
    if name == "<<":
        return " YAML 1.2 has no merge keys: start from another file (extends), or name single values as ${...}."
    if key != ("trainer",):
        return ""
    from ..arguments import INSTEAD

    return f" {INSTEAD[name]}" if name in INSTEAD else f" It stands at the top: {name}=..." if name in SECTIONS else ""


def load_class(path: str) -> type:
    """Import the class at a dotted path.

    Raises:
        ConfigError: there is none, or its module cannot be imported; the message says why.
    """
    parts = path.split(".")
    depth = max((at for at in range(1, len(parts)) if find_module(".".join(parts[:at])) is not None), default=0)
    module = ".".join(parts[:depth])
    if not module:
        raise ConfigError(f"there is no module {parts[0]!r}.")
    try:
        found: Any = import_module(module)
        for name in parts[depth:]:
            found = getattr(found, name)
    except AttributeError as error:
        if module in sys.modules and not hasattr(sys.modules[module], parts[depth]):
            hint = did_you_mean(parts[depth], dir(sys.modules[module]))
            raise ConfigError(f"module {module!r} has no {parts[depth]!r}.{hint}") from error
        raise ConfigError(f"importing {module!r} failed: {_blame(error)}") from error
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ConfigError(f"importing {module!r} failed: {_blame(error)}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{path!r} is not a class.")
    return found


def default_of(parameter: Parameter) -> Any:
    """The default as plain data; NO_DEFAULT where there is none that YAML could hold."""
    if parameter.default is None:
        return NO_DEFAULT
    try:
        value = ast.literal_eval(parameter.default)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return NO_DEFAULT
    return _as_plain(value)


def same(left: Any, right: Any) -> bool:
    """Whether two plain values are equal and of the same types."""
    return type(left) is type(right) and repr(left) == repr(right)


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        items = [_as_plain(item) for item in value]
        return NO_DEFAULT if NO_DEFAULT in items else items
    if isinstance(value, dict):
        pairs = {name: _as_plain(item) for name, item in value.items()}
        fits = all(isinstance(name, str) for name in pairs) and NO_DEFAULT not in pairs.values()
        return pairs if fits else NO_DEFAULT
    return value if value is None or isinstance(value, bool | int | float | str) else NO_DEFAULT


def _blame(error: BaseException) -> str:
    """The error and the line of the innermost file that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}."


def _given(values: Mapping[str, Any], key: Key) -> bool:
    inner: Any = values
    for name in key:
        if not isinstance(inner, dict) or name not in inner:
            return False
        inner = inner[name]
    return True


def _list_names(names: Iterable[str]) -> str:
    shown = list(names)
    return "no arguments" if not shown else ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")


def _short(path: str) -> str:
    """`Task` for Legato's own, the whole path for others."""
    return path.rpartition(".")[2] if path.startswith(f"{_PACKAGE_NAME}.") else path
