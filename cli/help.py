"""`legato help`: explains a config key or a class that can be used in a config."""

import inspect
from argparse import Namespace
from importlib import import_module

from ..base.arguments import argument_texts, argument_types
from ..base.errors import ConfigError, did_you_mean
from ..base.values import name_of
from ..trainer.strategies import STRATEGIES
from .config.check import LAUNCHERS, class_path
from .config.classes import load
from .config.read import MOVED, SECTIONS, dotted

NAME = __name__.partition(".")[0]
ROOMS = ("callbacks", "loggers", "tasks", "lab")
"""Packages whose classes can be used in a config."""


def run_help(options: Namespace) -> None:
    """Print the help for a topic. Raises ConfigError for an unknown topic."""
    print(explain(options.topic))


def explain(topic: str) -> str:
    """Return the help for a config key, a class (by name or path), a strategy or a launcher."""
    argument = {dotted(key): name for name, key in MOVED.items()}.get(topic, topic.removeprefix("trainer."))
    if argument in argument_texts():
        key = dotted(MOVED[argument]) if argument in MOVED else f"trainer.{argument}"
        return f"{key}: {name_of(argument_types()[argument])}\n    {argument_texts()[argument]}"
    if topic in SECTIONS:
        return f"{topic}\n    {SECTIONS[topic]}"
    # only names are needed here; a class is imported only if it is the topic
    homes = {name: f"{NAME}.{room}.{name}" for room in ROOMS for name in import_module(f"{NAME}.{room}").__all__}
    homes |= {name: class_path("strategy", name) for name in STRATEGIES}
    homes |= {name: class_path("launcher", name) for name in LAUNCHERS}
    if topic in homes or ("." in topic and topic.partition(".")[0] not in SECTIONS):
        return _describe(homes.get(topic, topic))
    topics = [*(f"trainer.{argument}" for argument in argument_texts()), *argument_texts(), *SECTIONS, *homes]
    hint = did_you_mean(topic, topics) or f" The top-level keys are {', '.join(SECTIONS)}."
    raise ConfigError(f"{topic!r} is not a command, a config key or a class in Legato.{hint}")


def _describe(path: str) -> str:
    """Return the constructor and the docstring of a class."""
    try:
        target = load(path)
    except ConfigError as error:
        raise ConfigError(f"Cannot import {path}: {error}") from error
    texts = [inspect.getdoc(target), inspect.getdoc(getattr(target, "__init__", None))]
    arguments = str(inspect.signature(target)).removesuffix(" -> None")
    return "\n\n".join([f"{path}{arguments}", *(text for text in texts if text and "help(type(self))" not in text)])
