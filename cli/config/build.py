"""Builds the task, data module, callbacks, loggers and trainer from a checked config."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, add_note
from ...base.location import to_location
from ...base.targets import PARTIAL, TARGET, call_target
from ...base.values import Fitted, Key
from ...tasks.hyperparameters import Hyperparameters
from .check import EXPECTED, TRAINER, Config, ValueChecker, class_name, entries, find_target, is_entry
from .classes import load, signature_of
from .read import MOVED, dotted, replace_item

_PLAIN = (bool, int, float, str, list, dict, tuple, set, type(None))
"""Types of values that a checkpoint stores unchanged."""

if TYPE_CHECKING:
    from ...tasks.data_module import DataModule
    from ...tasks.task import Task
    from ...trainer.runs.places import StoredRun
    from ...trainer.trainer import Trainer


@dataclass
class ConfiguredRun:
    """The objects built from a config."""

    trainer: "Trainer"
    task: "Task"
    data: "DataModule | None"
    resume: str | None
    checkpoint: str | None
    directory: Path | None = None
    """The run directory that stores this config."""
    resumed: Path | None = None
    """The run that `resume=auto` found by name. Its directory stores this config."""

    def to_resume(self) -> "StoredRun | str | None":
        """Return the run to resume. For a stored config, "auto" means the run that stores it, not the newest run."""
        if self.resume != "auto" or (self.directory is None and self.resumed is None):
            return self.resume
        run = self.stored("auto")
        return run if self.resumed is None else replace(run, directory=self.resumed, by_name=True)

    def stored(self, word: str) -> "StoredRun":
        """Return the run on disk that `word` ("best", "last", "auto") refers to."""
        from ...trainer.runs.places import StoredRun

        return StoredRun(to_location(self.trainer.default_root_dir), self.trainer.run_name, self.directory, word)


def build_config(config: Config) -> ConfiguredRun:
    """Build the objects that a config describes, setting the config's seed before the task and again before the data.

    Raises ConfigError if building fails.
    """
    from ...trainer.data.randomness import seed_everything
    from ...trainer.trainer import Trainer

    builder, values, made = _Builder(config), config.values, dict[Key, Any]()
    for key, value in entries(values):
        if len(key) == 1:  # random numbers must not depend on objects built earlier
            seed_everything(values["seed"], verbose=False)
        made[key] = builder.make(value, key, load(EXPECTED[str(key[0])]))
    callbacks, loggers = ([item for key, item in made.items() if key[0] == name] for name in ("callbacks", "loggers"))
    arguments = build_arguments(config, values["trainer"])
    moved = {name: reduce(getitem, key, values) for name, key in MOVED.items()}
    # default loggers if the section is absent; no logger if it is null or empty
    logger = loggers or False if "loggers" in values else True
    try:
        trainer = Trainer(**arguments, **moved, callbacks=callbacks or None, logger=logger)
    except ConfigError as error:
        named = re.match(r"trainer\.(\w+)(?:: (\w+)=)?", str(error))  # an argument and possibly one of its options
        place = f"{config.origin(('trainer', *filter(None, named.groups())))}: " if named else ""
        raise ConfigError(f"{place}{error}") from error
    again = config.to_run_again()
    trainer.config_text, trainer.explicit_config = again.text(), again.given_text()
    task, data = made["task",], made.get(("data",))
    return ConfiguredRun(trainer, task, data, values["resume"], values["checkpoint"], config.directory, config.resumed)


def build_arguments(config: Config, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Trainer arguments with mappings replaced by built objects, such as a user's strategy."""
    built: Mapping[str, Any] = _Builder(config).arguments(arguments, ("trainer",), "Trainer", TRAINER)[0]
    return built


class _Builder(ValueChecker):
    """Checks values again and builds an object for each mapping with `_target_`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.values)
        self.config = config
        self.made: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Objects built for arguments, with their configs, by id."""

    def check(self, value: Mapping[str, Any], key: Key, base: type) -> Fitted:
        """Build an object for an argument, or return the mistakes if the argument is not valid for the type."""
        mistakes = ValueChecker(self.values).check(value, key, base)[1]
        return (value, mistakes) if mistakes else (self.make(value, key, base), [])

    def make(self, value: Mapping[str, Any], key: Key, base: type) -> Any:
        """Build an instance of a subclass of `base`. An argument may also be a partial or a function's result."""
        place, partial, nested = self.config.origin(key), bool(value.get(PARTIAL)), not is_entry(key)
        # checked earlier, but building another object may have changed a module
        target = find_target(value, key, base)
        arguments = self.arguments(value, key, "", signature_of(target))[0]
        try:
            made = call_target(target, arguments, partial)
        except ConfigError as error:
            raise ConfigError(f"{place}: {dotted(key)}: {error}") from error
        except Exception as error:
            add_note(error, f"{place}: while building {dotted(key)}.")
            raise
        if not isinstance(target, type) and not partial and not isinstance(made, base):
            kind = type(made).__name__
            raise ConfigError(
                f"{place}: {value[TARGET]!r} returned {kind}, not {class_name(base)}, which is required here."
            )
        configs = {name: self._config_of(argument) for name, argument in arguments.items()}
        for secret, text in self.config.secrets.items():
            if secret[: len(key)] == key and isinstance(reduce(getitem, secret, self.config.values), str):
                configs = replace_item(configs, secret[len(key) :], text)
        if nested and not isinstance(made, _PLAIN):
            # holding a reference to the object keeps its id unique
            self.made[id(made)] = made, {TARGET: value[TARGET], **({PARTIAL: True} if partial else {}), **configs}
        elif isinstance(made, Hyperparameters):
            made.record_configs(
                {name: (arguments[name], item) for name, item in configs.items() if item is not arguments[name]}
            )
        return made

    def _config_of(self, value: Any) -> Any:
        """Return an argument with built objects replaced by their configs."""
        if id(value) in self.made:
            return self.made[id(value)][1]
        if isinstance(value, dict):
            inner = {name: self._config_of(item) for name, item in value.items()}
            return inner if any(inner[name] is not value[name] for name in value) else value
        if isinstance(value, list | tuple):
            items = type(value)(map(self._config_of, value))
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return value
