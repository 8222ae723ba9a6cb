"""Commands of `legato` and their arguments: how they are parsed, and what `legato COMMAND --help` says of them.

A command either takes a config, that is files and key=value, which it gets as they were typed; or arguments of its own,
which argparse reads.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from ..base.errors import ConfigError, did_you_mean
from ..base.messages import LEVELS, shown_from

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_CODES = {
    0: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "a mistake in the command line or the config; nothing was run",
    75: "stopped by a signal, after a checkpoint; start it again with resume=auto",
    EXIT_INTERRUPTED: "Ctrl-C",
}
_OUTPUT = """output:
  --quiet    only warnings, errors and the result: no bar, table, summary or layout
  --verbose  also what was read and chosen: config files, the origin of each value, run directory, devices, data"""
CONFIG_WORDS = "CONFIG.yaml [MORE.yaml ...] [key=value ...]"


@dataclass(frozen=True, init=False)
class Argument:
    """One argument of a command, as `ArgumentParser.add_argument` takes it: names or flags, then options."""

    flags: tuple[str, ...]
    options: Mapping[str, Any]

    def __init__(self, *flags: str, **options: Any) -> None:
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "options", options)


@dataclass(frozen=True)
class Command:
    """A subcommand: its line of help, and the module and function that run it, imported only when it is called."""

    summary: str
    module: str
    function: str
    helps_itself: bool = False
    """Whether --help is an argument of what it runs."""
    arguments: Sequence[Argument] | None = None
    """Arguments that the function gets as a Namespace; None: it takes a config, and gets the words."""
    usage: str = CONFIG_WORDS
    """The words that it takes, where it has no `arguments`."""
    own_keys: Mapping[str, str] = field(default_factory=dict)
    """Words such as `nodes=4` that such a command takes besides the keys of a config, and their meaning."""
    without: Sequence[str] = ()
    """Keys of a config that mean nothing to it."""
    more: str = ""
    """More text for its help: examples."""
    about: str = "other"
    """Heading above it in the list of commands."""
    logs: bool = False
    """Whether it takes --quiet and --verbose."""

    def run(self, name: str, words: Sequence[str]) -> None:
        """Run the command with the words that follow its name."""
        options = [word for word in words if self.logs and word in LEVELS]
        words = [word for word in words if word not in options]
        arguments = words if self.arguments is None else parse(self, name, words)
        with shown_from(options[-1] if options else None):
            getattr(import_module(self.module, __package__), self.function)(arguments)

    @property
    def notes(self) -> str:
        """End of its help: examples, options of the output, exit codes."""
        return "\n\n".join(filter(None, [self.more.strip(), _OUTPUT if self.logs else "", exit_codes()]))


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are ConfigErrors with a suggestion, and that accepts no shortened options."""

    def __init__(self, command: Command, name: str) -> None:
        super().__init__(
            prog=f"legato {name}",
            description=command.summary,
            epilog=command.notes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for one in command.arguments or ():
            self.add_argument(*one.flags, **one.options)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{self.prog}: {message}. `{self.prog} --help` shows what it takes.")


def parse(command: Command, name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. Raises ConfigError for a mistake, with a suggestion."""
    parser = CommandParser(command, name)
    found, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        word = unknown[0].partition("=")[0]
        hint = did_you_mean(word, option_names(command)) if word.startswith("-") else " It is one too many."
        parser.error(f"{unknown[0]!r} is not an argument of it.{hint}".removesuffix("."))
    return found


def exit_codes() -> str:
    """Return the exit codes of `legato` and their meaning, one a line."""
    return "\n".join(["exit codes:", *(f"  {code:<4}{meaning}" for code, meaning in EXIT_CODES.items())])


def option_names(command: Command) -> Iterable[str]:
    """Return the options that a command takes, such as --plot."""
    for one in command.arguments or ():
        yield from (flag for flag in one.flags if flag.startswith("--"))
    if command.logs:
        yield from LEVELS
    yield "--help"
