"""`legato completion SHELL`: prints a script that completes commands, options, Trainer keys and config files."""

import argparse
from argparse import Namespace

from ..base.arguments import argument_texts
from ..base.errors import ConfigError
from .arguments import add_arguments
from .config.read import MOVED, SECTION_OF
from .main import COMMANDS

CONFIG_WORDS = """
_legato_config_words() {
    compgen -W "%s" -- "$1"
    compgen -f -X '!*.y*ml' -- "$1"
}
"""


def run_completion(options: Namespace) -> None:
    """Print the completion script. Raises ConfigError if the shtab package is missing."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("legato completion needs the shtab package: pip install 'legato[completion]'") from error
    # shtab needs a single parser with subparsers, which the command line doesn't have
    parser = argparse.ArgumentParser(prog="legato")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=command.summary), name)
    keys = " ".join(f"trainer.{name}=" for name in argument_texts() if name not in (*MOVED, *SECTION_OF))
    words = {"bash": CONFIG_WORDS % keys}
    print(shtab.complete(parser, options.shell, preamble=words))
