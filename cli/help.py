"""`legato COMMAND --help` and `legato help KEY`: what commands take, and what one key of a config means. No torch."""

import re
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.arguments import documented_arguments
from ..base.errors import ConfigError, did_you_mean
from ..base.targets import TARGET
from ..trainer.strategies import STRATEGIES
from .command_line import CONFIG_WORDS, Command, CommandParser, exit_codes
from .config.read import MOVED, SECTION_OF, SECTIONS, dotted, read_config, ready_configs
from .config.signatures import NO_DEFAULT, Parameter, Sources, launcher_arguments, trainer_arguments
from .launchers import LAUNCHERS

SOURCE_ROOT = Path(__file__).resolve().parents[1]
NAME = __name__.partition(".")[0]
ROOMS = {"callbacks": "callbacks", "loggers": "loggers", "task": "tasks", "data": "tasks"}
"""The package of Legato's own classes for each section that names some."""
MOST_PLACES = 4


def overview(commands: Mapping[str, Command]) -> str:
    """Return the text of `legato --help`."""
    lines = ["usage: legato COMMAND [arguments]"]
    for heading in dict.fromkeys(
        sorted((one.about for one in commands.values()), key=lambda one: one == Command.about)
    ):
        listed = [(name, one) for name, one in commands.items() if one.about == heading]
        lines += ["", f"{heading}:", *(f"  {name:<12}{one.summary}" for name, one in listed)]
    lines += ["", "legato COMMAND --help tells what one of them takes, legato help KEY what a key of a config means."]
    return "\n".join([*lines, "", exit_codes()])


def command_help(name: str, command: Command) -> str:
    """Return the text of `legato NAME --help`: what this command takes."""
    if command.arguments is not None:
        return CommandParser(command, name).format_help().rstrip()
    lines = [f"usage: legato {name} {command.usage}", "", command.summary]
    if command.own_keys:
        size = max(map(len, command.own_keys)) + 2
        lines += ["", "arguments:", *(f"  {one:<{size}}{text}" for one, text in command.own_keys.items())]
    if command.usage == CONFIG_WORDS:
        lines += ["", *_config_help(command)]
    return "\n".join([*lines, "", command.notes])


def _config_help(command: Command) -> Iterator[str]:
    yield "Files are merged left to right, then overrides such as trainer.max_epochs=3 and callbacks.NAME=null."
    yield "A file may extend others: extends: [base.yaml]. ${trainer.max_epochs} is replaced by that value."
    yield f"Ready configs, found from any folder: {', '.join(ready_configs()) or 'none'}."
    yield from ("", "keys of a config (legato help KEY tells more of one):")
    yield from (f"  {one:<12}{doc}" for one, doc in SECTIONS.items() if one not in command.without)
    yield from ("", "keys under trainer:")
    yield from _documented(one for one in trainer_arguments() if one.name not in MOVED and one.name not in SECTION_OF)
    for launcher in LAUNCHERS if "launcher" not in command.without else ():
        yield from ("", f"keys under launcher: with name={launcher}:")
        yield from _documented(launcher_arguments(launcher))


def _documented(arguments: Iterable[Any]) -> Iterator[str]:
    for one in arguments:
        yield f"  {one}"
        yield from _paragraphs(one.doc, 6)


def _paragraphs(text: str, indent: int) -> Iterator[str]:
    """Yield the lines of a text in paragraphs, as wide as the terminal, 120 columns at most."""
    width, margin = min(shutil.get_terminal_size().columns, 120), " " * indent
    for index, paragraph in enumerate(text.strip().split("\n\n") if text.strip() else ()):
        if index:
            yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), width, initial_indent=margin, subsequent_indent=margin)


# --- one key ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeyHelp:
    """Facts about one key of a config, or about a class that it may name."""

    key: str
    doc: str
    parameter: Parameter | None = None
    owner: str = ""
    """The class that takes it; "": the Trainer."""
    more: Sequence["KeyHelp"] = ()
    """The arguments of a class."""

    def text(self, sources: Sources) -> str:
        """Return the help of the key, with the files in which it acts."""
        lines = [self.heading, *_paragraphs(self.doc, 4)]
        if self.owner:
            lines.append(f"    acts in {place_of(self.owner, sources)}")
        elif self.parameter is not None:
            lines += [f"    acts in {place}" for place in places_of(self.parameter.name)]
        for one in self.more:
            lines += [f"  {one.heading}", *_paragraphs(one.doc, 6)]
        return "\n".join(lines)

    @property
    def heading(self) -> str:
        """The key with its type and default."""
        if self.parameter is None:
            return self.key
        kind = str(self.parameter).partition(": ")[2].rpartition(" = ")[0]
        default = "" if self.parameter.default is NO_DEFAULT else f" = {self.parameter.default!r}"
        return f"{self.key}: {kind}{default}"


def run_help(arguments: Namespace) -> None:
    """Print what a key of a config means, or a class that a config may name. Raises ConfigError if there is none."""
    index = KeyIndex(arguments.config)
    print("\n\n".join(one.text(index.sources) for one in index.look_up(arguments.topic)))


class KeyIndex:
    """Every key that a config may have: those of Trainer, strategies, launchers, and of the classes that it names.

    config: files and overrides, whose classes are known then, too.
    """

    def __init__(self, config: Sequence[str] = ()) -> None:
        self.values: dict[str, Any] = read_config(config).values if config else {}
        self.sources = Sources()

    def look_up(self, topic: str) -> list[KeyHelp]:
        """Return the help for a key, or for a class and its arguments. Raises ConfigError if it is unknown."""
        moved = MOVED.get(topic.removeprefix("trainer."))
        for key in (topic, f"trainer.{topic}", dotted(moved) if moved else topic):
            found = [one for one in self.keys_under(key.rpartition(".")[0]) if one.key == key]
            if found:
                return found
        path = self.class_named(topic)
        if path is not None:
            return [self.class_help(path)]
        every = [one.key for prefix in ("", "trainer", "run") for one in self.keys_under(prefix)]
        names = [*every, *(key.rpartition(".")[2] for key in every), *own_classes(), *STRATEGIES, *self.named_classes()]
        hint = did_you_mean(topic, names) or f" The keys are {', '.join(SECTIONS)}, and those below them."
        raise ConfigError(f"{topic!r} is neither a command, a key of a config, nor a class of Legato.{hint}")

    def keys_under(self, prefix: str) -> list[KeyHelp]:
        """Return the keys one level below a key; "": those of the top level."""
        if not prefix:
            return [KeyHelp(name, doc, self._top_level().get(name)) for name, doc in SECTIONS.items()]
        if prefix == "run":
            named = {name: one for name, one in self._top_level().items() if name.startswith("run.")}
            return [KeyHelp(name, one.doc, one) for name, one in named.items()]
        if prefix == "trainer":
            own = (one for one in trainer_arguments() if one.name not in MOVED and one.name not in SECTION_OF)
            return [KeyHelp(f"trainer.{one.name}", one.doc, one) for one in own]
        if prefix == "trainer.strategy":
            return self._options(prefix, STRATEGIES, "trainer.strategies")
        if prefix == "launcher":
            return self._options(prefix, LAUNCHERS, "cli.launchers")
        path = self.named_classes().get(prefix)
        section, _, name = prefix.partition(".")
        if path is None and name and section in ROOMS:  # callbacks.early_stopping: the class of that name
            path = next(
                (own for one, own in own_classes(section).items() if one.lower() == name.replace("_", "")), None
            )
        return [] if path is None else list(self.class_help(path, prefix).more)

    def named_classes(self) -> dict[str, str]:
        """Return the class that the config names for each section, or entry of one."""
        found = {}
        for section in ROOMS:
            value = self.values.get(section)
            entries = {section: value} if section in ("task", "data") else value if isinstance(value, dict) else {}
            for name, one in entries.items():
                if isinstance(one, dict) and isinstance(one.get(TARGET), str):
                    found[name if name == section else f"{section}.{name}"] = one[TARGET]
        return found

    def class_named(self, topic: str) -> str | None:
        """Return the path of the class that a word means: Legato's own, a strategy's, or a dotted path."""
        if topic in STRATEGIES:
            return f"{NAME}.trainer.strategies{STRATEGIES[topic].replace(':', '.')}"
        with suppress(LookupError, RecursionError):
            path = self.named_classes().get(topic) or own_classes().get(topic) or topic
            return path if self.sources.locate(path).kind == "class" else None
        return None

    def class_help(self, path: str, prefix: str = "") -> KeyHelp:
        """Return the help of a class, with its arguments as keys below `prefix`."""
        doc, known = self._docstring(path), None
        with suppress(LookupError, ConfigError, RecursionError):
            known = self.sources.signature(path)
        texts = documented_arguments(doc)
        parameters = {} if known is None else known.parameters
        start = f"{prefix}." if prefix else ""
        more = [
            KeyHelp(start + name, one.doc or texts.get(name, ""), one, owner=path) for name, one in parameters.items()
        ]
        return KeyHelp(path, doc.partition("Args:")[0], owner=path, more=more)

    def _docstring(self, path: str) -> str:
        with suppress(LookupError, RecursionError):
            return self.sources.locate(path).docstring
        return ""

    def _top_level(self) -> dict[str, Parameter]:
        known = {one.name: one for one in trainer_arguments()}
        return {dotted(key): known[name] for name, key in MOVED.items()}

    def _options(self, prefix: str, homes: dict[str, str], room: str) -> list[KeyHelp]:
        """Return the options of the strategies or launchers, each with the names of those that take it."""
        found: dict[str, list[tuple[str, KeyHelp]]] = {}
        for name, home in homes.items():
            for one in self.class_help(f"{NAME}.{room}{home.replace(':', '.')}", prefix).more:
                found.setdefault(one.key, []).append((name, one))
        merged = [KeyHelp(f"{prefix}.name", f"One of {', '.join(homes)}.")]
        for key, takers in found.items():
            first = next((one for _, one in takers if one.doc), takers[0][1])
            takes = f"Taken by {', '.join(name for name, _ in takers)}."
            merged.append(KeyHelp(key, f"{first.doc} {takes}".strip(), first.parameter, first.owner))
        return merged


def own_classes(section: str | None = None) -> dict[str, str]:
    """Return Legato's own classes that a config may name, in a section or in all: the path of each by its name."""
    rooms = dict.fromkeys([*ROOMS.values(), "lab"] if section is None else [ROOMS[section]])
    return {name: f"{NAME}.{room}.{name}" for room in rooms for name in import_module(f"{NAME}.{room}").__all__}


def places_of(name: str) -> list[str]:
    """Return the files and lines of Legato that read an argument of the Trainer, those that do so most often first."""
    used = re.compile(rf"\btrainer\.{name}\b|[\"']{name}[\"']|\bself\.{name}\b")
    found = []
    rooms = ("trainer", "callbacks", "lab")
    for path in sorted(path for room in rooms for path in SOURCE_ROOT.glob(f"{room}/**/*.py")):
        home = path.relative_to(SOURCE_ROOT)
        if home.name == "view.py":
            continue
        own = str(home) in ("trainer/trainer.py", "trainer/defaults.py")
        lines = path.read_text(encoding="utf-8").splitlines()
        hits = [
            number
            for number, line in enumerate(lines, 1)
            if (match := used.search(line)) and (own or not match[0].startswith("self."))
        ]
        if hits:
            found.append((-len(hits), f"{home}:{hits[0]}"))
    return [place for _, place in sorted(found)[:MOST_PLACES]]


def place_of(path: str, sources: Sources) -> str:
    """Return the file and line of the definition of a class."""
    found = sources.locate(path)
    spec = None if found.module is None else sources.spec(found.module.name)
    if spec is None or spec.origin is None:
        return path
    file = Path(spec.origin)
    near = file.relative_to(SOURCE_ROOT) if file.is_relative_to(SOURCE_ROOT) else file
    return f"{near}:{found.node.lineno}"
