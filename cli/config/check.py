"""Checks a config against the classes that it names, reports all mistakes at once, and adds the defaults.

Nothing is imported for it but a class whose parameters its source does not determine.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

from ...base.errors import ConfigError, did_you_mean
from ...base.run_names import address_problem, name_problem, path_problem
from ...base.targets import PARTIAL, POSITIONAL, TARGET, misspelt_word
from ...base.values import Fitted, OnTarget, Problem, describe, describe_type, fit_value, is_target, same
from ...trainer.strategies import STRATEGIES
from ..launchers import LAUNCHERS
from .read import (
    MOVED,
    SECTION_OF,
    SECTIONS,
    Key,
    Layer,
    dotted,
    dump_yaml,
    escape,
    format_value,
    own_directory,
    read_config,
    replace_item,
)
from .signatures import NO_DEFAULT, Parameter, Signature, Sources

log = logging.getLogger("legato")

_PACKAGE_NAME = __name__.partition(".")[0]
_ARGUMENTS = f"{_PACKAGE_NAME}.base.arguments.TrainerArguments"
EXPECTED = {
    "task": f"{_PACKAGE_NAME}.tasks.task.Task",
    "data": f"{_PACKAGE_NAME}.tasks.data_module.DataModule",
    "callbacks": f"{_PACKAGE_NAME}.callbacks.callback.Callback",
    "loggers": f"{_PACKAGE_NAME}.loggers.logger.Logger",
}
"""The class that every `_target_` of a section must descend from."""
FOREIGN_KEYS = {
    "model": "It is `task` here: {_target_: my.Net, lr: 1}, without class_path and init_args.",
    "seed_everything": "It is `seed` here.",
    "ckpt_path": "It is `resume` for fit, `checkpoint` for validate, test and predict.",
    "hydra": "A run's directory is run.root and run.name, a multirun is `legato sweep`.",
}
"""Replacements for keys of a LightningCLI's or Hydra's config."""
STANDARD_TARGETS = ("collections.OrderedDict", "collections.deque", "datetime.timedelta", "pathlib.Path")
"""Classes of the standard library that a config may build; with all of it a config could run any program."""
_HYDRAS = {
    "_recursive_": "Leave it out: a nested `_target_` is always built.",
    "_convert_": "Leave it out: lists and mappings are always plain ones.",
}
_FOLDERS = {"strategy": "trainer.strategies", "launcher": "cli.launchers"}
WORDS: dict[str, Any] = {
    "resume": Literal["auto"] | Path | None,
    "checkpoint": Literal["best", "last", "none"] | Path | None,
}
RUN_TYPES = {"name": str, "root": str, "save_code": bool, "csv": bool}
RUN = Signature({name: Parameter(name, kind, NO_DEFAULT, required=False) for name, kind in RUN_TYPES.items()})
SEED_COUNT = 2**32
_SHOWN = 5  # mistakes in one message


@dataclass(frozen=True)
class Config(Layer):
    """A checked, resolved config, defaults included, with the origin of each value."""

    directory: Path | None = None
    """The run directory whose stored config this is, apart from overrides."""
    resumed: Path | None = None
    """The run that `resume=auto` has found by its name, and whose config this is, apart from overrides."""
    sources: Sources = field(default_factory=Sources, repr=False, compare=False)
    """The source files that were parsed to check it; the build uses them again."""

    def text(self, origins: bool = False) -> str:
        """Return the config as YAML that can be run again; `origins` adds the origin of each value as a comment.

        In place of a secret it has the name of the environment variable.
        """
        return dump_yaml(self.stored_values, self.origin if origins else None)

    @property
    def stored_values(self) -> dict[str, Any]:
        """The values as they are stored, to be read again: with references in place of secrets."""
        values: dict[str, Any] = escape(self.values)
        for key, text in self.secrets.items():
            values = replace_item(values, key, text)
        return values

    def to_run_again(self) -> "Config":
        """Return the config that a run directory stores: of a run that went on, one that begins it anew."""
        if self.values["resume"] != "auto":
            return self
        return replace(self, values=self.values | {"resume": None}, origins=self.origins | {("resume",): "default"})

    def override_words(self) -> list[str]:
        """Return the overrides as arguments of a command that is given this config as a file: resolved, one key each.

        Without those that say where the run is or how it is started, which the file itself must say.
        """

        def words(value: Any, key: Key) -> Iterator[str]:
            if isinstance(value, dict) and value:
                for name, item in value.items():
                    yield from words(item, (*key, name))
            elif self.origin(key).startswith("override"):
                yield f"{dotted(key)}={format_value(value)}"

        sections, stored = ("seed", "task", "data", "trainer", "callbacks", "loggers"), self.stored_values
        return [word for name in sections if name in stored for word in words(stored[name], (name,))]

    def given_text(self) -> str:
        """Return what files and overrides have set, without defaults, with the origin of each value as a comment."""

        def given(value: Any, key: Key) -> Any:
            if not isinstance(value, dict) or not value:
                return NO_DEFAULT if self.origin(key) == "default" else value
            items = {name: given(item, (*key, name)) for name, item in value.items()}
            return {name: item for name, item in items.items() if item is not NO_DEFAULT} or NO_DEFAULT

        return dump_yaml(given(self.stored_values, ()), self.origin)


def load_config(arguments: Sequence[str]) -> Config:
    """Read files and overrides, in the order of a command line, and check them.

    Raises ConfigError for mistakes; the message names up to five.
    """
    layer = read_config(arguments, Checker({}).default_of)
    found = replace(check_config(layer), directory=own_directory(arguments, layer))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("Config without defaults, and the origin of each value:\n%s", found.given_text().rstrip())
    return found


def check_config(layer: Layer) -> Config:
    """Check a merged layer, and add the defaults. Raises ConfigError for mistakes."""
    values = dict(layer.values)
    # an entry that is null takes one of an earlier file off
    for name in ("callbacks", "loggers"):
        section = {} if name in values and values[name] is None else values.get(name)
        if isinstance(section, dict):
            values[name] = {one: item for one, item in section.items() if item is not None}
    checker = Checker(values)
    problems = list(checker.problems())
    # Importing a class imports torch: only where its source does not tell, and only if nothing else is wrong.
    if not problems and checker.unread:
        checker.may_import = True
        problems = list(checker.problems())
    if problems:
        raise ConfigError(_message(problems, layer, checker.trainer_signature()))
    return checker.complete(layer)


def trainer_arguments() -> list[Parameter]:
    """Return every argument of Trainer with its type, default and meaning, as `base/arguments.py` has them."""
    return list(Checker({}).trainer_signature().parameters.values())


def launcher_arguments(name: str) -> list[Parameter]:
    """Return every key under `launcher:` for the launcher of that name."""
    return list(Checker({}).signature_of_named("launcher", LAUNCHERS[name]).parameters.values())


class Checker:
    """Checks the values of a config. `may_import`: import classes whose parameters their source does not determine."""

    def __init__(self, values: Mapping[str, Any], sources: Sources | None = None, may_import: bool = False) -> None:
        self.values, self.may_import = values, may_import
        self.sources = Sources() if sources is None else sources
        self.unread = False
        """Whether a class could not be checked, since its source does not determine its parameters."""

    def problems(self) -> Iterator[Problem]:
        """Yield every mistake in the config."""
        for name in self.values:
            if name not in SECTIONS:
                yield Problem((name,), f"is no key of a config.{self._section_meant(name)}")
        if self.values.get("task") is None:
            yield Problem(("task",), f"is missing: name a subclass of Task, as {{{TARGET}: my_module.MyTask}}.")
        if not isinstance(self.values.get("vars", {}), dict):
            yield Problem(("vars",), f"must be a mapping of names to values, not {describe(self.values['vars'])}.")
        for name in ("task", "data"):
            if self.values.get(name) is not None:
                yield from self._entry(self.values[name], (name,))
        yield from self._trainer()
        if self.values.get("launcher") is not None:
            yield from self._named(self.values["launcher"], ("launcher",), LAUNCHERS)
        yield from self._top()
        for name in ("callbacks", "loggers"):
            section = self.values.get(name, {})
            if not isinstance(section, dict):
                yield Problem((name,), f"must be a mapping of names to `{TARGET}` mappings, not {describe(section)}.")
                continue
            for one, value in section.items():
                yield from self._entry(value, (name, one))

    def trainer_signature(self) -> Signature:
        """Return the arguments of Trainer, read from its dataclass."""
        found = self.sources.signature(_ARGUMENTS)
        assert found is not None, "TrainerArguments is a plain dataclass"
        return found

    def path_of_named(self, kind: str, home: str) -> str:
        """Return the path of the strategy or launcher at "module:Class" of its folder."""
        return f"{_PACKAGE_NAME}.{_FOLDERS[kind]}{home.replace(':', '.')}"

    def signature_of_named(self, kind: str, home: str) -> Signature:
        """Return its arguments."""
        return self.sources.signature(self.path_of_named(kind, home), self.may_import) or Signature(open=True)

    def default_of(self, values: Any, key: Key) -> list[Any]:
        """Return the default of a key for these values, in a list; [] where it is not known without an import."""
        known: Mapping[str, Parameter] = {}
        with suppress(LookupError, ConfigError, TypeError, RecursionError, AttributeError):
            if key in MOVED.values():
                name = next(name for name, place in MOVED.items() if place == key)
                return [self.trainer_signature().parameters[name].default]
            entry = key[:-1]
            if entry == ("trainer",):
                known = self.trainer_signature().parameters
            elif is_entry(entry):
                given = reduce(getitem, entry, values)
                signature = self.sources.signature(given[TARGET])
                known = signature.parameters if signature is not None else {}
            default = known[str(key[-1])].default
            return [] if default is NO_DEFAULT else [default]
        return []

    def on_target(self, value: Mapping[str, Any], key: Key, expected: str) -> Fitted:
        """Check a mapping with `_target_`; the value is returned as it is."""
        path, partial, nested = value[TARGET], value.get(PARTIAL, False), not is_entry(key)
        if not isinstance(path, str):
            return value, [Problem((*key, TARGET), f"must be a dotted path to a class, not {describe(path)}.")]
        if not isinstance(partial, bool):
            return value, [Problem((*key, PARTIAL), f"must be bool, not {describe(partial)}.")]
        if nested and path.partition(".")[0] in sys.stdlib_module_names and path not in STANDARD_TARGETS:
            message = f"{path!r} is not built: of the standard library only {', '.join(STANDARD_TARGETS)} are."
            return value, [Problem((*key, TARGET), message)]
        try:
            related = self.sources.is_subclass(path, expected, functions=nested)
            signature = self.sources.signature(path, self.may_import) if related is not False else None
        except (LookupError, ConfigError, RecursionError) as error:
            return value, [Problem((*key, TARGET), f"cannot be imported: {error}{self._path_meant(path)}")]
        # None means that the source does not tell: no mistake until the class itself is looked at
        if related is False:
            message = f"{path!r} is not a subclass of {_short(expected)}, which is required here."
            return value, [Problem((*key, TARGET), message)]
        if signature is None:
            self.unread = True
            return value, []
        return value, self.arguments(value, key, path.rpartition(".")[2], signature, self.on_target)[1]

    def arguments(
        self, value: Mapping[str, Any], key: Key, owner: str, signature: Signature, on_target: OnTarget
    ) -> Fitted:
        """Check the arguments in a mapping, and convert them to the types of the parameters."""
        known, fitted, found = signature.parameters, {}, list[Problem]()
        words = (TARGET,) if is_entry(key) else (TARGET, PARTIAL)
        positional = list[str]()  # names of the parameters that `_args_` gives
        for name, item in value.items():
            if TARGET in value and name in words:
                continue
            if TARGET in value and name == POSITIONAL and not is_entry(key):
                positional = list(known)[: len(item)] if isinstance(item, list) else []
                fitted[name], problems = fit_value(list[Any], item, (*key, name), on_target)
                found += problems
            elif name in known:
                fitted[name], problems = fit_value(self.sources.type_of(known[name]), item, (*key, name), on_target)
                if not same(item, known[name].default):
                    found += problems or _out_of_range((*key, name), item)
            elif signature.open and isinstance(name, str) and not misspelt_word(name):
                fitted[name], problems = fit_value(Any, item, (*key, name), on_target)
                found += problems
            else:
                near = misspelt_word(name) if not is_entry(key) else ""
                near = near or did_you_mean(str(name), known)
                hint = _instead(key, name) or near or f" It takes {_list_names(known)}."
                found.append(Problem((*key, name), f"is no argument of {owner}.{hint}"))
        later = TARGET in value and not is_entry(key)
        for name, parameter in known.items():
            if (
                parameter.required
                and name not in value
                and name not in positional
                and not (later and value.get(PARTIAL))
            ):
                wanted = describe_type(self.sources.type_of(parameter))
                kind = f" ({wanted})" if wanted != "anything" else ""
                hint = f" If your code gives it, say {PARTIAL}: true." if later else ""
                found.append(Problem((*key, name), f"is missing: {owner} needs it{kind}.{hint}"))
        return fitted, found

    def complete(self, layer: Layer) -> Config:
        """Return the checked config with its sections in order, and with every default that plain data can hold."""
        known = self.trainer_signature()
        origins: dict[Key, str] = {("resume",): "default", ("checkpoint",): "default"}
        origins.update(layer.origins)
        values = {"resume": None, "checkpoint": None, **self.values, "run": dict(self.values.get("run", {}))}
        trainer = dict(self.values.get("trainer", {}))
        for name, key in MOVED.items():
            holder, last = (values["run"] if len(key) > 1 else values), str(key[-1])
            if name in trainer:
                holder[last], origins[key] = trainer.pop(name), layer.origin(("trainer", name))
            elif last not in holder:
                holder[last], origins[key] = known.parameters[name].default, "default"

        def filled(given: Mapping[str, Any], key: Key, known: Signature | None = None) -> dict[str, Any]:
            known = known or self.sources.signature(given[TARGET]) or Signature()
            defaults = {name: one.default for name, one in known.parameters.items() if one.default is not NO_DEFAULT}
            origins.update({(*key, name): "default" for name in defaults.keys() - given.keys()})
            order = [name for name in (TARGET, "name", *known.parameters) if name in given or name in defaults]
            return dict.fromkeys(order) | defaults | dict(given)

        own = {name: one for name, one in known.parameters.items() if name not in (*MOVED, *SECTION_OF)}
        values["trainer"] = filled(trainer, ("trainer",), Signature(own))
        for section in EXPECTED:
            given: Any = values.get(section)
            if is_target(given):
                values[section] = filled(given, (section,))
            elif given is not None:
                values[section] = {name: filled(one, (section, name)) for name, one in given.items()}
        if values.get("launcher") is not None:
            given = {"name": values["launcher"]} if isinstance(values["launcher"], str) else values["launcher"]
            options = self.signature_of_named("launcher", LAUNCHERS[given["name"]])
            values["launcher"] = filled(given, ("launcher",), options)
        kept = [name for name in SECTIONS if values.get(name) is not None or name in ("resume", "checkpoint")]
        return Config({name: values[name] for name in kept}, origins, layer.secrets, sources=self.sources)

    def _entry(self, value: Any, key: Key) -> Iterator[Problem]:
        """Yield every mistake in the value of a key that must name a class."""
        section = str(key[0])
        if not isinstance(value, dict):
            yield Problem(key, f"must be a mapping with `{TARGET}` and arguments, not {describe(value)}.")
        elif TARGET in value:
            yield from self.on_target(value, key, EXPECTED[section])[1]
        else:
            near = [one for one in self.values[section] if one != key[-1]] if len(key) > 1 else []
            hint = did_you_mean(str(key[-1]), near) or f" Name a subclass of {_short(EXPECTED[section])}."
            yield Problem(key, f"has no `{TARGET}`.{hint}")

    def _trainer(self) -> Iterator[Problem]:
        section = self.values.get("trainer", {})
        if not isinstance(section, dict):
            yield Problem(("trainer",), f"must be a mapping of Trainer's arguments, not {describe(section)}.")
            return
        checked = {}
        for name, item in section.items():
            key: Key = ("trainer", name)
            if name in SECTION_OF:
                yield Problem(key, f"has a section of its own: write it under `{SECTION_OF[name]}:` at the top level.")
            elif name in MOVED and _given(self.values, MOVED[name]):
                yield Problem(key, f"is set twice: {dotted(MOVED[name])} says the same. Keep that one.")
            elif name == "strategy" and not is_target(item):
                yield from self._named(item, key, {"auto": "", **STRATEGIES})
            else:
                checked[name] = item
        yield from self.arguments(checked, ("trainer",), "Trainer", self.trainer_signature(), self.on_target)[1]

    def _named(self, value: Any, key: Key, known: Mapping[str, str]) -> Iterator[Problem]:
        """Yield every mistake in the name of a `known` class, or in a mapping of such a `name` and options."""
        name, kind = value.get("name") if isinstance(value, dict) else value, str(key[-1])
        if not isinstance(name, str) or name not in known:
            what = "must be one of" if isinstance(value, str) else "must be, or have as its `name`, one of"
            hint = did_you_mean(name, known) if isinstance(name, str) else ""
            yield Problem(key, f"{what} {', '.join(known)}, not {describe(name if name is not None else value)}.{hint}")
        elif isinstance(value, dict):
            options = {option: item for option, item in value.items() if option != "name"}
            signature = self.signature_of_named(kind, known[name]) if known[name] else Signature()
            yield from self.arguments(options, key, f"the {kind} {name!r}", signature, self.on_target)[1]

    def _top(self) -> Iterator[Problem]:
        """Yield every mistake in `seed`, `run`, `resume` and `checkpoint`."""
        seed, run = self.values.get("seed", 0), self.values.get("run", {})
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_COUNT:
            yield Problem(("seed",), f"must be int from 0 to {SEED_COUNT - 1}, not {describe(seed)}.")
        if not isinstance(run, dict):
            yield Problem(("run",), f"must be a mapping with name and root, not {describe(run)}.")
        else:
            yield from self.arguments(run, ("run",), "run", RUN, self.on_target)[1]
        for name, expected in WORDS.items():
            if (problem := address_problem(self.values.get(name))) is not None:
                yield Problem((name,), problem)
                continue
            yield from fit_value(expected, self.values.get(name), (name,), self.on_target)[1]

    def _path_meant(self, path: str) -> str:
        """Suggest the path of Legato's class of this name, also where the path is that of a module which has moved."""
        name = path.rpartition(".")[2] if path.startswith(f"{_PACKAGE_NAME}.") else path
        for folder in ("callbacks", "tasks", "loggers", "lab"):
            with suppress(LookupError):
                self.sources.locate(f"{_PACKAGE_NAME}.{folder}.{name}")
                return f" Did you mean '{_PACKAGE_NAME}.{folder}.{name}'?"
        return ""

    def _section_meant(self, name: Any) -> str:
        if name == "<<":
            return _instead((), name)
        if name in self.trainer_signature().parameters:
            return f" Did you mean 'trainer.{name}'?"
        for section in ("task", "data"):
            with suppress(LookupError, ConfigError, KeyError, TypeError, AttributeError):
                signature = self.sources.signature(self.values[section][TARGET])
                if signature is not None and name in signature.parameters:
                    return f" Did you mean '{section}.{name}'?"
        if name == "defaults":
            return _extends_for(self.values[name])
        known = did_you_mean(str(name), SECTIONS) or f" The keys are {', '.join(SECTIONS)}."
        return f" {FOREIGN_KEYS[name]}" if name in FOREIGN_KEYS else known


def _out_of_range(key: Key, value: Any) -> list[Problem]:
    """Reject a value of the right type that is out of range for an argument of Trainer or a key of `run`."""
    from ...base.arguments import ACCELERATORS, wanted

    fault = None
    if key in (("run", "name"), ("trainer", "run_name")):
        fault = name_problem(value)
    elif key == ("run", "root"):
        fault = path_problem(value)
    elif key[0] == "trainer" and len(key) == 2 and (expected := wanted(str(key[1]), value)) is not None:
        hint = did_you_mean(value, ACCELERATORS) if key[1] == "accelerator" else ""
        fault = f"must be {expected}, not {describe(value)}.{hint}"
    return [Problem(key, fault)] if fault is not None else []


def _instead(key: Key, name: Any) -> str:
    """Suggest a replacement, as a sentence, for an argument of Trainer that is a top-level key or Lightning's."""
    from ...base.arguments import INSTEAD, TORCH_OPTIONS

    if name in _HYDRAS:
        return f" {_HYDRAS[name]}"
    if name == "<<":
        return " YAML 1.2 has no merge keys: start from another file (extends), or name single values as ${...}."
    if key == ("trainer", "strategy") and name in TORCH_OPTIONS:
        return f" {TORCH_OPTIONS[name]}"
    if key != ("trainer",):
        return ""
    return f" {INSTEAD[name]}" if name in INSTEAD else f" It is a top-level key: {name}=..." if name in SECTIONS else ""


def is_entry(key: Key) -> bool:
    """Return whether a key is one of those that must name a class: task, data, a callback or a logger."""
    return len(key) == {"task": 1, "data": 1, "callbacks": 2, "loggers": 2}.get(str(key[0]))


def _extends_for(defaults: Any) -> str:
    """Suggest, as sentences, what to write for Hydra's defaults list."""
    files = []
    for one in defaults if isinstance(defaults, list) else ():
        for group, option in one.items() if isinstance(one, dict) else ((None, one),):
            if option not in (None, "_self_"):
                files.append(f"{'' if group is None else str(group).split()[-1].strip('/') + '/'}{option}.yaml")
    return (
        f" Write `extends: [{', '.join(files)}]`: files relative to this one, each with whole keys such as `task:`;"
        " this file wins. Another choice is another file on the command line, after this one."
    )


def _given(values: Any, key: Key) -> bool:
    return not key or (isinstance(values, dict) and key[0] in values and _given(values[key[0]], key[1:]))


def _list_names(names: Mapping[str, Any]) -> str:
    shown = list(names)
    return "no arguments" if not shown else ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")


def _short(path: str) -> str:
    """Return `Task` for Legato's own, the whole path for others."""
    return path.rpartition(".")[2] if path.startswith(f"{_PACKAGE_NAME}.") else path


def _message(problems: Sequence[Problem], layer: Layer, known: Signature) -> str:
    """Return the message for one mistake, with the documentation of the argument; for several, one line each."""
    lines = [f"{layer.origin(one.key)}: {dotted(one.key)} {one.message}" for one in problems[:_SHOWN]]
    lines = [" ".join(line.splitlines()) for line in lines]
    if len(problems) > 1:
        more = f", the first {_SHOWN} of which are" if len(problems) > _SHOWN else ""
        return "\n".join([f"The config has {len(problems)} mistakes{more}:", *lines])
    section, *names = problems[0].key
    if section == "trainer" and names and names[0] in known.parameters:
        meant = known.parameters[str(names[0])]
        lines.append(f"`{meant}`. {meant.doc}")
    return "\n".join(lines)
