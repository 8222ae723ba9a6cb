"""Plain data from YAML text and back, with the place that each value came from.

The dialect is YAML 1.2's core schema: only true and false are booleans, so that `reproducible: off` is the word "off",
and 1e-3 is a number; YAML 1.1, which PyYAML reads by itself, says otherwise to both, and takes 1:30 for 90. Tags,
repeated keys and names of Python objects are refused.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..checkpoints.run_names import CONFIG, is_run_directory
from ..errors import ConfigError, did_you_mean
from .check import TARGET, Key, dotted

MAX_VALUES = 100_000  # aliases of aliases can stand for more values than fit in memory
_MAX_DEPTH = 60
_COMMENT_COLUMN = 48


@dataclass(frozen=True)
class Entry:
    """A value of a config and where it came from: "file:line" or "override". Containers hold entries."""

    value: Any
    origin: str

    def plain(self) -> Any:
        """The value without its origins."""
        if isinstance(self.value, dict):
            return {name: entry.plain() for name, entry in self.value.items()}
        return [entry.plain() for entry in self.value] if isinstance(self.value, list) else self.value

    def origins(self, key: Key = ()) -> dict[Key, str]:
        """The origin of this value and of all within, by key."""
        found = {key: self.origin}
        if isinstance(self.value, dict | list):
            for name, entry in self.value.items() if isinstance(self.value, dict) else enumerate(self.value):
                found |= entry.origins((*key, name))
        return found


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own declaration)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(pairs) for first, pairs in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value as often as it stands there."""
        return True


_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: {"true": True, "false": False}[text.lower()]),
    "int": (
        r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+",
        lambda text: int(text.replace("_", ""), 0 if text[:2] in ("0x", "0o") else 10),
    ),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        lambda text: float(re.sub(r"_|\.(?=[inIN])", "", text)),
    ),
    "str": (r"(?!)", str),
}
for _name, (_pattern, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _first = [*"-+0123456789.~nNtTfF", ""] if _name != "str" else []
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In double quotes a text of several lines stays on one.
    return dumper.represent_scalar(_TAG + "str", text, style='"' if text and text.splitlines() != [text] else None)


_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str, name: str, origin: str | None = None) -> Entry:
    """Read one YAML document; `name` is the file for messages, `origin` takes the place of "file:line" where given.

    Raises:
        ConfigError: it is not YAML, or more than plain data; the message names file and line.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        place = name if origin or mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{place} is not YAML: {problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply.") from error
    return Entry(None, origin or f"{name}:1") if node is None else _EntryBuilder(name, origin).entry(node)


class _EntryBuilder:
    """Makes entries of PyYAML's nodes, and counts them."""

    def __init__(self, name: str, origin: str | None) -> None:
        self.name = name
        self.origin = origin
        self.count = 0

    def entry(self, node: yaml.Node, depth: int = 0, place: str = "") -> Entry:
        """The value of a node; `place` is where its key stands, if it has one."""
        place = place or self.place(node)
        self.count += 1
        if self.count > MAX_VALUES or depth > _MAX_DEPTH:
            raise ConfigError(f"{place}: the file holds more than {MAX_VALUES} values or is nested too deeply.")
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return Entry(self.mapping(node, depth), place)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return Entry([self.entry(item, depth + 1) for item in node.value], place)
        return Entry(self.scalar(node), place)

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[Any, Entry]:
        """The entries of a mapping, each placed at its key."""
        entries: dict[Any, Entry] = {}
        for key_node, value_node in node.value:
            place, key = self.place(key_node), self.scalar(key_node)
            if key is None or key != key:
                raise ConfigError(f"{place}: {key_node.value or 'null'!r} cannot be a key.")
            if key in entries:
                raise ConfigError(f"{place}: the key {key!r} is there twice, first at {entries[key].origin}. Keep one.")
            entries[key] = self.entry(value_node, depth + 1, place)
        return entries

    def scalar(self, node: yaml.Node) -> Any:
        """The value of a scalar node."""
        known = _SCALARS.get(node.tag.removeprefix(_TAG)) if isinstance(node, yaml.ScalarNode) else None
        if known is None:
            tag = node.tag.replace(_TAG, "!!")
            raise ConfigError(
                f"{self.place(node)}: {tag} is not allowed here: a config is plain text, numbers and lists."
            )
        try:
            value = known[1](node.value)
            str(value).encode()
        except (ValueError, KeyError) as error:
            text = ascii(node.value)[:60]
            raise ConfigError(f"{self.place(node)}: {text} is not a value that can be used.") from error
        return value

    def place(self, node: yaml.Node) -> str:
        """Where a node begins."""
        return self.origin or f"{self.name}:{node.start_mark.line + 1}"


def dump_yaml(values: Mapping[str, Any], origin: Callable[[Key], str] | None = None) -> str:
    """Write plain data as YAML that `parse_yaml` reads back; with `origin`, each line says where its value is from."""
    lines: list[str] = []

    def write(value: Any, indent: str, head: str, key: Key) -> None:
        nested = isinstance(value, dict | list) and any(isinstance(item, dict | list) for item in _entry_items(value))
        if value and (nested or isinstance(value, dict)):
            lines.append(f"{indent}{head}".rstrip())
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in pairs:
                write(item, indent + "  ", f"{_flow(name)}: " if isinstance(value, dict) else "- ", (*key, name))
            return
        line = f"{indent}{head}{_flow(value)}"
        lines.append(f"{line:<{_COMMENT_COLUMN}}  # {origin(key)}" if origin else line)

    for name, value in values.items():
        write(value, "", f"{_flow(name)}: ", (name,))
    return "\n".join(lines) + "\n"


def _entry_items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _flow(value: Any) -> str:
    """One value on one line."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]


READY = Path(__file__).resolve().parents[2] / "configs"
"""The configs that come with Legato; a file that is not found as given is looked up here."""

NAMED: tuple[Key, ...] = (("trainer", "strategy"), ("launcher",))
"""Where a name alone stands for a mapping with that `name`."""
_OVERRIDE = re.compile(r"[A-Za-z_][^=/\s]*=")
_PURE_RESOLVERS = {"oc.select"}


def read_config(arguments: Sequence[str]) -> Entry:
    """Lay the files among the arguments over each other, left to right, then the overrides, and resolve `${...}`.

    Raises:
        ConfigError: a file or an override cannot be read; the message says where.
    """
    overrides = _overrides_among(arguments)
    files = [one for one in arguments if one not in overrides]
    if not files:
        raise ConfigError(f"No config file was given. Ready ones: {', '.join(ready_configs()) or 'none'}.")
    for one in files:
        if not one.endswith((".yaml", ".yml")) and not os.path.exists(one):
            raise ConfigError(f"{one!r} is neither a YAML file nor key=value.{_word_instead(one, arguments)}")
    merged = _read_config_file(Path(files[0]), ())
    for one in files[1:]:
        merged = merge(merged, _read_config_file(Path(one), ()))
    if overrides:
        merged = merge(merged, _overrides(merged, overrides))
    return _resolve(merged)


def own_directory(arguments: Sequence[str], merged: Entry) -> Path | None:
    """Return the run directory whose own config, as Legato stored it there, is among the arguments; None: none is.

    It must be what names the run: another file or an override with another `run.name` means another run.
    """
    run = merged.value["run"].value if "run" in merged.value else None
    name = run.get("name") if isinstance(run, dict) else None
    if name is None or not isinstance(name.value, str):
        return None
    overrides = _overrides_among(arguments)
    for one in arguments:
        if one in overrides or not name.origin.startswith(f"{_shown(_find_config_file(Path(one), ()))}:"):
            continue
        for path in (Path(os.path.abspath(one)), Path(one).resolve()):
            if path.name == CONFIG and is_run_directory(path.parent, name.value):
                return path.parent
    return None


def merge(base: Entry, over: Entry, key: Key = ()) -> Entry:
    """Lay one entry over another: mappings are merged, everything else is replaced."""
    if key in NAMED and isinstance(base.value, str) and isinstance(over.value, dict):
        base = Entry({"name": base}, base.origin)
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    # The arguments of another class say nothing to the new one.
    names = ("name",) if key in NAMED else (TARGET,)
    for name in names:
        old, new = base.value.get(name), over.value.get(name)
        if new is not None and (old is None or old.plain() != new.plain()) and (old is not None or name == TARGET):
            return over
    merged = dict(base.value)
    for name, entry in over.value.items():
        merged[name] = merge(merged[name], entry, (*key, name)) if name in merged else entry
    return Entry(merged, base.origin)


def escape(value: Any) -> Any:
    """Write a resolved value so that its `${` is not taken for an interpolation when it is read again."""
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read_config_file(path: Path, above: tuple[Path, ...]) -> Entry:
    found = _find_config_file(path, above)
    if found in above:
        circle = " -> ".join(_shown(one) for one in (*above[above.index(found) :], found))
        raise ConfigError(f"{_shown(found)} extends itself: {circle}.")
    try:
        text = found.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_shown(found)} is not a text file in UTF-8 (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError(f"{_shown(found)} cannot be read: {error.strerror}.") from error
    entry = parse_yaml(text, _shown(found))
    if entry.value is None:
        entry = Entry({}, entry.origin)
    if not isinstance(entry.value, dict):
        raise ConfigError(f"{entry.origin}: a config is a mapping with keys such as task: and trainer:.")
    entry = Entry(dict(entry.value), entry.origin)
    extends = entry.value.pop("extends", Entry([], ""))
    names = [extends.plain()] if isinstance(extends.value, str) else extends.plain()
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"{extends.origin}: extends must be a list of files, such as [base.yaml].")
    merged = Entry({}, entry.origin)
    for name in names:
        merged = merge(merged, _read_config_file(found.parent / name, (*above, found)))
    return merge(merged, entry)


def _find_config_file(path: Path, above: tuple[Path, ...]) -> Path:
    try:
        for candidate in (path, READY / (path.name if above else path)):
            if candidate.is_file():
                return candidate.resolve()
        siblings = sorted(one.name for one in path.parent.glob("*.y*ml"))
    except (OSError, ValueError):  # a name that no file can have
        siblings = []
    place = f"{_shown(above[-1])} extends {_shown(path)}, which is" if above else f"Config file {str(path)!r} is"
    if os.path.islink(path):
        raise ConfigError(f"{place} a link to {os.readlink(path)!r}, and that is no file.")
    if os.path.isdir(path):
        own = [path / CONFIG] if (path / CONFIG).is_file() else sorted(path.glob("*.y*ml"))
        hint = f" Did you mean {str(own[0])!r}?" if own else ""
        raise ConfigError(f"{place} a folder, not a YAML file.{hint}")
    ready = ", ".join(ready_configs()) or "none"
    hint = did_you_mean(path.name, [*siblings, *ready_configs()])
    raise ConfigError(f"{place} not there, nor among the ready ones ({ready}).{hint}")


def ready_configs() -> list[str]:
    """The names of the configs that come with Legato."""
    return sorted(one.name for one in READY.glob("*.yaml"))


def _shown(path: Path) -> str:
    """The path as a user would type it."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except OSError:  # the current directory is gone
        return str(path)


def _word_instead(argument: str, arguments: Sequence[str]) -> str:
    """Return what was probably meant by an argument that is neither a file nor an override, as a sentence."""
    if argument.startswith("="):
        return f" Name a key before the {argument!r}."
    removal = re.fullmatch(r"~([A-Za-z_][\w.]*)(=.*)?", argument)
    if removal:
        return f" Write {removal[1]}=null to remove it."
    option = re.fullmatch(r"(?:--?|[+]+)([A-Za-z_][\w.-]*)(?:=(.*))?", argument, re.DOTALL)
    key = _known_key(option[1].replace("-", "_")) if option else None
    if option and option[2] is not None:
        return f" Write {key or option[1]}={option[2]} instead."
    if option and key is not None:
        following = [*arguments, ""][arguments.index(argument) + 1]
        return f" Write {key}={'value' if not following or following.startswith('-') else following} instead."
    if argument.startswith("-"):
        return " Options stand right after `legato`, as in `legato fit --help`; all else is set by key=value."
    pair = re.fullmatch(r"([A-Za-z_][\w.]*)\s*(?:=|:|\N{FULLWIDTH EQUALS SIGN})\s*(\S.*)", argument)
    if pair:
        return f" Write {pair[1]}={pair[2]} instead."
    known = [*ready_configs(), *(one.name for one in Path().glob("*.y*ml"))]
    stems = {name.rpartition(".")[0]: name for name in known}
    if argument in stems:
        return f" Did you mean {stems[argument]!r}?"
    return did_you_mean(argument, known) or f" Write {argument}=value."


def _known_key(key: str) -> str | None:
    """Return the key of a config that was probably meant: misspelt, or without its section; None: there is none."""
    from ..arguments import ARGUMENT_NAMES
    from .check import MOVED, SECTION_OF, SECTIONS

    section, _, rest = key.partition(".")
    if not rest:
        moved = {name: dotted(place) for name, place in MOVED.items()}
        known = {**{name: f"trainer.{name}" for name in ARGUMENT_NAMES}, **SECTION_OF, **moved}
        known |= {name: name for name in SECTIONS}
        near = difflib.get_close_matches(section, known, n=1, cutoff=0.75)
        return known[near[0]] if near else None
    near = difflib.get_close_matches(section, SECTIONS, n=1, cutoff=0.75)
    if not near:
        return None
    if near[0] == "trainer" and "." not in rest:
        rest = next(iter(difflib.get_close_matches(rest, ARGUMENT_NAMES, n=1)), rest)
    return f"{near[0]}.{rest}"


def _overrides_among(arguments: Sequence[str]) -> list[str]:
    return [one for one in arguments if _OVERRIDE.match(one) and not os.path.exists(one)]


def _overrides(base: Entry, overrides: Sequence[str]) -> Entry:
    """Make one layer of all overrides, so that their order matters only where they name the same key."""
    layer = Entry({}, "override")
    for override in overrides:
        path, _, text = override.partition("=")
        keys = path.split(".")
        if not all(keys):
            raise ConfigError(f"override {override!r}: {path!r} is no key. Write key.subkey=value.")
        if keys[0] == "extends":
            raise ConfigError(f"override {override!r}: only a file can extend others. Name the file before this one.")
        try:
            value = parse_yaml(text, f"override {override!r}", "override")
        except ConfigError as error:
            hint = f" Quote a value that has YAML's own characters: {path}='\"...\"'."
            raise ConfigError(f"{error}{hint if 'not YAML' in str(error) else ''}") from error
        entries, below = layer.value, base
        for depth, key in enumerate(keys):
            below = below.value.get(key, Entry({}, "")) if isinstance(below.value, dict) else Entry({}, "")
            if depth == len(keys) - 1:
                break
            named = tuple(keys[: depth + 1]) in NAMED and isinstance(below.value, str)
            if below.value is not None and not isinstance(below.value, dict) and not named:
                kind = "a list: give it as a whole" if isinstance(below.value, list) else "a single value"
                place = ".".join(keys[: depth + 1])
                raise ConfigError(f"override {override!r}: {place} ({below.origin}) is {kind}; {path} cannot be set.")
            above = entries.setdefault(key, Entry({}, "override"))
            if not isinstance(above.value, dict):
                name = {"name": above} if tuple(keys[: depth + 1]) in NAMED and isinstance(above.value, str) else {}
                above = entries[key] = Entry(dict(name), "override")
            entries = above.value
        _refuse_removal_of_nothing(base, keys, value)
        entries[keys[-1]] = value
    return layer


def _refuse_removal_of_nothing(base: Entry, keys: Sequence[str], value: Entry) -> None:
    if len(keys) == 2 and keys[0] in ("callbacks", "loggers") and value.value is None:
        section = base.value.get(keys[0], Entry({}, "")).value
        if not isinstance(section, dict) or keys[1] not in section:
            hint = did_you_mean(keys[1], section or ()) if isinstance(section, dict) else ""
            raise ConfigError(f"override '{'.'.join(keys)}=null': there is no {keys[1]!r} to remove.{hint}")


def _resolve(merged: Entry) -> Entry:
    """Replace every interpolation by its value; each keeps the place where it was written."""
    found = list(_interpolations(merged, ()))
    if not found:
        return merged
    from omegaconf import OmegaConf

    for key, entry in found:
        _check_interpolation(key, entry)
    names = [dotted(key) for key in merged.origins()]
    return _Resolver(names).entry(merged, OmegaConf.create(merged.plain()), ())


def _interpolations(entry: Entry, key: Key) -> Iterator[tuple[Key, Entry]]:
    if isinstance(entry.value, dict | list):
        for name, one in entry.value.items() if isinstance(entry.value, dict) else enumerate(entry.value):
            yield from _interpolations(one, (*key, name))
    elif isinstance(entry.value, str) and "${" in entry.value:
        yield key, entry


def _check_interpolation(key: Key, entry: Entry) -> None:
    """Refuse what is no interpolation, or one that calls a function: a config follows from its files alone."""
    from omegaconf.grammar_parser import parse

    place = f"{entry.origin}: {dotted(key)}: {entry.value!r}"
    try:
        trees: list[Any] = [parse(entry.value)]
    except Exception as error:  # the generated parser raises what it likes
        raise ConfigError(f"{place} is no interpolation: {_first_line(error)}") from error
    while trees:
        tree = trees.pop()
        if type(tree).__name__ == "InterpolationResolverContext":
            name = tree.resolverName().getText()
            if name not in _PURE_RESOLVERS:
                raise ConfigError(
                    f"{place} calls {name!r}. A config follows from its files alone: write the value, or give it as"
                    f" an override: {dotted(key)}=..."
                )
        trees += getattr(tree, "children", None) or []


class _Resolver:
    """Looks interpolations up in an OmegaConf container, and counts the values that they stand for."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.count = 0

    def entry(self, entry: Entry, container: Any, key: Key) -> Entry:
        """Return the entry with all interpolations in it resolved; `container` is OmegaConf's copy of it."""
        if isinstance(entry.value, dict):
            pairs = entry.value.items()
            return Entry({name: self.child(one, container, (*key, name)) for name, one in pairs}, entry.origin)
        if isinstance(entry.value, list):
            items = enumerate(entry.value)
            return Entry([self.child(one, container, (*key, index)) for index, one in items], entry.origin)
        return entry

    def child(self, entry: Entry, container: Any, key: Key) -> Entry:
        """Resolve what stands under the last name of a key."""
        if isinstance(entry.value, dict | list):
            return self.entry(entry, container[key[-1]], key)
        if not isinstance(entry.value, str) or "${" not in entry.value:
            return entry
        place = f"{entry.origin}: {dotted(key)}"
        try:
            return self.unfold(container[key[-1]], entry.origin)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        except Exception as error:  # resolvers and the grammar raise many kinds, RecursionError for a circle
            missing = re.search(r"key '([^']*)' not found", str(error))
            hint = did_you_mean(missing[1], self.names) if missing else ""
            problem = "it refers to itself" if isinstance(error, RecursionError) else _first_line(error)
            raise ConfigError(f"{place}: {entry.value!r} cannot be resolved: {problem}.{hint}") from error

    def unfold(self, value: Any, origin: str) -> Entry:
        """Make entries of an OmegaConf value; all come from where the interpolation was written."""
        from omegaconf import DictConfig, ListConfig

        self.count += 1
        if self.count > MAX_VALUES:
            raise ConfigError(f"the interpolations stand for more than {MAX_VALUES} values.")
        if isinstance(value, DictConfig):
            return Entry({name: self.unfold(value[name], origin) for name in value}, origin)
        if isinstance(value, ListConfig):
            return Entry([self.unfold(value[index], origin) for index in range(len(value))], origin)
        return Entry(value, origin)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
