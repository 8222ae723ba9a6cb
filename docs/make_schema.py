"""Writes configs/legato.schema.json, which editors use to complete and check configs.

Run: python docs/make_schema.py     needs pydantic; a test compares the file with the signatures that it is made from
A config names the file in its first line: `# yaml-language-server: $schema=PATH`. Arguments of classes that are not
Legato's are not in it; `legato check` reads those.
"""

import inspect
import json
import types
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter

import legato
from legato.base.arguments import argument_texts, argument_types, documented_arguments
from legato.base.values import Range
from legato.cli.config.read import MOVED, SECTION_OF, SECTIONS

PATH = Path(__file__).resolve().parent.parent / "configs" / "legato.schema.json"
CLASSES = {
    "task": (legato.tasks, legato.Task),
    "data": (legato.tasks, legato.DataModule),
    "callbacks": (legato.callbacks, legato.Callback),
    "loggers": (legato.loggers, legato.loggers.Logger),
}
"""For each config section, the package that exports its classes, and their base class."""
INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
"""Any value may be an OmegaConf reference, ${trainer.max_epochs} or ${oc.env:NAME}."""


def plain(annotation: Any) -> Any:
    """Return the type of the YAML values that an annotation accepts; Any if YAML cannot express them."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        ranges = [bounds(rule) for rule in arguments[1:] if isinstance(rule, Range)]
        return Annotated[(plain(arguments[0]), *ranges)] if ranges else plain(arguments[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(map(plain, arguments))]  # noqa: UP007 - of a tuple that is made here
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return dict[str, Any]
    if origin in (list, tuple, set):
        return list[plain(arguments[0])]  # type: ignore[misc]
    if annotation is timedelta:
        return str | dict[str, float]
    if inspect.isclass(annotation) and issubclass(annotation, Path):
        return str
    return annotation if origin is Literal or annotation in (bool, int, float, str, None, type(None)) else Any


def bounds(numbers: Range) -> Any:
    """Return a range as a pydantic constraint."""
    most = None if numbers.most == float("inf") else numbers.most
    return Field(gt=numbers.least, le=most) if numbers.exclusive else Field(ge=numbers.least, le=most)


def properties(annotations: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of each argument, with its description."""
    described = {}
    for name, annotation in annotations.items():
        schema = TypeAdapter(plain(annotation)).json_schema()
        described[name] = {"anyOf": [schema, INTERPOLATION]} if schema else {}
        if name in texts:
            described[name]["description"] = texts[name]
    return described


def build_of(section: str) -> dict[str, Any]:
    """Return the schema of a mapping with `_target_`: it checks the arguments of Legato's classes only."""
    package, base = CLASSES[section]
    paths, rules = [], []
    for name in package.__all__:
        exported = getattr(package, name)
        if inspect.isclass(exported) and issubclass(exported, base) and exported is not base:
            names = [f"{package.__name__}.{name}", f"{exported.__module__}.{name}"]
            paths.append(names[0])
            hints, arguments = (
                get_type_hints(exported.__init__, include_extras=True),
                inspect.signature(exported).parameters,
            )
            schema = properties(
                {argument: hints.get(argument, Any) for argument in arguments},
                documented_arguments(inspect.getdoc(exported)),
            )
            then = {"properties": {"_target_": {}, **schema}, "additionalProperties": False}
            if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
                del then["additionalProperties"]
            rules.append({"if": {"properties": {"_target_": {"enum": names}}}, "then": then})
    target = {"anyOf": [{"enum": paths}, {"type": "string"}]}
    return {"type": ["object", "null"], "properties": {"_target_": target}, "allOf": rules}


def make_schema() -> dict[str, Any]:
    """Return the schema of a config."""
    arguments = argument_types()
    of_trainer = {name: hint for name, hint in arguments.items() if name not in {*MOVED, *SECTION_OF}}
    of_run = {path[1]: arguments[name] for name, path in MOVED.items() if len(path) == 2}
    described: dict[str, Any] = {
        "seed": properties({"seed": arguments["seed"]}, {})["seed"],
        "task": {"$ref": "#/$defs/task"},
        "data": {"$ref": "#/$defs/data"},
        "callbacks": {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/callbacks"}},
        "loggers": {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/loggers"}},
        "trainer": {
            "type": "object",
            "properties": properties(of_trainer, argument_texts()),
            "additionalProperties": False,
        },
        "run": {"type": "object", "properties": properties(of_run, {}), "additionalProperties": False},
        "resume": {"type": ["string", "null"]},
        "checkpoint": {"type": ["string", "null"]},
        "vars": {"type": "object"},
        "launcher": {"type": ["string", "object", "null"]},
    }
    sections: dict[str, Any] = {name: {**described[name], "description": text} for name, text in SECTIONS.items()}
    sections["extends"] = {"type": ["string", "array"], "description": "The config, or configs, to start from."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of Legato",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
        "$defs": {section: build_of(section) for section in CLASSES},
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(make_schema(), indent=1) + "\n", encoding="utf-8")
