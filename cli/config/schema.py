"""JSON schema of a config, with which an editor completes and checks it: every key, its type, default and meaning.

The dialect is draft 7, which yaml-language-server knows best. Nothing but the classes that a given config names is
added to what Legato ships; of other classes the arguments are left open. No torch.
"""

import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ... import callbacks, loggers, tasks
from ...base.arguments import ACCELERATORS, LIMITS, MAY_BE_NONE, MINIMUM
from ...base.targets import PARTIAL, POSITIONAL, TARGET
from ...base.values import is_record, kind_of
from ...trainer.strategies import STRATEGIES
from ..launchers import LAUNCHERS
from .check import EXPECTED, RUN, SEED_COUNT, WORDS, Checker
from .read import SECTION_OF, SECTIONS
from .signatures import NO_DEFAULT, Parameter, Signature, documented_arguments

Schema = dict[str, Any]

PACKAGE = __name__.partition(".")[0]
SHIPPED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "task": (tasks, ("CharacterGPT", "Digits")),
    "data": (tasks, ("DigitsData", "PydocText")),
    "callbacks": (callbacks, tuple(name for name in callbacks.__all__ if name != "Callback")),
    "loggers": (loggers, tuple(name for name in loggers.__all__ if name not in ("Logger", "NoExperiment"))),
}
"""The classes that Legato ships for each section, and the package that has them."""
_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{"}
_SIMPLE: dict[str, Schema] = {
    "any": {},
    "bool": {"type": "boolean"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "path": {"type": "string"},
    "none": {"type": "null"},
    "timedelta": {"type": "string", "pattern": r"^\d{1,6}:\d\d:\d\d:\d\d$"},
    "opaque": {},
}


def config_schema(named: Iterable[tuple[str, str]] = ()) -> Schema:
    """Return the schema of a config.

    named: sections and paths of more classes, whose arguments are added.
    """
    return _Writer().config(list(named))


class _Writer:
    def __init__(self) -> None:
        self.checker = Checker({})
        self.sources = self.checker.sources

    def config(self, named: list[tuple[str, str]]) -> Schema:
        """Return the schema of the top level."""
        own: dict[str, Schema] = {
            "seed": {"type": "integer", "minimum": 0, "maximum": SEED_COUNT - 1, "default": 0},
            "run": self.mapping(RUN),
            **{name: self.of_type(expected) for name, expected in WORDS.items()},
            "vars": {"type": "object"},
            "trainer": self.trainer(),
            "launcher": _any_of([self.named("launcher", LAUNCHERS), {"type": "null"}]),
        }
        for section in EXPECTED:
            entry = self.entry(section, [path for owner, path in named if owner == section])
            null = {"type": "null"}
            items = {"type": "object", "additionalProperties": _any_of([entry, null])}
            own[section] = _any_of([entry if section in ("task", "data") else items, null])
        properties = {
            "extends": {
                "description": "Files to start from, relative to this one. Later ones, and this file, win.",
                **_any_of([{"type": "string"}, {"type": "array", "items": {"type": "string"}}]),
            },
            **{name: {"description": doc, **own[name]} for name, doc in SECTIONS.items()},
        }
        return {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "Config of Legato",
            "type": "object",
            "properties": {name: _or_interpolation(one) for name, one in properties.items()},
            "additionalProperties": False,
        }

    def trainer(self) -> Schema:
        """Return the schema of `trainer:`."""
        known = self.checker.trainer_signature().parameters
        found = self.mapping(Signature({name: one for name, one in known.items() if name not in SECTION_OF}))
        properties = found["properties"]
        target = self.target([], open_arguments=True)
        properties["strategy"] |= _any_of([self.named("strategy", {"auto": "", **STRATEGIES}), target, _INTERPOLATION])
        properties["accelerator"]["anyOf"][0] = {"enum": list(ACCELERATORS)}
        for name, least in {**MINIMUM, **dict.fromkeys(LIMITS, 0)}.items():
            numbers: list[Schema] = [{"type": "number" if name in LIMITS else "integer", "minimum": least}]
            numbers += [{"type": "null"}] if name in MAY_BE_NONE else []
            numbers += [{"type": "boolean"}] if name == "fast_dev_run" else []
            properties[name]["anyOf"] = [*numbers, _INTERPOLATION]
        return found

    def named(self, kind: str, known: Mapping[str, str]) -> Schema:
        """Return the schema of a strategy or launcher: a name, or a mapping of the name and options."""
        choices: list[Schema] = [{"enum": list(known)}]
        for name, home in known.items():
            signature = self.checker.signature_of_named(kind, home) if home else Signature()
            found = self.mapping(signature, self.documented(kind, home))
            found["properties"]["name"] = {"const": name}
            choices.append({**found, "required": ["name"]})
        return {"anyOf": choices}

    def entry(self, section: str, more: list[str]) -> Schema:
        """Return the schema of a mapping that names a class of a section, shipped or another."""
        package, names = SHIPPED[section]
        return self.target([*(f"{package.__name__}.{name}" for name in names), *more])

    def target(self, paths: list[str], open_arguments: bool = False) -> Schema:
        """Return the schema of a mapping with `_target_`: one of these, whose arguments are known, or another path."""
        known: list[Schema] = [{"enum": paths}] if paths else []
        name: Schema = {
            "description": "Dotted path of the class to build.",
            "anyOf": [*known, {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.\w+)+$"}, _INTERPOLATION],
        }
        rules = []
        for path in paths:
            signature = self.sources.signature(path)
            if signature is not None:
                places = list(dict.fromkeys([path, self.sources.locate(path).path]))
                then = self.mapping(signature, self.documentation(path))
                then["properties"][TARGET] = {}
                rules.append({"if": {"properties": {TARGET: {"enum": places}}, "required": [TARGET]}, "then": then})
        found: Schema = {"type": "object", "properties": {TARGET: name}}
        if open_arguments:
            found["required"] = [TARGET]
        return {**found, "allOf": rules} if rules else found

    def mapping(self, signature: Signature, docs: Mapping[str, str] | None = None) -> Schema:
        """Return the schema of the arguments of a signature."""
        properties = {
            name: self.parameter(one, (docs or {}).get(name, "")) for name, one in signature.parameters.items()
        }
        return {"type": "object", "properties": properties, "additionalProperties": signature.open}

    def parameter(self, parameter: Parameter, doc: str) -> Schema:
        """Return the schema of one argument: its type or an interpolation, its default, its documentation."""
        found = _or_interpolation(self.of_type(self.sources.type_of(parameter)))
        text = parameter.doc or doc
        if text:
            found["description"] = text
        if parameter.default is not NO_DEFAULT and not parameter.required:
            found["default"] = parameter.default
        return found

    def documentation(self, path: str) -> dict[str, str]:
        """Return what the docstrings of a class and its bases say of arguments."""
        found: dict[str, str] = {}
        for one in reversed(self.sources.lineage(self.sources.locate(path))):
            if one.kind == "class":
                found |= documented_arguments(one.docstring)
        return found

    def documented(self, kind: str, home: str) -> dict[str, str]:
        """Return the same for a strategy or launcher."""
        return self.documentation(self.checker.path_of_named(kind, home)) if home else {}

    def of_type(self, expected: Any) -> Schema:
        """Return the schema of values that an annotation accepts."""
        kind, parts = kind_of(expected), typing.get_args(expected)
        if kind == "annotated":
            return self.of_type(parts[0])
        if kind in _SIMPLE:
            return dict(_SIMPLE[kind])
        if kind == "union":
            return _any_of([self.of_type(one) for one in parts])
        if kind == "literal":
            return {"enum": list(parts)}
        if kind == "class":
            return self.nested()
        if kind == "mapping":
            values = self.of_type(parts[1]) if parts else {}
            return {"type": "object", **({"additionalProperties": _or_interpolation(values)} if values else {})}
        if is_record(kind, parts):
            items = [_or_interpolation(self.of_type(one)) for one in parts]
            return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
        item = self.of_type(parts[0]) if parts else {}
        return {"type": "array", **({"items": _or_interpolation(item)} if item else {})}

    def nested(self) -> Schema:
        """Return the schema of an argument that is built from a mapping."""
        found = self.target([], open_arguments=True)
        found["properties"][PARTIAL] = {"type": "boolean", "description": "Give a partial, to be called later."}
        found["properties"][POSITIONAL] = {"type": "array", "description": "Positional arguments."}
        return found


def targets_in(values: Any) -> Iterator[tuple[str, str]]:
    """Yield section and path of each class that the sections of a config name."""
    for section in EXPECTED:
        given = values.get(section) if isinstance(values, dict) else None
        entries = [given] if section in ("task", "data") else list(given.values()) if isinstance(given, dict) else []
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get(TARGET), str):
                yield section, entry[TARGET]


def _any_of(schemas: list[Schema]) -> Schema:
    """Return the schema of what one of these accepts; {} if one accepts everything."""
    flat = [one for each in schemas for one in (each["anyOf"] if each.keys() == {"anyOf"} else [each])]
    return {} if {} in flat else {"anyOf": flat}


def _or_interpolation(schema: Schema) -> Schema:
    """Return a schema that accepts an interpolation too."""
    notes: Schema = {name: schema[name] for name in ("description", "default") if name in schema}
    rest = {name: one for name, one in schema.items() if name not in notes}
    return {**notes, **_any_of([rest, _INTERPOLATION])} if rest else notes
