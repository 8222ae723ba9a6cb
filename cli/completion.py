"""`legato completion SHELL`: a script that completes commands, options, keys of a config and their values. No torch.

The script asks `legato completion --line LINE` for what may stand in place of the last word of a line.
"""

import os
import shlex
import typing
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from ..base.errors import ConfigError, LegatoError
from ..base.targets import TARGET
from ..trainer.runs.directory import ROOT, find_runs
from ..trainer.strategies import STRATEGIES
from .command_line import Command, option_names
from .config.check import EXPECTED
from .config.read import SECTIONS, project_configs, ready_configs
from .config.signatures import Parameter
from .help import ROOMS, KeyIndex, own_classes
from .launchers import LAUNCHERS

SCRIPTS = {
    "bash": r"""# legato's completion; in ~/.bashrc: eval "$(legato completion bash)"
_legato() {
    local IFS=$'\n' line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    COMPREPLY=($(legato completion --line "$line" 2>/dev/null))
    # bash replaces only what follows the last = or : of a word
    if [[ $COMP_WORDBREAKS == *=* ]]; then
        local kept=${word%"${word##*[=:]}"}
        COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    fi
}
complete -o nospace -F _legato legato
""",
    "zsh": r"""#compdef legato
# legato's completion; in ~/.zshrc, after compinit: eval "$(legato completion zsh)"
_legato() {
    local -a replies
    replies=("${(@f)$(legato completion --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    compadd -Q -S '' -- ${replies:#}
}
compdef _legato legato
""",
    "fish": r"""# legato's completion; in ~/.config/fish/config.fish: legato completion fish | source
complete -c legato -f -a '(legato completion --line (commandline -cp | string collect) 2>/dev/null | string trim -r)'
""",
}
FINAL = " "
"""Follows a word that is whole; a key or a folder goes on."""


def run_completion(arguments: Namespace) -> None:
    """Print the script of a shell, or the words that may complete a line."""
    if arguments.line is not None:
        from .main import COMMANDS

        print("\n".join(Completer(COMMANDS).complete(arguments.line)))
    elif arguments.shell is None:
        raise ConfigError(f"Which shell? legato completion {'|'.join(SCRIPTS)}")
    else:
        print(SCRIPTS[arguments.shell], end="")


class Completer:
    """Finds what may stand in place of the last word of a command line."""

    def __init__(self, commands: "typing.Mapping[str, Command]") -> None:
        self.commands = commands

    def complete(self, line: str) -> list[str]:
        """Return all that the last word may become, sorted; each that is whole ends with a space."""
        try:
            words = shlex.split(line)
        except ValueError:  # a quote that is still open
            words = line.split()
        last = words.pop() if words and not line[-1:].isspace() else ""
        found: Iterable[str] = ()
        with suppress(LegatoError, OSError):  # nothing can be told in the middle of a line
            found = self._candidates(words[1:], last)
            return sorted({one for one in found if one.startswith(last)})
        return []

    def _candidates(self, before: Sequence[str], last: str) -> Iterator[str]:
        if not before:
            yield from (name + FINAL for name in (*self.commands, "--help", "--version"))
            return
        command = self.commands.get(before[0])
        if command is None or command.helps_itself:
            yield from paths(last)
        elif last.startswith("-"):
            yield from (name + FINAL for name in option_names(command))
        elif before[0] == "help" and len(before) == 1:
            yield from self._topics(last)
        elif command.arguments is not None:
            yield from self._own(command, before, last)
        else:
            yield from self._config(before[1:], last)

    def _own(self, command: Command, before: Sequence[str], last: str) -> Iterator[str]:
        """Yield what an argument of a command's own may be: by its choices, or by what it is called."""
        named = {flag: one for one in command.arguments or () for flag in one.flags}
        given = len([word for word in before[1:] if not word.startswith("-")])
        places = [one for one in command.arguments or () if not one.flags[0].startswith("-")]
        one = named.get(before[-1]) or (places[min(given, len(places) - 1)] if places else None)
        if one is None:
            return
        yield from (str(choice) + FINAL for choice in one.options.get("choices") or ())
        what = str(one.options.get("metavar"))
        if what in ("RUN", "CHECKPOINT"):
            yield from run_names()
        if what in ("CONFIG", "WORD"):
            yield from self._config(before[1:] if what == "WORD" else before[2:], last)
        elif what in ("RUN", "DIR"):
            yield from (path for path in paths(last) if path.endswith("/"))
        elif what not in ("N", "NAME", "KEY") and not one.options.get("choices"):
            yield from paths(last)

    def _topics(self, last: str) -> Iterator[str]:
        yield from (name + FINAL for name in (*self.commands, *own_classes(), *STRATEGIES))
        yield from (key.removesuffix("=") + FINAL * key.endswith("=") for key in keys(KeyIndex(), last))

    def _config(self, before: Sequence[str], last: str) -> Iterator[str]:
        """Yield files, keys and values of a config; the classes are those that the words before name."""
        try:
            index = KeyIndex([word for word in before if not word.startswith("-")])
        except LegatoError:  # it is not whole yet
            index = KeyIndex()
        key, equals, value = last.partition("=")
        if equals:
            yield from (f"{key}={one}" for one in values(index, key, value))
            return
        yield from (path for path in paths(last) if path.endswith(("/", f".yaml{FINAL}", f".yml{FINAL}")))
        if "/" not in last:
            own = project_configs()
            yield from (path.name + FINAL for path in (own.glob("*.y*ml") if own else ()))
            yield from (name + FINAL for name in ready_configs())
        yield from keys(index, last)


def keys(index: KeyIndex, last: str) -> Iterator[str]:
    """Yield the keys one level below the last dot of a word: with a dot where keys are below it, else with a =."""
    prefix = last.rpartition(".")[0]
    for one in index.keys_under(prefix):
        goes_on = one.key in ("trainer", "run", *ROOMS)
        yield f"{one.key}." if goes_on else f"{one.key}="
        if one.key in ("trainer.strategy", "launcher"):
            yield f"{one.key}."
    section, _, name = prefix.partition(".")
    if section in ROOMS and (name or section in ("task", "data")):
        yield f"{prefix}.{TARGET}="
    elif section in ROOMS:
        yield from (f"{entry}." for entry in index.named_classes() if entry.startswith(f"{section}."))


def values(index: KeyIndex, key: str, value: str) -> Iterator[str]:
    """Yield the values that a key may have, as far as its type or its name tells."""
    section, _, name = key.rpartition(".")
    if name == TARGET:
        yield from targets(index, section.partition(".")[0], value)
        return
    if key in ("trainer.strategy", "trainer.strategy.name"):
        yield from (one + FINAL for one in ("auto", *STRATEGIES))
    if key in ("launcher", "launcher.name"):
        yield from (one + FINAL for one in LAUNCHERS)
    if key == "resume":
        yield f"auto{FINAL}"
    if key == "checkpoint":
        yield from (one + FINAL for one in ("best", "last", "none"))
    if key in SECTIONS or section in ("callbacks", "loggers"):
        yield f"null{FINAL}"
    for one in index.keys_under(section):
        if one.key == key and one.parameter is not None:
            yield from (text + FINAL for text in choices_of(one.parameter, index))


def choices_of(parameter: Parameter, index: KeyIndex) -> Iterator[str]:
    """Yield the values of a parameter whose type has few, and its default."""
    for kind in _alternatives(index.sources.type_of(parameter)):
        if typing.get_origin(kind) is Literal:
            yield from map(str, typing.get_args(kind))
        elif kind is bool:
            yield from ("true", "false")
        elif kind is NoneType:
            yield "null"
    if isinstance(parameter.default, int | float | str) and not isinstance(parameter.default, bool):
        yield str(parameter.default)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    found = typing.get_args(kind)
    return found if found and typing.get_origin(kind) is not Literal else (kind,)


def targets(index: KeyIndex, section: str, value: str) -> Iterator[str]:
    """Yield the classes for a section: Legato's own, and those in the modules of the current folder."""
    expected = EXPECTED.get(section)
    if expected is None:
        return
    modules = [path.stem for path in sorted(Path().glob("*.py")) if path.stem.isidentifier()]
    own = [path for path in own_classes(section).values() if value.startswith("legato") or not value]
    listed = [f"{module}.{name}" for module in modules for name in _classes_in(index, module)]
    for path in [*own, *listed]:
        with suppress(LookupError, RecursionError):
            known = path.startswith(value) and index.sources.is_subclass(path, expected)
            if known and index.sources.locate(path).path != expected:
                yield path + FINAL


def _classes_in(index: KeyIndex, module: str) -> list[str]:
    with suppress(LookupError):
        found = index.sources.read(module)
        return [] if found is None else [name for name in found.names if not name.startswith("_")]
    return []


def run_names() -> Iterator[str]:
    """Yield the names of the runs below the usual folder."""
    if os.path.isdir(ROOT):
        for run in find_runs(Path(ROOT)):
            yield run.name + FINAL
            yield f"{ROOT}/{run.name}{FINAL}"


def paths(last: str) -> Iterator[str]:
    """Yield the files and folders that begin with a word."""
    folder, _, _ = last.rpartition("/")
    start = f"{folder}/" if "/" in last else ""
    with suppress(OSError):
        for entry in os.scandir(start or "."):
            if not entry.name.startswith(".") or last.rpartition("/")[2].startswith("."):
                yield start + entry.name + ("/" if entry.is_dir() else FINAL)
