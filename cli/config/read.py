"""Reads YAML files and overrides into one layer of plain data, with the place that each value came from.

The dialect is YAML 1.2's core schema: only true and false are booleans, so `reproducible: off` is the string "off",
and 1e-3 is a number. YAML 1.1, PyYAML's default, reads off as False, 1e-3 as a string and 1:30 as 90. Tags, repeated
keys and Python objects are rejected.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ...base.environment import get_variable
from ...base.errors import ConfigError, did_you_mean
from ...base.messages import LEVELS
from ...base.run_names import CONFIG, is_run_directory, require_local
from ...base.targets import TARGET
from ...base.values import Key

log = logging.getLogger("legato")

SECTIONS = {
    "seed": "The seed that all random numbers of the run are derived from.",
    "run": "name and root: the run directory is root/name/version_N. save_code: keep the git commit and uncommitted "
    "changes there.",
    "resume": '"auto": continue from the newest complete checkpoint of this run; a path: from it; null: a new run.',
    "checkpoint": 'Weights for validate, test and predict: "best", "last", a path or "none". Null: best, else last.',
    "vars": "Values that others refer to as ${vars.NAME}; nothing else reads them.",
    "task": "The model with its steps and optimizers: `_target_`, a subclass of Task, and its arguments.",
    "data": "The data: `_target_`, a subclass of DataModule, and its arguments. Absent: the task's own loaders.",
    "trainer": "The arguments of Trainer, listed below.",
    "callbacks": "Callbacks by name, each with `_target_`, a subclass of Callback, and its arguments.",
    "loggers": "Loggers by name, likewise. Absent: TensorBoard and metrics.jsonl; null: none.",
    "launcher": 'The cluster that runs it: "slurm" or "ray", or a mapping of `name` and options. Absent: this machine.',
}
"""The keys of a config and their meaning."""
MOVED: dict[str, Key] = {
    "seed": ("seed",),
    "run_name": ("run", "name"),
    "default_root_dir": ("run", "root"),
    "save_code": ("run", "save_code"),
}
"""Arguments of Trainer that have a key of their own."""
SECTION_OF = {"callbacks": "callbacks", "logger": "loggers"}
"""Arguments of Trainer that are sections of a config."""
NAMED: tuple[Key, ...] = (("trainer", "strategy"), ("launcher",))
"""Keys whose value may be a name alone, short for a mapping with that `name`."""
PROJECT_MARKS = ("pyproject.toml", "setup.cfg", "setup.py", ".git")
"""Files and folders that mark the top folder of a project."""
READY = Path(__file__).resolve().parents[2] / "configs"
"""The folder of the configs that come with Legato; a file that is not found as given is looked up here."""
MAX_VALUES = 100_000  # aliases of aliases can expand to more values than fit in memory
_MAX_DEPTH = 60
_COMMENT_COLUMN = 48
_OVERRIDE = re.compile(r"[A-Za-z_][^=/\s]*=")
_VARIABLE = re.compile(r"\$\{(?:oc\.)?env:\s*(\w+)\s*(?:,(?:[^${}]|\$\{[^{}]*\})*)?\}")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_LEAST_WITHIN = 6  # characters of a secret that is looked for within longer texts


@dataclass(frozen=True)
class Layer:
    """Plain data, and the origin of each key: "file:line" or "override"."""

    values: Any
    origins: dict[Key, str]
    secrets: dict[Key, str] = field(default_factory=dict, repr=False)
    """Texts with `${env:NAME}` that are stored in place of the values of secret environment variables."""

    def origin(self, key: Key) -> str:
        """Return the origin of a key, or of the nearest key above it that has one."""
        sizes = range(len(key), -1, -1)
        return next((self.origins[key[:size]] for size in sizes if key[:size] in self.origins), "default")


def dotted(key: Key) -> str:
    """Return the key as a user writes it."""
    return ".".join(str(part) if str(part).isprintable() else ascii(part) for part in key)


# --- text -------------------------------------------------------------------------------------------------------------
class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    # its own and empty, since add_implicit_resolver would change those of every SafeLoader
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own declaration)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else, and writes no aliases."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(pairs) for first, pairs in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Write out a value each time it occurs."""
        return True


_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
for _name, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), [*"-+0123456789.~nNtTfF", ""])


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In double quotes a text of several lines stays on one.
    return dumper.represent_scalar(_TAG + "str", text, style='"' if text and text.splitlines() != [text] else None)


_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str, name: str, key: Key = (), origin: str | None = None) -> Layer:
    """Read one YAML document whose root has the path `key`.

    `name` is the file, for messages and origins; `origin`, if given, replaces "file:line".

    Raises ConfigError where it is not YAML, or more than plain data; the message names file and line.
    """
    if name.endswith(".py"):
        raise ConfigError(f"{name} is a Python script, not a YAML config: run it with `python {name}`.")
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        words = (getattr(error, "context", None), getattr(error, "problem", None))
        problem = " ".join(filter(None, words)) or " ".join(str(error).split())
        place = name if origin or mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{place} is not YAML: {problem}.") from error
    if node is None:
        return Layer(None, {key: origin or f"{name}:1"})
    reader = _NodeReader(name, origin)
    return Layer(reader.value(node, key, reader.place(node)), reader.origins)


class _NodeReader:
    """Converts PyYAML's nodes to plain data, and records the origin of each value."""

    def __init__(self, name: str, origin: str | None) -> None:
        self.name, self.origin = name, origin
        self.origins: dict[Key, str] = {}
        self.count = 0
        self.loader = _Loader("")

    def place(self, node: yaml.Node) -> str:
        return self.origin or f"{self.name}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, key: Key, place: str) -> Any:
        # an alias is one node in the tree, but is counted each time it is used
        self.count += 1
        if self.count > MAX_VALUES or len(key) > _MAX_DEPTH:
            raise ConfigError(f"{place}: the file holds more than {MAX_VALUES} values or is nested too deeply.")
        self.origins[key] = place
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*key, index), self.place(item)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode) or node.tag != f"{_TAG}map":
            return self.scalar(node)
        values: dict[Any, Any] = {}
        for name_node, value_node in node.value:
            place, name = self.place(name_node), self.scalar(name_node)
            inner = (*key, name)
            # NaN is unequal to itself, so that nobody could ever read its value
            if name is None or name != name:
                raise ConfigError(f"{place}: {name_node.value or 'null'!r} cannot be a key.")
            if name in values:
                first = self.origins[inner]
                raise ConfigError(f"{place}: the key {name!r} is there twice, first at {first}. Keep one.")
            values[name] = self.value(value_node, inner, place)
        return values

    def scalar(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(_TAG) not in (*_SCALARS, "str"):
            tag = node.tag.replace(_TAG, "!!")
            raise ConfigError(f"{self.place(node)}: {tag} is refused: a config is plain text, numbers and lists.")
        try:
            value = self.loader.construct_object(node)
            # lone surrogates (an escape such as "\ud800") pass YAML, but no file can be written with them
            str(value).encode()
        except (ValueError, KeyError, IndexError) as error:
            text = ascii(node.value)[:60]
            raise ConfigError(f"{self.place(node)}: {text} is not a value that can be used.") from error
        return value


def dump_yaml(values: Mapping[str, Any], origin: Callable[[Key], str] | None = None) -> str:
    """Write plain data as YAML that `parse_yaml` reads back; with `origin`, a comment on each line names its origin."""
    lines: list[str] = []

    def write(value: Any, indent: str, head: str, key: Key) -> None:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if value and (isinstance(value, dict) or any(isinstance(item, dict | list) for item in items)):
            lines.append(f"{indent}{head}".rstrip())
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                write(item, indent + "  ", f"{format_value(name)}: " if isinstance(value, dict) else "- ", (*key, name))
            return
        # one value a line, so that each has a line for its origin
        line = f"{indent}{head}{format_value(value)}"
        lines.append(f"{line:<{_COMMENT_COLUMN}}  # {origin(key)}" if origin else line)

    for name, value in values.items():
        write(value, "", f"{format_value(name)}: ", (name,))
    return "\n".join(lines) + "\n"


def format_value(value: Any) -> str:
    """Return one value as YAML on one line."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]


def escape(value: Any) -> Any:
    """Return a resolved value whose `${` is not taken for an interpolation when it is read again."""
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def replace_item(value: Any, key: Key, item: Any) -> Any:
    """Return plain data with another item at a key; itself where there is no such key."""
    if not key:
        return item
    if isinstance(value, dict) and key[0] in value:
        return value | {key[0]: replace_item(value[key[0]], key[1:], item)}
    if isinstance(value, list) and isinstance(key[0], int) and key[0] < len(value):
        return [replace_item(one, key[1:], item) if index == key[0] else one for index, one in enumerate(value)]
    return value


# --- layers -----------------------------------------------------------------------------------------------------------
def read_config(arguments: Sequence[str], defaults: Mapping[str, Any] = MappingProxyType({})) -> Layer:
    """Merge the files among the arguments, left to right, then the overrides, and resolve `${...}`.

    defaults: values to which interpolations may refer where they are not set.

    Raises ConfigError where a file or an override cannot be read; the message says where.
    """
    with suppress(OSError):  # the current folder may be gone; a project's configs name its modules
        project = project_configs()
        if project is not None and str(project.parent) not in sys.path:
            # last: a module of the project must not hide one that is installed
            sys.path.append(str(project.parent))
    overrides = overrides_among(arguments)
    files = [word for word in arguments if word not in overrides]
    if not files:
        raise ConfigError(f"No config file was given. Ready ones: {', '.join(ready_configs()) or 'none'}.")
    for word in files:
        require_local(word, "A config file")
        # a file may have any name; a word that is none is more often an override gone wrong
        if not word.endswith((".yaml", ".yml")) and not os.path.exists(word):
            names = [*ready_configs(), *(file.name for file in Path().glob("*.y*ml"))]
            hint = did_you_mean(f"{word}.yaml", names) or did_you_mean(word, [*names, *LEVELS])
            way = " Write KEY=VALUE in one word, without dashes or spaces; KEY=null removes an entry."
            raise ConfigError(f"{word!r} is neither a YAML file nor key=value.{hint or way}")
    # overrides come after all files, wherever they stand among them
    merged = reduce(merge, [_read_config_file(Path(word), ()) for word in files])
    merged = merge(merged, _overrides(merged, overrides)) if overrides else merged
    _refuse_unused_vars(merged)
    return _resolve(merged, defaults)


def merge(base: Layer, over: Layer) -> Layer:
    """Return `over` on top of `base`: mappings are merged, everything else is replaced."""
    replaced: set[Key] = set()

    def lay(old: Any, new: Any, key: Key) -> Any:
        # strategy: ddp, then strategy.bucket_cap_mb=50: the name stays, and the option joins it
        if key in NAMED and isinstance(old, str) and isinstance(new, dict):
            old = {"name": old}
        if not isinstance(old, dict) or not isinstance(new, dict) or _names_another(old, new, key):
            replaced.add(key)
            return new
        return old | {name: lay(old[name], one, (*key, name)) if name in old else one for name, one in new.items()}

    values = lay(base.values, over.values, ())
    origins = {
        key: origin
        for key, origin in base.origins.items()
        if not any(key[:size] in replaced for size in range(len(key) + 1))
    }
    return Layer(values, {**over.origins, **origins})


def _names_another(old: Mapping[Any, Any], new: Mapping[Any, Any], key: Key) -> bool:
    """Return whether `new` names another class than `old`, whose arguments then mean nothing to it."""
    before, wanted = (one.get(TARGET) or (one.get("name") if key in NAMED else None) for one in (old, new))
    # arguments of another class would be refused as the new one's misspelt ones
    return wanted is not None and wanted != before and (before is not None or TARGET in new)


def _read_config_file(path: Path, above: tuple[Path, ...]) -> Layer:
    found = find_config_file(path, above)
    # else it would read the same files until the stack ends
    if found in above:
        circle = " -> ".join(_shown(one) for one in (*above[above.index(found) :], found))
        raise ConfigError(f"{_shown(found)} extends itself: {circle}.")
    log.debug("Config file %s%s", found, f", which {_shown(above[-1])} extends" if above else "")
    try:
        layer = parse_yaml(found.read_bytes().decode(), _shown(found))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_shown(found)} is not a text file in UTF-8 (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError(f"{_shown(found)} cannot be read: {error.strerror}.") from error
    # a file that is empty, or all comments, changes nothing
    values = {} if layer.values is None else layer.values
    if not isinstance(values, dict):
        raise ConfigError(f"{layer.origin(())}: a config is a mapping with keys such as task: and trainer:.")
    names = values.pop("extends", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"{layer.origin(('extends',))}: extends must be a list of files, such as [base.yaml].")
    # relative to the file that names them, not to the current folder: a config means the same from anywhere
    bases = [_read_config_file(found.parent / name, (*above, found)) for name in names]
    # the file itself comes last, and wins over what it extends
    return reduce(merge, [*bases, Layer(values, layer.origins)])


def find_config_file(path: Path, above: tuple[Path, ...] = ()) -> Path:
    """Return the file that a config's name means: here, in the project's configs/ or among the ready ones.

    above: the files that extend it, innermost last. Raises ConfigError where there is none.
    """
    try:
        project = [] if above else list(filter(None, [project_configs()]))
        for candidate in (path, *(one / path for one in project), READY / (path.name if above else path)):
            if candidate.is_file():
                return candidate.resolve()
        siblings = sorted(one.name for folder in (path.parent, *project) for one in folder.glob("*.y*ml"))
        stored = (path / CONFIG).is_file()  # of a run directory
    except (OSError, ValueError):  # a name that no file can have
        siblings, stored = [], False
    place = f"{_shown(above[-1])} extends {_shown(path)}, which is" if above else f"Config file {str(path)!r} is"
    near = did_you_mean(path.name, [*siblings, *ready_configs()])
    hint = f" Did you mean {str(path / CONFIG)!r}?" if stored else near
    raise ConfigError(f"{place} not there, nor among the ready ones ({', '.join(ready_configs()) or 'none'}).{hint}")


def project_configs() -> Path | None:
    """Return the folder configs/ of the project that the current folder is in; None if there is none."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        # the nearest one: a project within another has its own configs
        if any((folder / mark).exists() for mark in PROJECT_MARKS):
            return folder / "configs" if (folder / "configs").is_dir() else None
    return None


def ready_configs() -> list[str]:
    """Return the names of the configs that come with Legato."""
    return sorted(one.name for one in READY.glob("*.yaml"))


def own_directory(arguments: Sequence[str], merged: Layer) -> Path | None:
    """Return the run directory whose stored config is among the arguments; None where there is none.

    That config must name the run: another file or an override with another `run.name` means another run.
    """
    name, origin = merged.values.get("run", {}).get("name"), merged.origin(("run", "name"))
    if not isinstance(name, str):  # a config that does not name its run, or wrongly, as the check says later
        return None
    for word in arguments:
        for path in (Path(os.path.abspath(word)), Path(word).resolve()):  # a link leads from or to a run directory
            if path.name == CONFIG and path.is_file() and origin.startswith(f"{_shown(path.resolve())}:"):
                return path.parent if is_run_directory(path.parent, name) else None
    return None


def _shown(path: Path) -> str:
    """Return the path as a user would type it."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except OSError:  # the current directory is gone
        return str(path)


# --- overrides --------------------------------------------------------------------------------------------------------
def is_override(argument: str) -> bool:
    """Return whether an argument of a command sets a key, and does not name a file."""
    return _OVERRIDE.match(argument) is not None and not os.path.exists(argument)


def overrides_among(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that set a key."""
    return list(filter(is_override, arguments))


def _overrides(base: Layer, overrides: Sequence[str]) -> Layer:
    """Return one layer of all overrides: their order matters only between those of the same key."""
    layer = Layer({}, {})
    for override in overrides:
        path, _, text = override.partition("=")
        key: Key = tuple(path.split("."))
        # a..b or a trailing dot, which would make a key that no file can write
        if not all(key):
            raise ConfigError(f"override {override!r}: {path!r} is no key. Write key.subkey=value.")
        if key[0] == "extends":
            raise ConfigError(f"override {override!r}: only a file can extend others. Name the file before this one.")
        try:
            found = parse_yaml(text, f"override {override!r}", key, "override")
        except ConfigError as error:
            hint = f" Quote a value that has YAML's own characters: {path}='\"...\"'."
            raise ConfigError(f"{error}{hint if 'not YAML' in str(error) else ''}") from error
        below, holder = base.values, layer.values
        for size, name in enumerate(key[:-1], 1):
            below = below.get(name) if isinstance(below, dict) else None
            named = key[:size] in NAMED and isinstance(below, str)
            if below is not None and not isinstance(below, dict) and not named:
                kind = "a list: give it as a whole" if isinstance(below, list) else "a single value"
                place = f"{dotted(key[:size])} ({base.origin(key[:size])})"
                raise ConfigError(f"override {override!r}: {place} is {kind}; {path} cannot be set.")
            inner = holder.get(name)
            if not isinstance(inner, dict):
                inner = {"name": inner} if key[:size] in NAMED and isinstance(inner, str) else {}
            holder[name], layer.origins[key[:size]] = inner, "override"
            holder = inner
        there = below if isinstance(below, dict) else {}
        # null takes an entry off; of one that is not there it was meant for another
        removed = found.values is None and len(key) == 2 and key[0] in ("callbacks", "loggers")
        if removed and key[-1] not in there:
            hint = did_you_mean(str(key[-1]), there)
            raise ConfigError(f"override '{path}=null': there is no {key[-1]!r} to remove.{hint}")
        holder[key[-1]] = found.values
        layer.origins.update(found.origins)
    return layer


# --- interpolations ---------------------------------------------------------------------------------------------------
def _refuse_unused_vars(merged: Layer) -> None:
    """Raise ConfigError for an override of `vars` that nothing refers to: a misspelt one would change nothing."""
    text = " ".join(text for _, text in _texts(merged.values))
    used = set(re.findall(r"\$\{vars(?:\.|\[['\"]?)([\w-]+)", text))
    for key, origin in merged.origins.items():
        if origin == "override" and len(key) == 2 and key[0] == "vars" and key[1] not in used and "${vars}" not in text:
            hint = did_you_mean(str(key[1]), used)
            raise ConfigError(f"override: {dotted(key)} changes nothing: no ${{{dotted(key)}}} is there.{hint}")


def _resolve(merged: Layer, defaults: Mapping[str, Any]) -> Layer:
    """Replace every interpolation by its value, whose origin remains the place of the interpolation."""
    texts = [(key, text) for key, text in _texts(merged.values) if "${" in text]
    if not texts:
        return merged
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # the latter before 2.4
    # registered at each read: another library may have its own `env`
    register("env", _environment, replace=True)
    values, count = deepcopy(merged.values), 0
    known = merge(Layer(defaults, {}), Layer(deepcopy(values), {})).values
    for key, text in texts:
        # a variable alone is read as YAML, so that it may be a number; within a longer text it stays letter by letter
        whole = _VARIABLE.fullmatch(text)
        if whole and (value := get_variable(whole[1])) is not None:
            with suppress(UnicodeEncodeError):  # told below
                reduce(getitem, key[:-1], known)[key[-1]] = escape(_read_word(value))
    container: Any = None

    def plain(value: Any) -> Any:
        nonlocal count
        count += 1  # a few lines of references to references can stand for more values than fit in memory
        if count > MAX_VALUES:
            raise ConfigError(f"the interpolations stand for more than {MAX_VALUES} values")
        if isinstance(value, DictConfig):
            return {name: plain(value[name]) for name in value}
        return [plain(value[index]) for index in range(len(value))] if isinstance(value, ListConfig) else value

    for key, text in texts:
        try:
            container = OmegaConf.create(known) if container is None else container
            reduce(getitem, key[:-1], values)[key[-1]] = plain(reduce(getitem, key, container))
        except (OmegaConfBaseException, ConfigError, RecursionError, ValueError) as error:
            # OmegaConf names the key that is not there in its message alone
            missing = re.search(r"key '([^']*)' not found", str(error))
            hint = did_you_mean(missing[1], map(dotted, merged.origins)) if missing else ""
            problem = re.sub(r"(?s)^\w+ raised while resolving interpolation: |\.?\n.*", "", str(error))
            problem = "it refers to itself" if isinstance(error, RecursionError) else problem
            fault = "is no interpolation" if isinstance(error, GrammarParseError) else "cannot be resolved"
            raise ConfigError(f"{merged.origin(key)}: {dotted(key)}: {text!r} {fault}: {problem}.{hint}") from error
    return _with_secrets(Layer(values, dict(merged.origins)), texts)


def _environment(name: str, *default: Any) -> Any:
    """Return a variable of the environment: `${env:NAME}` or `${env:NAME,default}`."""
    value = get_variable(name)
    if value is None and not default:
        raise ConfigError(
            f"the environment variable {name} is not set. Set it, or give a default: ${{env:{name},value}}"
        )
    if value is not None and not value.isascii():
        value.encode()  # raises ValueError where it is not text in UTF-8
    return default[0] if value is None else value


def _read_word(text: str) -> Any:
    """Return what a word without quotes means in YAML; an empty one is a text."""
    # as the same word in a file: WIDTH=12 is a number, NAME=off a text
    loader: Any = _Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    return loader.construct_object(node) if text else text


def _with_secrets(layer: Layer, texts: Sequence[tuple[Key, str]]) -> Layer:
    """Name the variables of the environment that the texts use in their origins, and keep secret ones out of files.

    Secret are those whose name, or whose key, says so. Their values are stored as `${env:NAME}` wherever they occur.
    """
    variables, secrets = dict[str, str](), dict[Key, str]()
    for key, text in texts:
        names = [name for name in _VARIABLE.findall(text) if get_variable(name) is not None]
        if names:
            layer.origins[key] = f"{layer.origin(key)}, from {', '.join(names)}"
        for name in names:
            value = get_variable(name)
            # the key counts as well: a password may come from a variable called MINE
            if value and any(_SECRET.search(str(word)) for word in (name, *key[-2:])):
                variables[value] = name
                if not isinstance(reduce(getitem, key, layer.values), str):
                    secrets[key] = text  # a number
    for key, value in _texts(layer.values) if variables else ():
        stored = escape(value)
        for secret, name in variables.items():
            # a short secret occurs in texts by chance
            if value == secret or len(secret) >= _LEAST_WITHIN:
                stored = stored.replace(escape(secret), f"${{env:{name}}}")
        if stored != escape(value):
            secrets[key] = stored
    return replace(layer, secrets=secrets)


def _texts(value: Any) -> Iterator[tuple[Key, str]]:
    return ((key, item) for key, item in leaves(value, (), dict | list) if isinstance(item, str))


def leaves(value: Any, key: Key, within: Any = dict) -> Iterator[tuple[Key, Any]]:
    """Yield each key below a key with a single value; `within`: the types of what is walked through."""
    if isinstance(value, within) and value:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*key, name), within)
    else:
        yield key, value
