"""Config: what a run is, read from YAML and overrides, checked before torch is imported, and built.

arguments --(layers: files, extends, overrides, ${...})--> entries --(config_check: signatures, types)--> Config
Config --(build: `_target_` classes, typed arguments)--> Run
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..launchers import LAUNCHERS
from . import read
from .check import (
    EXPECTED,
    MOVED,
    NO_DEFAULT,
    SECTION_OF,
    SECTIONS,
    TARGET,
    Checker,
    Key,
    Problem,
    convert,
    default_of,
    dotted,
    is_target,
    load_class,
    type_of,
)
from .read import Entry, dump_yaml
from .signatures import Signature, Sources

if TYPE_CHECKING:
    from ...tasks.data_module import DataModule
    from ...tasks.task import Task
    from ..checkpoints.store import StoredRun
    from ..trainer import Trainer

_SHOWN = 5  # mistakes in one message


@dataclass(frozen=True)
class Config:
    """A checked, resolved config, defaults included, with the origin of each value."""

    values: dict[str, Any]
    origins: Mapping[Key, str]
    directory: Path | None = None
    """The run directory whose own config this is, overrides aside."""

    def origin(self, key: Key) -> str:
        """Where a value came from: "file:line", "override", or "default"."""
        return origin_of(self.origins, key)

    def text(self, origins: bool = False) -> str:
        """The config as YAML that can be run again; `origins` adds to each line where its value is from."""
        return dump_yaml(read.escape(self.values), self.origin if origins else None)


@dataclass
class ConfiguredRun:
    """What a config describes, ready to start."""

    trainer: "Trainer"
    task: "Task"
    data: "DataModule | None"
    resume: str | None
    checkpoint: str | None
    directory: Path | None = None
    """The run directory whose own config this was made from."""

    def stored(self, word: str) -> "StoredRun":
        """Return the run on disk that the command line means."""
        from ..checkpoints.store import StoredRun

        return StoredRun(Path(self.trainer.default_root_dir), self.trainer.run_name, self.directory, word)


@dataclass(frozen=True)
class Argument:
    """One argument of Trainer, for the reference page, `--help` and the hints in errors."""

    name: str
    type: str
    default: str
    doc: str


def load_config(arguments: Sequence[str]) -> Config:
    """Read files and overrides, in the order of a command line, and check them.

    Raises:
        ConfigError: something is wrong; the message names every mistake, up to five.
    """
    entry = read.read_config(arguments)
    return replace(check_entry(entry), directory=read.own_directory(arguments, entry))


def check_entry(entry: Entry) -> Config:
    """Check what was read from files, and add the defaults.

    Raises:
        ConfigError: something is wrong.
    """
    values, origins, sources = entry.plain(), entry.origins(), Sources()
    for name in ("callbacks", "loggers"):
        if name in values and values[name] is None:
            values[name] = {}
        if isinstance(values.get(name), dict):
            values[name] = {one: item for one, item in values[name].items() if item is not None}
    checker = Checker(values, sources)
    problems = list(checker.problems())
    if not problems and checker.unread:
        checker = Checker(values, sources, may_import=True)
        problems = list(checker.problems())
    if problems:
        raise ConfigError(_message(problems, origins, checker.trainer_signature()))
    return _complete(values, origins, checker)


def build_config(config: Config) -> ConfiguredRun:
    """Build the task, its data, the callbacks, the loggers and the trainer, each under the config's seed.

    Raises:
        ConfigError: a `_target_` cannot be imported, or is of the wrong kind.
    """
    from ..data.randomness import seed_everything
    from ..trainer import Trainer

    builder = _InstanceBuilder(config)
    values = config.values

    def seeded(section: str) -> Any:
        # Each part's random numbers depend on the seed alone, not on what was built before it.
        seed_everything(values["seed"], verbose=False)
        return builder.target(values[section], (section,), EXPECTED[section])

    task = seeded("task")
    data = seeded("data") if "data" in values else None
    parts = {
        section: [builder.target(one, (section, name), EXPECTED[section]) for name, one in values[section].items()]
        for section in ("callbacks", "loggers")
        if section in values
    }
    signature = builder.checker.trainer_signature()
    arguments = builder.arguments(values["trainer"], ("trainer",), signature)
    try:
        trainer = Trainer(
            **arguments,
            callbacks=parts.get("callbacks"),
            logger=parts["loggers"] or False if "loggers" in parts else True,
            seed=values["seed"],
            run_name=values["run"]["name"],
            default_root_dir=values["run"]["root"],
        )
    except ConfigError as error:
        named = re.match(r"trainer\.(\w+)(?:: (\w+)=)?", str(error))  # an argument, and perhaps one of its options
        place = config.origin(("trainer", *filter(None, named.groups()))) if named else ""
        raise ConfigError(f"{place}: {error}" if named else str(error)) from error
    trainer.config_text = config.text()
    return ConfiguredRun(trainer, task, data, values["resume"], values["checkpoint"], config.directory)


def trainer_arguments() -> list[Argument]:
    """Every argument of Trainer with its type, default and meaning, as `trainer/arguments.py` has them."""
    sources = Sources()
    return list(_described(Checker({}, sources).trainer_signature()))


def launcher_arguments(name: str) -> list[Argument]:
    """Every key under `launcher:` for the launcher of that name."""
    found = Checker({}, Sources()).signature_of_named(f"launchers{LAUNCHERS[name]}")
    return [] if found is None else list(_described(found))


def origin_of(origins: Mapping[Key, str], key: Key) -> str:
    """The origin of a key, or of the nearest thing above it that has one."""
    return next((origins[key[:size]] for size in range(len(key), -1, -1) if key[:size] in origins), "default")


class _InstanceBuilder:
    """Makes instances of what a config names; checks once more, on the real classes, that they may be made."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.checker = Checker(config.values, Sources(), may_import=True)

    def target(self, value: Mapping[str, Any], key: Key, expected: str) -> Any:
        """Make an instance of a subclass of the class at the dotted path `expected`."""
        place = f"{self.config.origin((*key, TARGET))}: {dotted((*key, TARGET))}"
        try:
            cls, base = load_class(value[TARGET]), load_class(expected)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        # Not issubclass: an abstract base may take in classes that know nothing of it.
        if base is object or base not in cls.__mro__:
            raise ConfigError(f"{place}: {value[TARGET]!r} is not a subclass of {expected}, which this place needs.")
        signature = self.checker.signature(value[TARGET]) or Signature(open=True)
        try:
            return cls(**self.arguments({name: one for name, one in value.items() if name != TARGET}, key, signature))
        except ConfigError as error:
            if str(error).startswith(place.partition(":")[0]):  # of an argument that is itself built
                raise
            raise ConfigError(f"{self.config.origin(key)}: {dotted(key)}: {error}") from error

    def arguments(self, value: Mapping[str, Any], key: Key, signature: Signature) -> dict[str, Any]:
        """Turn plain arguments into those of the types that the signature names."""
        found = dict(value)
        for name in found.keys() & signature.parameters.keys():
            expected = type_of(signature.parameters[name], self.checker.sources)
            found[name] = convert(expected, found[name], (*key, name), self.checker.target, self.target)
        return found


def _complete(values: dict[str, Any], origins: dict[Key, str], checker: Checker) -> Config:
    """Put the sections into their order, and add every default that plain data can hold."""
    signature, origins = checker.trainer_signature(), dict(origins)
    trainer = dict(values.get("trainer", {}))
    values = {"resume": None, "checkpoint": None, **values, "run": dict(values.get("run", {}))}
    for name, key in MOVED.items():
        holder, last = (values["run"] if len(key) > 1 else values), str(key[-1])
        if name in trainer:
            holder[last], origins[key] = trainer.pop(name), origin_of(origins, ("trainer", name))
        elif last not in holder:
            holder[last], origins[key] = default_of(signature.parameters[name]), "default"

    def filled(given: Mapping[str, Any], key: Key, known: Signature | None) -> dict[str, Any]:
        whole = {TARGET: given[TARGET]} if is_target(given) else {}
        for name, parameter in known.parameters.items() if known is not None else ():
            default = default_of(parameter)
            if name in given:
                whole[name] = given[name]
            elif default is not NO_DEFAULT:
                whole[name] = default
                place: Key = (*key, name)
                origins[place] = "default"
        return {**whole, **given}

    own = {name: one for name, one in signature.parameters.items() if name not in (*MOVED, *SECTION_OF)}
    values["trainer"] = filled(trainer, ("trainer",), Signature(own))
    for section in ("task", "data", "callbacks", "loggers"):
        given: Any = values.get(section)
        if is_target(given):
            values[section] = filled(given, (section,), checker.signature(given[TARGET]))
        elif given is not None:
            values[section] = {
                name: filled(one, (section, name), checker.signature(one[TARGET])) for name, one in given.items()
            }
    if isinstance(values.get("launcher"), str):
        values["launcher"] = {"name": values["launcher"]}
    if values.get("launcher") is not None:
        given = values["launcher"]
        known = checker.signature_of_named(f"launchers{LAUNCHERS[given['name']]}")
        values["launcher"] = {"name": given["name"], **filled(given, ("launcher",), known)}
    origins |= {(name,): "default" for name in ("resume", "checkpoint") if (name,) not in origins}
    kept = [name for name in SECTIONS if values.get(name) is not None or name in ("resume", "checkpoint")]
    return Config({name: values[name] for name in kept}, origins)


def _message(problems: Sequence[Problem], origins: Mapping[Key, str], signature: Signature) -> str:
    """One mistake with what the argument means; several with a line each."""
    lines = [f"{origin_of(origins, one.key)}: {dotted(one.key)} {one.message}" for one in problems[:_SHOWN]]
    lines = [" ".join(line.splitlines()) for line in lines]
    if len(problems) > 1:
        more = f", the first {_SHOWN} of which are" if len(problems) > _SHOWN else ""
        return "\n".join([f"The config has {len(problems)} mistakes{more}:", *lines])
    key = problems[0].key
    for one in _described(signature):
        if key[:2] == ("trainer", one.name):
            lines.append(f"{one.name} ({one.type}, default {one.default}): {one.doc}")
    return "\n".join(lines)


def _described(signature: Signature) -> Iterator[Argument]:
    for one in signature.parameters.values():
        kind = ast.unparse(one.annotation) if one.annotation is not None else "Any"
        default = ast.unparse(one.default) if one.default is not None else "none"
        yield Argument(one.name, kind.strip("'"), default, one.doc)
