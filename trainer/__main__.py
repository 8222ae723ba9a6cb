"""The command line: `legato fit CONFIG.yaml key=value ...`, and `python -m legato.trainer`, which is the same."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .errors import ConfigError, LegatoError, did_you_mean
from .messages import STDERR

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass(frozen=True)
class Command:
    """A subcommand: its line of help, and the module and function that run it, imported only when it is called."""

    summary: str
    module: str
    function: str
    helps_itself: bool = False
    """Whether --help is an argument of what it runs."""

    def run(self, arguments: Sequence[str]) -> None:
        """Run the command with the arguments that follow its name."""
        getattr(import_module(self.module, __package__), self.function)(arguments)


COMMANDS = {
    "new": Command("Write a small project that trains at once: NAME.", ".commands.new.command", "run_new"),
    "fit": Command("Train the task.", ".commands.fit", "run_fit"),
    "validate": Command("Evaluate it on its validation data.", ".commands.evaluate", "run_validate"),
    "test": Command("Evaluate it on its test data.", ".commands.evaluate", "run_test"),
    "predict": Command("Write its predictions for its prediction data.", ".commands.evaluate", "run_predict"),
    "config": Command(
        "Print the resolved config, with the origin of each value, and stop.", ".commands.config", "show_config"
    ),
    "schema": Command(
        "Print the JSON schema of a config, with which an editor completes and checks it.",
        ".commands.schema",
        "run_schema",
    ),
    "check": Command(
        "Run a few steps of every stage to find what would fail later.", ".commands.check.check", "run_check"
    ),
    "plan": Command(
        "Show what would run where: nodes=N devices=N [rank=R step=S epoch=E].", ".commands.plan.command", "run_plan"
    ),
    "samples": Command(
        "Tell which samples a step of a run had: RUN step=N [replica=R] [--show]; or when: RUN index=N.",
        ".commands.replay.samples",
        "run_samples",
    ),
    "replay": Command(
        "Compute steps of a run again: RUN step=N [until=M] [--debug] [save=DIR]; RUN steps=A..B callbacks.NAME...",
        ".commands.replay.command",
        "run_replay",
    ),
    "export": Command(
        "Write a checkpoint's weights to one file: CHECKPOINT OUT.safetensors.", ".commands.export", "run_export"
    ),
    "convert": Command(
        "Write a checkpoint as Lightning's file, or the reverse: CHECKPOINT OUT.ckpt, or FILE.ckpt DIRECTORY.",
        ".commands.convert",
        "run_convert",
    ),
    "lightning": Command(
        "Run a script written for PyTorch Lightning, unchanged: SCRIPT.py [arguments].",
        "..compat.lightning.script",
        "run_lightning",
        helps_itself=True,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failed run, 2 for a wrong config, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A console script starts with its own folder on the path; users' modules are in the current one, as for python -m.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _print_error(error, EXIT_USAGE)
    except LegatoError as error:
        return _print_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print("legato COMMAND CONFIG.yaml [MORE.yaml ...] [key=value ...]\n")
        print("\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()))
        print("\nlegato COMMAND --help lists every key of a config.")
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        from .. import __version__

        print(f"legato {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f" The commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"{name!r} is not a command.{hint}")
    if {"-h", "--help"} & set(rest) and not COMMANDS[name].helps_itself:
        from .commands.config import help_text

        print(help_text(name, COMMANDS[name].summary))
        return 0
    COMMANDS[name].run(rest)
    return 0


def _print_error(error: LegatoError, code: int) -> int:
    notes: list[str] = getattr(error, "__notes__", [])
    print("\n".join([f"legato: {error}", *notes]), file=STDERR, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
