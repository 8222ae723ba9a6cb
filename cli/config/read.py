"""Reads YAML files and overrides into a layer of plain data, with the origin of each value.

The dialect is the core schema of YAML 1.2: only true and false are booleans, so `reproducible: off` is the string
"off", and 1e-3 is a number. YAML 1.1, PyYAML's default, reads off as False, 1e-3 as a string and 1:30 as 90. Tags,
repeated keys and Python objects are rejected.
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
from ...base.errors import ConfigError, correction, did_you_mean
from ...base.messages import LEVELS
from ...base.run_names import CONFIG, is_run_directory, require_local
from ...base.targets import TARGET
from ...base.values import Key

log = logging.getLogger("legato")

SECTIONS = {
    "seed": "Seed for all random numbers in the run.",
    "run": "name and root: the run directory is root/name/version_N. save_code: store the git commit and uncommitted "
    "changes there.",
    "resume": '"auto": continue from the newest complete checkpoint of this run. A path: start from that checkpoint. '
    "null: start a new run.",
    "checkpoint": 'Weights for validate, test and predict: "best", "last", a path, or "none" for untrained weights. '
    "null: best or, without one, last.",
    "vars": "Values for references such as ${vars.NAME} in this config.",
    "task": "The model with its steps and optimizers: `_target_`, a subclass of Task, and its arguments.",
    "data": "The data: `_target_`, a subclass of DataModule, and its arguments. Default: the task's loaders.",
    "trainer": "Arguments of Trainer.",
    "callbacks": "Callbacks by name, each with `_target_`, a subclass of Callback, and its arguments.",
    "loggers": "Loggers by name, each with `_target_`, a subclass of Logger, and its arguments. Absent: TensorBoard "
    "and metrics.jsonl; null: no logger.",
    "launcher": 'Launcher that starts the run on a cluster: "slurm", "ray" or "kubernetes", or a mapping of `name` and '
    "options. Absent: run on this machine.",
}
"""The top-level keys of a config and their documentation."""
MOVED: dict[str, Key] = {
    "seed": ("seed",),
    "run_name": ("run", "name"),
    "default_root_dir": ("run", "root"),
    "save_code": ("run", "save_code"),
}
"""Trainer arguments whose keys are outside the `trainer` section."""
SECTION_OF = {"callbacks": "callbacks", "logger": "loggers"}
"""Trainer arguments that are top-level sections of a config."""
NAMED: tuple[Key, ...] = (("trainer", "strategy"), ("launcher",))
"""Keys whose value may be a string as shorthand for a mapping with that `name`."""
PROJECT_MARKS = ("pyproject.toml", "setup.cfg", "setup.py", ".git")
"""Files and folders that mark the root folder of a project."""
READY = Path(__file__).resolve().parents[2] / "configs"
"""Folder of the configs that come with Legato, searched last."""
MAX_VALUES = 100_000  # nested aliases can expand to more values than fit in memory
_MAX_DEPTH = 60
_COMMENT_COLUMN = 48
_OVERRIDE = re.compile(r"[A-Za-z_][^=/\s]*=")
_VARIABLE = re.compile(r"\$\{(?:oc\.)?env:\s*(\w+)\s*(?:,(?:[^${}]|\$\{[^{}]*\})*)?\}")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_LEAST_WITHIN = 6  # minimum length of a secret that is replaced within longer strings


@dataclass(frozen=True)
class Layer:
    """Plain data with the origin of each key. An origin is "file:line" or "override"."""

    values: Any
    origins: dict[Key, str]
    secrets: dict[Key, str] = field(default_factory=dict, repr=False)
    """Strings with `${env:NAME}` that are stored in place of the values of secret environment variables."""

    def origin(self, key: Key) -> str:
        """Return the origin of a key, or of its nearest parent that has one."""
        sizes = range(len(key), -1, -1)
        return next((self.origins[key[:size]] for size in sizes if key[:size] in self.origins), "default")


def dotted(key: Key) -> str:
    """Return a key in dotted form, such as "trainer.max_epochs"."""
    return ".".join(str(part) if str(part).isprintable() else ascii(part) for part in key)


# --- text -------------------------------------------------------------------------------------------------------------
class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the scalar types of YAML 1.2."""

    # a separate dict, since add_implicit_resolver would modify SafeLoader's
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own declaration)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes no aliases and quotes strings that YAML 1.1 or 1.2 would read as another type."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(pairs) for first, pairs in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that a repeated value is written in full each time."""
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
    # double quotes keep a multiline string on one line
    return dumper.represent_scalar(_TAG + "str", text, style='"' if text and text.splitlines() != [text] else None)


_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str, name: str, key: Key = (), origin: str | None = None) -> Layer:
    """Parse a YAML document.

    Args:
        name: Name of the file to use in messages and origins.
        key: Key of the document's root.
        origin: Origin to record for all values instead of "file:line".

    Raises ConfigError with the file and line for invalid YAML and for values that are not plain data.
    """
    if name.endswith(".py"):
        raise ConfigError(f"{name} is a Python script, not a YAML config. Run it with `python {name}`.")
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        words = (getattr(error, "context", None), getattr(error, "problem", None))
        problem = " ".join(filter(None, words)) or " ".join(str(error).split())
        place = name if origin or mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{place} is not valid YAML: {problem}.") from error
    if node is None:
        return Layer(None, {key: origin or f"{name}:1"})
    reader = _NodeReader(name, origin)
    return Layer(reader.value(node, key, reader.place(node)), reader.origins)


class _NodeReader:
    """Converts PyYAML's nodes to plain data and records the origin of each value."""

    def __init__(self, name: str, origin: str | None) -> None:
        self.name, self.origin = name, origin
        self.origins: dict[Key, str] = {}
        self.count = 0
        self.loader = _Loader("")

    def place(self, node: yaml.Node) -> str:
        return self.origin or f"{self.name}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, key: Key, place: str) -> Any:
        # an alias is a single node, but each use counts
        self.count += 1
        if self.count > MAX_VALUES or len(key) > _MAX_DEPTH:
            raise ConfigError(f"{place}: the file has more than {MAX_VALUES} values or is nested too deeply.")
        self.origins[key] = place
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*key, index), self.place(item)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode) or node.tag != f"{_TAG}map":
            return self.scalar(node)
        values: dict[Any, Any] = {}
        for name_node, value_node in node.value:
            place, name = self.place(name_node), self.scalar(name_node)
            inner = (*key, name)
            # NaN is not equal to itself, so its value could never be read
            if name is None or name != name:
                raise ConfigError(f"{place}: {name_node.value or 'null'!r} cannot be a key.")
            if name in values:
                first = self.origins[inner]
                raise ConfigError(f"{place}: duplicate key {name!r}, first set at {first}. Remove one of them.")
            values[name] = self.value(value_node, inner, place)
        return values

    def scalar(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(_TAG) not in (*_SCALARS, "str"):
            tag = node.tag.replace(_TAG, "!!")
            raise ConfigError(f"{self.place(node)}: the tag {tag} is not allowed: a config may hold only plain data.")
        try:
            value = self.loader.construct_object(node)
            # lone surrogates (an escape such as "\ud800") are valid YAML, but cannot be written to a file
            str(value).encode()
        except (ValueError, KeyError, IndexError) as error:
            text = ascii(node.value)[:60]
            raise ConfigError(f"{self.place(node)}: {text} is not a valid value.") from error
        return value


def dump_yaml(values: Mapping[str, Any], origin: Callable[[Key], str] | None = None) -> str:
    """Return plain data as YAML that `parse_yaml` can read. If `origin` is set, add each line's origin as a comment."""
    lines: list[str] = []

    def write(value: Any, indent: str, head: str, key: Key) -> None:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if value and (isinstance(value, dict) or any(isinstance(item, dict | list) for item in items)):
            lines.append(f"{indent}{head}".rstrip())
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                write(item, indent + "  ", f"{format_value(name)}: " if isinstance(value, dict) else "- ", (*key, name))
            return
        # one value per line, so that each line has a single origin
        line = f"{indent}{head}{format_value(value)}"
        lines.append(f"{line:<{_COMMENT_COLUMN}}  # {origin(key)}" if origin else line)

    for name, value in values.items():
        write(value, "", f"{format_value(name)}: ", (name,))
    return "\n".join(lines) + "\n"


def format_value(value: Any) -> str:
    """Return a value as YAML on a single line."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]


def escape(value: Any) -> Any:
    """Return a resolved value with `${` escaped, so that reading the value does not interpolate it again."""
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def replace_item(value: Any, key: Key, item: Any) -> Any:
    """Return plain data with the item at `key` replaced. If there is no such key, the data is returned unchanged."""
    if not key:
        return item
    if isinstance(value, dict) and key[0] in value:
        return value | {key[0]: replace_item(value[key[0]], key[1:], item)}
    if isinstance(value, list) and isinstance(key[0], int) and key[0] < len(value):
        return [replace_item(old, key[1:], item) if index == key[0] else old for index, old in enumerate(value)]
    return value


# --- layers -----------------------------------------------------------------------------------------------------------
def read_config(arguments: Sequence[str], defaults: Mapping[str, Any] = MappingProxyType({})) -> Layer:
    """Merge the config files from left to right, then apply the overrides and resolve `${...}`.

    Args:
        defaults: Values that interpolations may refer to if the config does not set them.

    Raises ConfigError for an invalid file or override. The message states where the mistake is.
    """
    with suppress(OSError):  # the working directory may have been deleted
        project = project_configs()
        if project is not None and str(project.parent) not in sys.path:
            # a project's configs name its modules; put them last, so that they don't shadow installed ones
            sys.path.append(str(project.parent))
    overrides = overrides_among(arguments)
    files = [word for word in arguments if word not in overrides]
    if not files:
        raise ConfigError(f"No config file. Configs that come with Legato: {', '.join(ready_configs()) or 'none'}.")
    for word in files:
        require_local(word, "A config file")
        # an existing file may have any name; any other word is more likely a malformed override
        if not word.endswith((".yaml", ".yml")) and not os.path.exists(word):
            names = [*ready_configs(), *(file.name for file in Path().glob("*.y*ml"))]
            hint = did_you_mean(f"{word}.yaml", names) or did_you_mean(word, [*names, *LEVELS])
            usage = " Write KEY=VALUE as one word, without dashes or spaces; KEY=null removes an entry."
            usage += correction("--trainer.max_epochs 3", "trainer.max_epochs=3")
            raise ConfigError(f"{word!r} is neither a YAML file nor key=value.{hint or usage}")
    # overrides apply after all files, wherever they are among the arguments
    merged = reduce(merge, [_read_config_file(Path(word), ()) for word in files])
    merged = merge(merged, _overrides(merged, overrides)) if overrides else merged
    _refuse_unused_vars(merged)
    return _resolve(merged, defaults)


def merge(base: Layer, over: Layer) -> Layer:
    """Return `base` updated with `over`. Mappings are merged, and all other values are replaced."""
    replaced: set[Key] = set()

    def lay(old: Any, new: Any, key: Key) -> Any:
        # strategy: ddp and strategy.bucket_cap_mb=50 merge into a mapping with the name and the option
        if key in NAMED and isinstance(old, str) and isinstance(new, dict):
            old = {"name": old}
        if not isinstance(old, dict) or not isinstance(new, dict) or _names_another(old, new, key):
            replaced.add(key)
            return new
        return old | {name: lay(old[name], item, (*key, name)) if name in old else item for name, item in new.items()}

    values = lay(base.values, over.values, ())
    origins = {
        key: origin
        for key, origin in base.origins.items()
        if not any(key[:size] in replaced for size in range(len(key) + 1))
    }
    return Layer(values, {**over.origins, **origins})


def _names_another(old: Mapping[Any, Any], new: Mapping[Any, Any], key: Key) -> bool:
    """Return whether the class of `new` differs from that of `old`. If so, the arguments in `old` do not apply."""
    before, after = (entry.get(TARGET) or (entry.get("name") if key in NAMED else None) for entry in (old, new))
    # otherwise the old class's arguments would be reported as misspelled
    return after is not None and after != before and (before is not None or TARGET in new)


def _read_config_file(path: Path, above: tuple[Path, ...]) -> Layer:
    file = find_config_file(path, above)
    # prevents infinite recursion
    if file in above:
        cycle = " -> ".join(_shown(member) for member in (*above[above.index(file) :], file))
        raise ConfigError(f"{_shown(file)} extends itself: {cycle}.")
    log.debug("Config file %s%s", file, f", which {_shown(above[-1])} extends" if above else "")
    try:
        layer = parse_yaml(file.read_bytes().decode(), _shown(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_shown(file)} is not a UTF-8 text file (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError(f"Cannot read {_shown(file)}: {error.strerror}.") from error
    # a file that is empty or has only comments changes nothing
    values = {} if layer.values is None else layer.values
    if not isinstance(values, dict):
        raise ConfigError(f"{layer.origin(())}: a config must be a mapping with keys such as task and trainer.")
    names = values.pop("extends", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{layer.origin(('extends',))}: extends must be a list of files, such as [base.yaml].")
    # relative to the file that names them, so that a config does not depend on the working directory
    bases = [_read_config_file(file.parent / name, (*above, file)) for name in names]
    # the file comes last, since it overrides the files that it extends
    return reduce(merge, [*bases, Layer(values, layer.origins)])


def find_config_file(path: Path, above: tuple[Path, ...] = ()) -> Path:
    """Find a config file at `path`, in the project's configs/, or among the configs that ship with Legato.

    Args:
        above: The files that extend this file, ordered from outermost to innermost.

    Raises ConfigError if the file does not exist.
    """
    try:
        project = [] if above else list(filter(None, [project_configs()]))
        for candidate in (path, *(folder / path for folder in project), READY / (path.name if above else path)):
            if candidate.is_file():
                return candidate.resolve()
        siblings = sorted(file.name for folder in (path.parent, *project) for file in folder.glob("*.y*ml"))
        stored = (path / CONFIG).is_file()  # in a run directory
    except (OSError, ValueError):  # an invalid file name
        siblings, stored = [], False
    place = f"{_shown(above[-1])} extends {_shown(path)}, which" if above else f"Config file {str(path)!r}"
    near = did_you_mean(path.name, [*siblings, *ready_configs()])
    hint = f" Did you mean {str(path / CONFIG)!r}?" if stored else near
    raise ConfigError(f"{place} was not found. Configs in Legato: {', '.join(ready_configs()) or 'none'}.{hint}")


def project_configs() -> Path | None:
    """Return the `configs/` folder of the project that contains the working directory, or None if there is none."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        # the innermost project, since nested projects have separate configs
        if any((folder / mark).exists() for mark in PROJECT_MARKS):
            return folder / "configs" if (folder / "configs").is_dir() else None
    return None


def ready_configs() -> list[str]:
    """Return the names of the configs that ship with Legato."""
    return sorted(file.name for file in READY.glob("*.yaml"))


def own_directory(arguments: Sequence[str], merged: Layer) -> Path | None:
    """Return the run directory whose stored config is among the arguments, or None if there is none.

    `run.name` must come from that config. A name from another file or from an override refers to a different run.
    """
    name, origin = merged.values.get("run", {}).get("name"), merged.origin(("run", "name"))
    if not isinstance(name, str):  # missing, or of a wrong type, which the check reports later
        return None
    for word in arguments:
        for path in (Path(os.path.abspath(word)), Path(word).resolve()):  # the file or its folder may be a link
            if path.name == CONFIG and path.is_file() and origin.startswith(f"{_shown(path.resolve())}:"):
                return path.parent if is_run_directory(path.parent, name) else None
    return None


def _shown(path: Path) -> str:
    """Return a path as shown in messages: relative if it is below the working directory."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except OSError:  # the working directory was deleted
        return str(path)


# --- overrides --------------------------------------------------------------------------------------------------------
def is_override(argument: str) -> bool:
    """Return whether an argument of a command is an override rather than the name of a file."""
    return _OVERRIDE.match(argument) is not None and not os.path.exists(argument)


def overrides_among(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are overrides."""
    return list(filter(is_override, arguments))


def _overrides(base: Layer, overrides: Sequence[str]) -> Layer:
    """Return a layer with all overrides. Their order matters only for overrides of the same key."""
    layer = Layer({}, {})
    for override in overrides:
        path, _, text = override.partition("=")
        key: Key = tuple(path.split("."))
        # a..b, or a trailing dot
        if not all(key):
            raise ConfigError(f"override {override!r}: {path!r} is not a valid key. Write key.subkey=value.")
        if key[0] == "extends":
            raise ConfigError(f"override {override!r}: only a file can extend other files. Pass the base file first.")
        try:
            parsed = parse_yaml(text, f"override {override!r}", key, "override")
        except ConfigError as error:
            hint = f" Quote a value that contains YAML special characters: {path}='\"...\"'."
            raise ConfigError(f"{error}{hint if 'not valid YAML' in str(error) else ''}") from error
        below, holder = base.values, layer.values
        for size, name in enumerate(key[:-1], 1):
            below = below.get(name) if isinstance(below, dict) else None
            named = key[:size] in NAMED and isinstance(below, str)
            if below is not None and not isinstance(below, dict) and not named:
                kind = "a list; set the entire list" if isinstance(below, list) else "a single value"
                place = f"{dotted(key[:size])} ({base.origin(key[:size])})"
                raise ConfigError(f"override {override!r}: cannot set {path}, since {place} is {kind}.")
            inner = holder.get(name)
            if not isinstance(inner, dict):
                inner = {"name": inner} if key[:size] in NAMED and isinstance(inner, str) else {}
            holder[name], layer.origins[key[:size]] = inner, "override"
            holder = inner
        section = below if isinstance(below, dict) else {}
        # null removes an entry; if there is no such entry, its name is probably misspelled
        removed = parsed.values is None and len(key) == 2 and key[0] in ("callbacks", "loggers")
        if removed and key[-1] not in section:
            hint = did_you_mean(str(key[-1]), section)
            raise ConfigError(f"override '{path}=null': {key[0]} has no {key[-1]!r} to remove.{hint}")
        holder[key[-1]] = parsed.values
        layer.origins.update(parsed.origins)
    return layer


# --- interpolations ---------------------------------------------------------------------------------------------------
def _refuse_unused_vars(merged: Layer) -> None:
    """Raise ConfigError if an override sets a (probably misspelled) variable in `vars` that no value uses."""
    text = " ".join(text for _, text in _texts(merged.values))
    used = set(re.findall(r"\$\{vars(?:\.|\[['\"]?)([\w-]+)", text))
    for key, origin in merged.origins.items():
        if origin == "override" and len(key) == 2 and key[0] == "vars" and key[1] not in used and "${vars}" not in text:
            hint = did_you_mean(str(key[1]), used)
            raise ConfigError(f"override: {dotted(key)} has no effect: no value refers to ${{{dotted(key)}}}.{hint}")


def _resolve(merged: Layer, defaults: Mapping[str, Any]) -> Layer:
    """Replace every interpolation with its value and keep the origin of the interpolation."""
    texts = [(key, text) for key, text in _texts(merged.values) if "${" in text]
    if not texts:
        return merged
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # the latter before 2.4
    # registered at each read, since another library may register its own `env`
    register("env", _environment, replace=True)
    values, count = deepcopy(merged.values), 0
    context = merge(Layer(defaults, {}), Layer(deepcopy(values), {})).values
    for key, text in texts:
        # a variable that is the entire value is parsed as YAML and may be a number; within a longer string it is text
        variable = _VARIABLE.fullmatch(text)
        if variable and (value := get_variable(variable[1])) is not None:
            with suppress(UnicodeEncodeError):  # reported below
                reduce(getitem, key[:-1], context)[key[-1]] = escape(_read_word(value))
    container: Any = None

    def plain(value: Any) -> Any:
        nonlocal count
        count += 1  # nested references can expand to more values than fit in memory
        if count > MAX_VALUES:
            raise ConfigError(f"the interpolations expand to more than {MAX_VALUES} values")
        if isinstance(value, DictConfig):
            return {name: plain(value[name]) for name in value}
        return [plain(value[index]) for index in range(len(value))] if isinstance(value, ListConfig) else value

    for key, text in texts:
        try:
            container = OmegaConf.create(context) if container is None else container
            reduce(getitem, key[:-1], values)[key[-1]] = plain(reduce(getitem, key, container))
        except (OmegaConfBaseException, ConfigError, RecursionError, ValueError) as error:
            # OmegaConf names the missing key only in its message
            missing = re.search(r"key '([^']*)' not found", str(error))
            hint = did_you_mean(missing[1], map(dotted, merged.origins)) if missing else ""
            problem = re.sub(r"(?s)^\w+ raised while resolving interpolation: |\.?\n.*", "", str(error))
            problem = "it refers to itself" if isinstance(error, RecursionError) else problem
            fault = "is not a valid interpolation" if isinstance(error, GrammarParseError) else "cannot be resolved"
            raise ConfigError(f"{merged.origin(key)}: {dotted(key)}: {text!r} {fault}: {problem}.{hint}") from error
    return _with_secrets(Layer(values, dict(merged.origins)), texts)


def _environment(name: str, *default: Any) -> Any:
    """Return the value of an environment variable for `${env:NAME}` or `${env:NAME,default}`."""
    value = get_variable(name)
    if value is None and not default:
        raise ConfigError(
            f"the environment variable {name} is not set. Set it, or provide a default: ${{env:{name},value}}"
        )
    if value is not None and not value.isascii():
        value.encode()  # raises ValueError for invalid UTF-8
    return default[0] if value is None else value


def _read_word(text: str) -> Any:
    """Parse an unquoted word as YAML. An empty word is a string."""
    # as in a file: WIDTH=12 is a number, NAME=off is a string
    loader: Any = _Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    return loader.construct_object(node) if text else text


def _with_secrets(layer: Layer, texts: Sequence[tuple[Key, str]]) -> Layer:
    """Add environment variables to the origins of values that use them, and record secrets.

    A value is secret if its key or the variable's name contains a word such as TOKEN. When a config is written to a
    file, `${env:NAME}` replaces the secret wherever it occurs.
    """
    variables, secrets = dict[str, str](), dict[Key, str]()
    for key, text in texts:
        names = [name for name in _VARIABLE.findall(text) if get_variable(name) is not None]
        if names:
            layer.origins[key] = f"{layer.origin(key)}, from {', '.join(names)}"
        for name in names:
            value = get_variable(name)
            # checks the key too: a password may come from a variable with any name
            if value and any(_SECRET.search(str(word)) for word in (name, *key[-2:])):
                variables[value] = name
                if not isinstance(reduce(getitem, key, layer.values), str):
                    secrets[key] = text  # the value is a number
    for key, value in _texts(layer.values) if variables else ():
        stored = escape(value)
        for secret, name in variables.items():
            # a short secret may occur in strings by chance
            if value == secret or len(secret) >= _LEAST_WITHIN:
                stored = stored.replace(escape(secret), f"${{env:{name}}}")
        if stored != escape(value):
            secrets[key] = stored
    return replace(layer, secrets=secrets)


def _texts(value: Any) -> Iterator[tuple[Key, str]]:
    return ((key, item) for key, item in leaves(value, (), dict | list) if isinstance(item, str))


def leaves(value: Any, key: Key, within: Any = dict) -> Iterator[tuple[Key, Any]]:
    """Yield each key below `key` whose value is not a container. `within` lists the container types to traverse."""
    if isinstance(value, within) and value:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*key, name), within)
    else:
        yield key, value
