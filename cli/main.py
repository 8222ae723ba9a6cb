"""The command line: `legato COMMAND ...` and `python -m legato`. Each command's module is imported on demand."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..base.errors import ConfigError, LegatoError, correction, did_you_mean
from ..base.messages import STDERR, shown_from

FAILED, USAGE, INTERRUPTED = 1, 2, 130  # 128 + SIGINT, as in shells
EXIT_CODES = {
    0: "done",
    FAILED: "failed",
    USAGE: "a mistake in the command line or the config; nothing ran",
    75: "stopped by a signal after saving a checkpoint; continue with resume=auto",
    INTERRUPTED: "Ctrl-C",
}
OUTPUT = {
    "--quiet": "show only warnings, errors and the result: no progress bar, table, summary or layout",
    "--verbose": "also show config files, run directory, devices and data",
}


class Command(NamedTuple):
    """A command: the function that runs it ("module:function"), and its line in the overview."""

    home: str
    summary: str


GROUPS = {
    "training and evaluation": {
        "new": Command(".new.command:run_new", "Create a small project that you can train immediately."),
        "fit": Command(".run:run_fit", "Train the task of a config."),
        "validate": Command(".run:run_validate", "Evaluate the task on its validation data."),
        "test": Command(".run:run_test", "Evaluate the task on its test data."),
        "predict": Command(".run:run_predict", "Write the task's predictions for its prediction data."),
        "sweep": Command(".sweep:run_sweep", "Train with many values of some keys. Repeat the command to continue."),
    },
    "configs": {
        "config": Command(".run:run_config", "Print the resolved config with the origin of each value."),
        "check": Command(".check:run_check", "Run a few steps of every stage to catch errors before the run."),
        "plan": Command(".plan:run_plan", "Show the layout of a run and the memory each process needs."),
        "help": Command(".help:run_help", "Explain a config key, or a class that a config may name."),
    },
    "runs on disk": {
        "runs": Command(".runs.runs:run_runs", "List runs with their state, step, best value and changed keys."),
        "show": Command(".runs.show:run_show", "Show a run's config, metrics, last error and checkpoints."),
        "compare": Command(".runs.compare:run_compare", "Compare configs and metrics of several runs."),
        "clean": Command(".runs.clean:run_clean", "Delete empty runs, failed runs and old checkpoints, after asking."),
        "samples": Command(".samples:run_samples", "List the samples of a step, or the steps that used a sample."),
        "replay": Command(".replay:run_replay", "Recompute steps of a run and verify them."),
        "verify": Command(".verify:run_verify", "Verify random segments of a run, and write a certificate."),
        "export": Command(".export:run_export", "Write weights, a model or a full checkpoint for other programs."),
        "convert": Command("..compat.lightning.convert:run_convert", "Write a checkpoint as a Lightning .ckpt file."),
    },
    "other": {
        "lightning": Command("..compat.lightning.script:run_lightning", "Run a script written for PyTorch Lightning."),
        "completion": Command(".completion:run_completion", "Print a completion script for your shell."),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
GONE = {
    "tune": "legato tune was removed. Try values for a setting with `legato sweep CONFIG.yaml trainer.threads=1,2 "
    "--metric throughput/samples_per_second --mode max` (docs/how-to/speed.md).",
    "board": "legato board was removed. View runs with `tensorboard --logdir runs`.",
    "schema": "legato schema was removed. Editors read legato/configs/legato.schema.json (docs/how-to/config.md).",
}
"""Alternatives to removed commands."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError with a suggestion and does not accept abbreviated options."""

    def __init__(self, name: str, **options: Any) -> None:
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"legato {name}", formatter_class=shape, allow_abbrev=False, **options)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse arguments, which may be in any order. Raises ConfigError if there is a mistake."""
        # intermixed: options may come before, between and after the files and overrides of a config
        options, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            word = unknown[0].partition("=")[0]
            hint = did_you_mean(word, self._option_string_actions) if word.startswith("-") else " Remove it."
            example = correction(f"{word} VALUE", f"{word.lstrip('-')}=VALUE") if "." in word else ""
            self.error(f"unexpected argument {unknown[0]!r}.{hint}".removesuffix("."), example)
        return options

    def error(self, message: str, example: str = "") -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{self.prog}: {message}. See `{self.prog} --help`.{example}")


def command_parser(name: str) -> Parser:
    """Return the parser of a command."""
    # imported here, as below, since `legato --version` needs neither configs nor YAML
    from .arguments import add_arguments, epilog

    parser = Parser(name, description=COMMANDS[name].summary)
    add_arguments(parser, name)
    for option, text in OUTPUT.items():
        parser.add_argument(option, dest="level", action="store_const", const=option, help=text)
    parser.epilog = "\n\n".join(filter(None, [epilog(name), exit_codes()]))
    return parser


def overview() -> str:
    """Return the text of `legato --help`."""
    lines = ["usage: legato COMMAND [arguments]"]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<12}{command.summary}" for name, command in commands.items())]
    lines += ["", "legato COMMAND --help lists a command's arguments; legato help KEY explains a config key."]
    return "\n".join([*lines, "", exit_codes()])


def exit_codes() -> str:
    """Return the exit codes and their meanings, one per line."""
    return "\n".join(["exit codes:", *(f"  {code:<4}{meaning}" for code, meaning in EXIT_CODES.items())])


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _open_standard_files()
    try:
        _find_modules_here()
        code = _dispatch(list(sys.argv[1:] if words is None else words))
        # flushed here, where BrokenPipeError is handled; at exit, Python would print it and return 120
        sys.stdout.flush()
        return code
    except LegatoError as error:
        # without a traceback: the message tells users how to fix their mistake
        print("\n".join([f"legato: {error}", *getattr(error, "__notes__", [])]), file=STDERR, flush=True)
        # lets schedulers distinguish a run that never started from one that failed
        code = USAGE if isinstance(error, ConfigError) else FAILED
        _tell_other_ranks(error, code)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe, such as head, has exited
        # buffered output is discarded, since Python's flush at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        _tell_other_ranks(error, FAILED)
        raise


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        print(overview())
        return 0 if words else USAGE
    if words[0] == "--version":
        from ..base.version import __version__

        print(f"legato {__version__}")
        return 0
    name, *rest = words
    if name in GONE:
        raise ConfigError(GONE[name])
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f" The commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"{name!r} is not a command.{hint}")
    module, _, function = COMMANDS[name].home.partition(":")
    if name == "lightning":  # all arguments belong to the script
        getattr(import_module(module, __package__), function)(rest)
        return 0
    if name == "help" and rest[0] in COMMANDS:
        name, rest = rest[0], ["--help"]
    parser = command_parser(name)
    if {"-h", "--help"} & set(rest):
        print(parser.format_help().rstrip())
        return 0
    options = parser.parse(rest)
    with shown_from(options.level):
        getattr(import_module(module, __package__), function)(options)
    return 0


def _open_standard_files() -> None:
    """Open the standard streams that were closed when the program started.

    Otherwise, the next files opened would reuse the streams' descriptors and receive the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _find_modules_here() -> None:
    """Put the working directory on sys.path, as `python -m` does. A console script gets a different folder."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError as error:
        raise ConfigError("The working directory no longer exists. Change to one that does.") from error
    # first, so that the user's modules take precedence over installed ones of the same name
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _tell_other_ranks(error: Exception, code: int) -> None:
    """Report an error to the launcher's other processes. Needed only before the process group exists."""
    from ..trainer.processes.rendezvous import tell_failure

    text = str(error) if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"
    with suppress(LegatoError):
        tell_failure(text, code == USAGE)


if __name__ == "__main__":
    sys.exit(main())
