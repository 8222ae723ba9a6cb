"""Checks a config in two passes: first its keys, without importing torch, and then its values.

KeyChecker finds misspelled keys by checking them against the source files of the classes. It also finds wrong values in
`trainer`, in `run` and at the top level. ValueChecker imports the classes to get the types of their arguments. Each
checker reports all mistakes in one message.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from ...base.arguments import ARGUMENT_NAMES, INSTEAD, TORCH_OPTIONS, TrainerArguments, argument_texts, argument_types
from ...base.errors import ConfigError, correction, did_you_mean, nearest_name, suggestion
from ...base.location import place_problem
from ...base.run_names import name_problem
from ...base.targets import PARTIAL, POSITIONAL, TARGET, misspelt_word
from ...base.values import Fitted, Key, Problem, Rule, describe, fit, is_target, name_of, same
from ...trainer.strategies import STRATEGIES
from .classes import NO_DEFAULT, Parameter, Signature, argument_names, load, signature_of
from .read import (
    MOVED,
    SECTION_OF,
    SECTIONS,
    Layer,
    dotted,
    dump_yaml,
    escape,
    format_value,
    leaves,
    own_directory,
    read_config,
    replace_item,
)

log = logging.getLogger("legato")

_PACKAGE = __name__.partition(".")[0]
EXPECTED = {
    "task": f"{_PACKAGE}.tasks.task.Task",
    "data": f"{_PACKAGE}.tasks.data_module.DataModule",
    "callbacks": f"{_PACKAGE}.callbacks.callback.Callback",
    "loggers": f"{_PACKAGE}.loggers.logger.Logger",
}
"""Base class that each section's `_target_` must inherit from."""
FOREIGN = {
    "model": "Write `task: {_target_: my.Net, lr: 1}`, without class_path and init_args.",
    "seed_everything": "Write `seed`.",
    "ckpt_path": "Write `resume` for fit, `checkpoint` for validate, test and predict.",
    "hydra": "Set the run directory with run.root and run.name; for a multirun, use `legato sweep`.",
    "defaults": "Write `extends: [base.yaml, net.yaml]`: this file overrides those, key by key.",
    "_recursive_": "Remove it: a nested `_target_` is always built.",
    "_convert_": "Remove it: lists and mappings are always plain.",
    "<<": "YAML 1.2 has no merge keys: use `extends` for a file, or ${...} for a value.",
}
"""What to write instead of keys from LightningCLI, Hydra and YAML 1.1."""
ALTERNATIVES: dict[Key, Mapping[str, str]] = {
    ("trainer",): INSTEAD | {name: f"It is a top-level key: write {name}=..." for name in SECTIONS},
    ("trainer", "strategy"): TORCH_OPTIONS,
    ("run",): {"csv": INSTEAD["write_csv"]},
}
"""What to write instead of arguments from other libraries, earlier versions and other sections, by section."""
BUILDABLE = ("collections.OrderedDict", "collections.deque", "datetime.timedelta", "pathlib.Path")
"""Standard library classes that a config may build. Other classes could run arbitrary programs."""
LAUNCHERS = {
    "slurm": ".slurm:SlurmLauncher",
    "ray": ".ray:RayLauncher",
    "kubernetes": ".kubernetes:KubernetesLauncher",
}
"""Module and class of each launcher, by name. A module is imported only if a config uses its launcher."""
_FOLDERS = {"strategy": f"{_PACKAGE}.trainer.strategies", "launcher": f"{_PACKAGE}.cli.launchers"}
_SHOWN = 5  # maximum number of mistakes in a message


def _parameter(name: str, kind: Any = None) -> Parameter:
    default = TrainerArguments.__dataclass_fields__[name].default
    assert default is not MISSING
    return Parameter(kind or argument_types()[name], default, False)


TRAINER = Signature({name: _parameter(name) for name in argument_types() if name not in (*MOVED, *SECTION_OF)})
"""The arguments of Trainer in the `trainer` section."""
RUN = Signature({
    "name": _parameter("run_name"),
    "root": _parameter("default_root_dir", str),
    "save_code": _parameter("save_code"),
})  # fmt: skip
Place = Annotated[str, Rule("a path", bool)]
"""A path, or a URL in an object store. It is kept as a string, because Path would drop a slash."""
TOP = Signature({
    "seed": _parameter("seed"),
    "resume": Parameter(Literal["auto"] | Place | None, None, False),
    "checkpoint": Parameter(Literal["best", "last", "none"] | Place | None, None, False),
    "vars": Parameter(dict[str, Any], NO_DEFAULT, False),
})  # fmt: skip
_SIGNATURES = {"trainer": TRAINER, "run": RUN}


@dataclass(frozen=True)
class Config(Layer):
    """A checked and resolved config, with all defaults and the origin of each value."""

    directory: Path | None = None
    """The run directory that stores this config, except for overrides."""
    resumed: Path | None = None
    """The run that `resume=auto` found by name. Its directory stores this config, except for overrides."""

    def text(self, origins: bool = False) -> str:
        """Return the config as YAML that can be run again. If `origins` is set, comments state each value's origin.

        Secrets are replaced with references to environment variables.
        """
        return dump_yaml(self.stored_values, self.origin if origins else None)

    def given_text(self) -> str:
        """Return the values from files and overrides, without defaults, as YAML with their origins as comments."""
        return dump_yaml(self._without_defaults(self.stored_values, ()), self.origin)

    def _without_defaults(self, value: Any, key: Key) -> Any:
        if not isinstance(value, dict) or not value:
            return NO_DEFAULT if self.origin(key) == "default" else value
        items = {name: self._without_defaults(item, (*key, name)) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not NO_DEFAULT} or NO_DEFAULT

    @property
    def stored_values(self) -> dict[str, Any]:
        """The values to write to a file, with `${` escaped and secrets replaced with references."""
        values: dict[str, Any] = escape(self.values)
        for key, text in self.secrets.items():
            values = replace_item(values, key, text)
        return values

    def changed(self, trainer: Mapping[str, Any] = MappingProxyType({}), **sections: Any) -> "Config":
        """Return the config with changed Trainer arguments and sections. None removes a section."""
        values = {**self.values, **sections, "trainer": {**self.values["trainer"], **trainer}}
        return replace(self, values=_without_absent(values))

    def to_run_again(self) -> "Config":
        """Return the config to store in the run directory, without `resume=auto`, so that using it starts a new run."""
        if self.values["resume"] != "auto":
            return self
        return replace(self.changed(resume=None), origins=self.origins | {("resume",): "default"})

    def override_words(self) -> list[str]:
        """Return the resolved overrides as arguments, one per key, for a command that reads the config's file."""

        # without run, resume, checkpoint and vars, which are in the file
        sections = ("seed", "task", "data", "trainer", "callbacks", "loggers")
        return [
            f"{dotted(key)}={format_value(value)}"
            for key, value in leaves(self.stored_values, ())
            if key[0] in sections and self.origin(key).startswith("override")
        ]


def load_config(words: Sequence[str], before_imports: Callable[[Mapping[str, Any]], None] | None = None) -> Config:
    """Read files and overrides in command-line order, and check them.

    Args:
        before_imports: Function to call with the values after keys are checked and before classes are imported.
            Importing may be slow.

    Raises ConfigError with a list of up to five mistakes: in keys or, if all keys are correct, in values.
    """
    layer = read_config(words, own_defaults())
    config = check_config(layer, before_imports)
    # depends on the origin of run.name, which only the merged layer has
    config = replace(config, directory=own_directory(words, layer))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("Config without defaults, and the origin of each value:\n%s", config.given_text().rstrip())
    return config


def check_config(layer: Layer, before_imports: Callable[[Mapping[str, Any]], None] | None = None) -> Config:
    """Check a merged layer and add defaults. Raises ConfigError as `load_config` does."""
    values = dict(layer.values)
    # null removes an entry from an earlier file
    for name in ("callbacks", "loggers"):
        section = {} if name in values and values[name] is None else values.get(name)
        if isinstance(section, dict):
            values[name] = {entry: item for entry, item in section.items() if item is not None}
    # keys first: if a key is misspelled, values need no check, and importing torch takes three seconds
    _require_none(KeyChecker(values).problems(), layer)
    if before_imports is not None:
        before_imports(values)
    _require_none(ValueChecker(values).problems(), layer)
    return _completed(values, layer)


def _require_none(problems: Iterable[Problem], layer: Layer) -> None:
    mistakes = list(problems)
    if mistakes:
        raise ConfigError(_message(mistakes, layer))


def entries(values: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Yield the key and value of each config entry that must specify a class: task, data, callbacks and loggers."""
    for section in EXPECTED:
        value = values.get(section)
        if section in ("task", "data"):
            if value is not None:
                yield (section,), value
        elif isinstance(value, dict):
            yield from (((section, name), entry) for name, entry in value.items())


def is_entry(key: Key) -> bool:
    """Return whether a key belongs to an entry that must specify a class."""
    return len(key) == {"task": 1, "data": 1, "callbacks": 2, "loggers": 2}.get(str(key[0]))


def class_path(kind: str, name: str) -> str:
    """Return the dotted path of a strategy or launcher."""
    home = (STRATEGIES if kind == "strategy" else LAUNCHERS)[name]
    return f"{_FOLDERS[kind]}{home.replace(':', '.')}"


def options_of(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and options of a strategy or launcher. Its value in the config may be just a name."""
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    return options.pop("name"), options


def own_defaults() -> dict[str, Any]:
    """Return the defaults of Legato's own keys, without importing any class."""

    def defaults(signature: Signature) -> dict[str, Any]:
        parameters = signature.parameters.items()
        return {name: parameter.default for name, parameter in parameters if parameter.default is not NO_DEFAULT}

    return {**defaults(TOP), **{name: defaults(signature) for name, signature in _SIGNATURES.items()}}


# --- keys -------------------------------------------------------------------------------------------------------------
class KeyChecker:
    """Finds unknown keys, and wrong values in `trainer`, in `run` and at the top level, without importing torch."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def problems(self) -> Iterator[Problem]:
        """Yield every mistake."""
        for name in self.values:
            if name not in SECTIONS:
                near, advice = self._nearest_key(name), FOREIGN.get(name) or f"The keys are {', '.join(SECTIONS)}."
                yield Problem((name,), f"is not a config key.{suggestion(near) or f' {advice}'}", near)
        if self.values.get("task") is None:
            yield Problem(("task",), f"is missing. Write task: {{{TARGET}: my_module.MyTask}}, a subclass of Task.")
        for key, value in entries(self.values):
            yield from self._entry(key, value)
        for name, check in (("trainer", self._trainer), ("run", self._run)):
            section = self.values.get(name, {})
            if isinstance(section, dict):
                yield from check(section)
            else:
                yield Problem((name,), f"must be a mapping, not {describe(section)}.")
        if self.values.get("launcher") is not None:
            yield from self._named(self.values["launcher"], ("launcher",), LAUNCHERS)
        for name, parameter in TOP.parameters.items():
            if name in self.values:
                yield from fit(parameter.type, self.values[name], (name,), _left_for_later)[1]
        yield from self._addresses()
        for name in ("callbacks", "loggers"):
            if not isinstance(self.values.get(name, {}), dict):
                message = f"must map names to `{TARGET}` mappings, not {describe(self.values[name])}."
                example = correction(f"{name}: [{{{TARGET}: ...}}]", f"{name}: {{my_name: {{{TARGET}: ...}}}}")
                yield Problem((name,), message, example=example)

    def _addresses(self) -> Iterator[Problem]:
        """Yield the mistakes in object-store URLs, including missing packages."""
        places: list[tuple[Key, Any, bool]]
        places = [
            (("resume",), self.values.get("resume"), False),
            (("checkpoint",), self.values.get("checkpoint"), False),
        ]
        for key, value in entries(self.values):
            if key[0] == "callbacks" and isinstance(value, dict):
                places.append(((*key, "dirpath"), value.get("dirpath"), True))
        for key, place, writes in places:
            if isinstance(place, str) and ":/" in place and (problem := place_problem(place, writes)) is not None:
                yield Problem(key, problem)

    def _trainer(self, section: Mapping[Any, Any]) -> Iterator[Problem]:
        for name, value in section.items():
            key: Key = ("trainer", name)
            if name in SECTION_OF:
                yield Problem(key, f"is a top-level section: write it under `{SECTION_OF[name]}:`.")
            elif name in MOVED:
                yield Problem(key, f"has moved: write {dotted(MOVED[name])}.")
            elif name not in TRAINER.parameters:
                yield _unknown_argument(key, "Trainer", TRAINER.parameters, nearest_name(str(name), ARGUMENT_NAMES))
            # a name from a table, whose class is parsed from source rather than imported
            elif name == "strategy" and not is_target(value):
                yield from self._named(value, key, {"auto": "", **STRATEGIES})
            else:
                yield from fit(TRAINER.parameters[name].type, value, key, self.check)[1]

    def _run(self, section: Mapping[Any, Any]) -> Iterator[Problem]:
        for name, value in section.items():
            key: Key = ("run", name)
            if name not in RUN.parameters:
                yield _unknown_argument(key, "run", RUN.parameters)
                continue
            mistakes = fit(RUN.parameters[name].type, value, key, _left_for_later)[1]
            checks: dict[str, Callable[[str], str | None]] = {"name": name_problem, "root": place_problem}
            check = checks.get(name)
            if not mistakes and check is not None and (fault := check(value)) is not None:
                mistakes = [Problem(key, fault)]
            yield from mistakes

    def _named(self, value: Any, key: Key, choices: Mapping[str, str]) -> Iterator[Problem]:
        """Yield the mistakes in a strategy or launcher: its name, or a mapping with `name` and options."""
        name, kind = value.get("name") if isinstance(value, dict) else value, str(key[-1])
        if not isinstance(name, str) or name not in choices:
            start = "must be one of" if isinstance(value, str) else "must be, or have as `name`, one of"
            near = nearest_name(name.lower(), choices) if isinstance(name, str) else ""
            shown = describe(name if name is not None else value)
            yield Problem(key, f"{start} {', '.join(choices)}, not {shown}.{suggestion(near)}", right_value=near)
        elif isinstance(value, dict):
            signature = self.signature(class_path(kind, name)) if choices[name] else Signature({})
            yield from self.arguments(options_of(value)[1], key, f"the {kind} {name!r}", signature)[1]

    def _entry(self, key: Key, value: Any) -> Iterator[Problem]:
        """Yield the mistakes in an entry, which must be a mapping with `_target_` and arguments."""
        if not isinstance(value, dict):
            example = correction(f"{key[-1]}: {value}", f"{key[-1]}: {{{TARGET}: {value}}}")
            message = f"must be a mapping with `{TARGET}` and arguments, not {describe(value)}."
            yield Problem(key, message, example=example if isinstance(value, str) and "." in value else "")
        elif TARGET not in value:
            # usually an override that misspells the entry's name
            siblings = [name for name in self.values[str(key[0])] if name != key[-1]] if len(key) > 1 else []
            expected = EXPECTED[str(key[0])].rpartition(".")[2]
            hint = did_you_mean(str(key[-1]), siblings) or f" Set it to a subclass of {expected}."
            paths = [(name, path) for name, path in value.items() if str(name).strip("_") == "target"]
            example = correction(f"{paths[0][0]}: {paths[0][1]}", f"{TARGET}: {paths[0][1]}") if paths else ""
            yield Problem(key, f"has no `{TARGET}`.{hint}", example=example)
        elif not isinstance(value[TARGET], str):
            yield Problem((*key, TARGET), f"must be a dotted path to a class, not {describe(value[TARGET])}.")
        else:
            yield from self.check(value, key, object)[1]

    def signature(self, path: str) -> Signature:
        """Return the argument names of the object at a dotted path."""
        names = argument_names(path)
        return Signature({name: Parameter(Any, NO_DEFAULT, False) for name in names or ()}, open=names is None)

    def fit(self, kind: Any, value: Any, key: Key) -> Fitted:
        """Check every object that is to be built for an argument. The argument's type is ignored."""
        if is_target(value):
            return self.check(value, key, object)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return value, [problem for name, item in items for problem in self.fit(kind, item, (*key, name))[1]]

    def check(self, value: Mapping[str, Any], key: Key, base: type) -> Fitted:
        """Check a mapping with `_target_` that must build an instance of `base`. The value is returned unchanged."""
        if not isinstance(value.get(PARTIAL, False), bool) and not is_entry(key):
            return value, [Problem((*key, PARTIAL), f"must be bool, not {describe(value[PARTIAL])}.")]
        path = str(value[TARGET])
        return value, self.arguments(value, key, path.rpartition(".")[2], self.signature(path))[1]

    def arguments(self, value: Mapping[str, Any], key: Key, owner: str, signature: Signature) -> Fitted:
        """Check the arguments in a mapping and convert each to the type of its parameter."""
        parameters, fitted, mistakes = signature.parameters, {}, list[Problem]()
        # an entry cannot be a partial: the trainer needs the task itself
        nested = TARGET in value and not is_entry(key)
        args: Any = value.get(POSITIONAL) if nested else None
        positional = list(parameters)[: len(args)] if isinstance(args, list) else []
        for name, item in value.items():
            inner: Key = (*key, name)
            if TARGET in value and (name == TARGET or (nested and name == PARTIAL)):
                continue
            is_open = signature.open and isinstance(name, str) and not misspelt_word(name)
            if name in parameters or (nested and name == POSITIONAL) or is_open:
                kind = list[Any] if name == POSITIONAL else parameters[name].type if name in parameters else Any
                fitted[name], wrong = self.fit(kind, item, inner)
                # a config may repeat a default that does not match its annotation
                mistakes += [] if name in parameters and same(item, parameters[name].default) else wrong
            else:
                mistakes.append(_unknown_argument(inner, owner, parameters, misspelt_word(name) if nested else ""))
        # the caller of a partial passes the missing arguments
        is_partial = nested and value.get(PARTIAL)
        for name, parameter in parameters.items():
            if parameter.required and name not in value and name not in positional and not is_partial:
                kind = "" if parameter.type is Any else f" ({name_of(parameter.type)})"
                hint = f" If your code passes it, write {PARTIAL}: true." if nested else ""
                mistakes.append(Problem((*key, name), f"is missing: {owner} requires it{kind}.{hint}"))
        return fitted, mistakes

    def _nearest_key(self, name: Any) -> str:
        """Return the dotted key that an unknown top-level key was probably meant to be; "" if there is none."""
        if name in (*TRAINER.parameters, *MOVED):
            return dotted(MOVED[name]) if name in MOVED else f"trainer.{name}"
        for section in ("task", "data"):
            value = self.values.get(section)
            if is_target(value) and name in (argument_names(str(value[TARGET])) or ()):
                return f"{section}.{name}"
        return "" if name in FOREIGN else nearest_name(str(name), SECTIONS)


# --- values -----------------------------------------------------------------------------------------------------------
class ValueChecker(KeyChecker):
    """Imports the classes in a config and checks each argument against its annotation."""

    def signature(self, path: str) -> Signature:
        """Return the arguments of the object at a dotted path, with their types."""
        return signature_of(load(path))

    def fit(self, kind: Any, value: Any, key: Key) -> Fitted:
        """Check an argument against its type."""
        return fit(kind, value, key, self.check)

    def check(self, value: Mapping[str, Any], key: Key, base: type) -> Fitted:
        """Check a mapping, whose `_target_` must be a subclass of `base` or of the section's base class."""
        try:
            find_target(value, key, load(EXPECTED[str(key[0])]) if is_entry(key) else base)
        except ConfigError as error:
            return value, [Problem((*key, TARGET), str(error))]
        return super().check(value, key, base)


def find_target(value: Mapping[str, Any], key: Key, base: type) -> Any:
    """Import a mapping's `_target_`. Raises ConfigError unless it is a subclass of `base` or, if nested, a function."""
    path, nested = value[TARGET], not is_entry(key)
    if not isinstance(path, str):
        raise ConfigError(f"must be a dotted path to a class, not {describe(path)}.")
    # a config may come from an untrusted source, and os.system is a function
    if nested and path.partition(".")[0] in sys.stdlib_module_names and path not in BUILDABLE:
        raise ConfigError(
            f"{path!r} is rejected: from the standard library, configs may use only {', '.join(BUILDABLE)}."
        )
    try:
        target = load(path)
    except ConfigError as error:
        raise ConfigError(f"cannot be imported: {error}{_path_meant(path)}") from error
    if not isinstance(target, type) and not (nested and callable(target)):
        kind = "function" if callable(target) else "module" if type(target).__name__ == "module" else "value"
        raise ConfigError(f"{path!r} is a {kind}, not a class{' or function' if nested else ''}.")
    if isinstance(target, type) and base not in target.__mro__:  # not issubclass: ABCs may register other classes
        raise ConfigError(f"{path!r} is not a subclass of {class_name(base)}, which is required here.")
    return target


def class_name(base: type) -> str:
    """Return the name of a class in Legato, such as "Task", or the dotted path of any other class."""
    ours = base.__module__.startswith(f"{_PACKAGE}.")
    return base.__name__ if ours else f"{base.__module__}.{base.__qualname__}"


def _path_meant(path: str) -> str:
    """Suggest the path of the Legato class with the given name, even if the class has moved to another module."""
    # uses the last component, since classes have moved between packages without being renamed
    name = path.rpartition(".")[2] if path.startswith(f"{_PACKAGE}.") else path
    for room in ("callbacks", "tasks", "loggers", "lab"):
        home = f"{_PACKAGE}.{room}"
        with suppress(ConfigError):
            return f" Did you mean '{home}.{name}'?" if load(f"{home}.{name}") else ""
    return ""


# --- defaults ---------------------------------------------------------------------------------------------------------
def _completed(values: Mapping[str, Any], layer: Layer) -> Config:
    """Return the config with its sections in order and with all defaults that are plain data."""
    origins: dict[Key, str] = dict(layer.origins)

    def filled(section: Mapping[str, Any], key: Key, signature: Signature) -> dict[str, Any]:
        parameters = signature.parameters.items()
        defaults = {name: parameter.default for name, parameter in parameters if parameter.default is not NO_DEFAULT}
        origins.update({(*key, name): "default" for name in defaults.keys() - section.keys()})
        # in signature order, so that a stored config reads like the class
        order = [name for name in (TARGET, "name", *signature.parameters) if name in section or name in defaults]
        return dict.fromkeys(order) | defaults | dict(section)

    complete = {**values, **filled({name: values[name] for name in TOP.parameters if name in values}, (), TOP)}
    for name, signature in _SIGNATURES.items():
        complete[name] = filled(values.get(name, {}), (name,), signature)
    for key, value in entries(values):
        complete = replace_item(complete, key, filled(value, key, signature_of(load(value[TARGET]))))
    if values.get("launcher") is not None:
        name, options = options_of(values["launcher"])
        signature = signature_of(load(class_path("launcher", name)))
        complete["launcher"] = filled({"name": name, **options}, ("launcher",), signature)
    return Config(_without_absent(complete), origins, layer.secrets)


def _without_absent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that are not null, in order. Keep `resume` and `checkpoint`, for which null is meaningful."""
    kept = [name for name in SECTIONS if values.get(name) is not None or name in ("resume", "checkpoint")]
    return {name: values[name] for name in kept}


# --- messages ---------------------------------------------------------------------------------------------------------
def _left_for_later(value: Any, key: Key, base: Any) -> Fitted:
    return value, []


def _unknown_argument(key: Key, owner: str, names: Iterable[str], near: str = "") -> Problem:
    """Return the problem with an unknown argument, suggesting an alternative, the nearest name or a list of names."""
    name, names = str(key[-1]), list(names)
    texts = {**ALTERNATIVES.get(key[:-1], {}), **(FOREIGN if name.startswith(("_", "<")) else {})}
    if name in texts:
        return Problem(key, f"is not an argument of {owner}. {texts[name]}")
    near = near or nearest_name(name, names)
    hint = (
        suggestion(near) or f" It takes {', '.join(names[:12]) or 'no arguments'}{', ...' if len(names) > 12 else ''}."
    )
    return Problem(key, f"is not an argument of {owner}.{hint}", near)


def _message(mistakes: Sequence[Problem], layer: Layer) -> str:
    """Return an error message with one line per mistake. For a single mistake, add the argument's documentation."""
    shown = mistakes[:_SHOWN]
    lines = [" ".join(f"{layer.origin(key)}: {dotted(key)} {text}".splitlines()) for key, text, *_ in shown]
    if len(mistakes) > 1:
        more = f"; the first {_SHOWN}" if len(mistakes) > _SHOWN else ""
        return "\n".join([f"The config has {len(mistakes)} mistakes{more}:", *lines])
    section, *names = mistakes[0].key
    text = argument_texts().get(str(names[0]), "") if section == "trainer" and names else ""
    return lines[0] + (mistakes[0].example or _example(mistakes[0], layer)) + (f"\n{text}" if text else "")


def _example(mistake: Problem, layer: Layer) -> str:
    """Return the incorrect and the corrected line (or override) for a mistake with a suggestion, otherwise ""."""
    key, _, right_name, right_value, _ = mistake
    value: Any = layer.values
    for name in key:
        value = value[name] if isinstance(value, dict) and name in value else None
    if not (right_name or right_value) or isinstance(value, dict | list | None) or key in layer.secrets:
        return ""
    # as in the file: without quotes, unless only they are wrong
    shown = str(value) if right_value and right_value != str(value) else format_value(value)
    if layer.origin(key).startswith("override"):
        renamed = dotted((*key[:-1], right_name or key[-1]))
        return correction(f"{dotted(key)}={shown}", f"{renamed}={right_value or shown}")
    section, _, inner = right_name.partition(".")
    moved = f"{section}: {{{inner}: {shown}}}" if inner else f"{section or key[-1]}: {right_value or shown}"
    return correction(f"{key[-1]}: {shown}", moved)
