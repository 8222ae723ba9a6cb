"""Plain data from YAML text and back, with the place that each value came from.

The dialect is YAML 1.2's core schema: only true and false are booleans, so that `reproducible: off` is the word "off",
and 1e-3 is a number; YAML 1.1, which PyYAML reads by itself, says otherwise to both, and takes 1:30 for 90. Tags,
repeated keys and names of Python objects are refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ..errors import ConfigError
from .schema import Key

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


def parse(text: str, name: str, origin: str | None = None) -> Entry:
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
    return Entry(None, origin or f"{name}:1") if node is None else _Builder(name, origin).entry(node)


class _Builder:
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


def dump(values: Mapping[str, Any], origin: Callable[[Key], str] | None = None) -> str:
    """Write plain data as YAML that `parse` reads back; with `origin`, each line says where its value is from."""
    lines: list[str] = []

    def write(value: Any, indent: str, head: str, key: Key) -> None:
        nested = isinstance(value, dict | list) and any(isinstance(item, dict | list) for item in _items(value))
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


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _flow(value: Any) -> str:
    """One value on one line."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]
