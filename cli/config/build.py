"""Builds the task, the data module, the callbacks, the loggers and the trainer of a checked config."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, add_note
from ...base.targets import PARTIAL, TARGET, call_target
from ...base.values import Fitted
from ...tasks.hyperparameters import Hyperparameters
from .check import EXPECTED, Checker, Config, is_entry
from .read import Key, dotted, replace_item
from .signatures import ANYTHING, Signature, load_target

_PLAIN = (bool, int, float, str, list, dict, tuple, set, type(None))
"""Types of values that a checkpoint holds as they are."""

if TYPE_CHECKING:
    from ...tasks.data_module import DataModule
    from ...tasks.task import Task
    from ...trainer.runs.places import StoredRun
    from ...trainer.trainer import Trainer


@dataclass
class ConfiguredRun:
    """The objects of one config, ready to start."""

    trainer: "Trainer"
    task: "Task"
    data: "DataModule | None"
    resume: str | None
    checkpoint: str | None
    directory: Path | None = None
    """The run directory whose stored config this was made from."""
    resumed: Path | None = None
    """The run that `resume=auto` has found by its name, and whose config this is."""

    def to_resume(self) -> "StoredRun | str | None":
        """Return what fit resumes from; with a run's own config, "auto" means that run, not the newest of its name."""
        if self.resume != "auto" or (self.directory is None and self.resumed is None):
            return self.resume
        found = self.stored("auto")
        return found if self.resumed is None else replace(found, directory=self.resumed, by_name=True)

    def stored(self, word: str) -> "StoredRun":
        """Return the run on disk that `word` ("best", "last", "auto") refers to."""
        from ...trainer.runs.places import StoredRun

        return StoredRun(Path(self.trainer.default_root_dir), self.trainer.run_name, self.directory, word)


def build_config(config: Config) -> ConfiguredRun:
    """Build the objects of a config, each with the config's seed.

    Raises ConfigError where a `_target_` cannot be imported, or is of the wrong kind.
    """
    from ...trainer.data.randomness import seed_everything
    from ...trainer.trainer import Trainer

    builder, values = _InstanceBuilder(config), config.values

    def seeded(section: str) -> Any:
        # Each part's random numbers depend on the seed alone, not on what was built before it.
        seed_everything(values["seed"], verbose=False)
        return builder.make(values[section], (section,), EXPECTED[section])

    task = seeded("task")
    data = seeded("data") if "data" in values else None
    parts = {
        section: [builder.make(one, (section, name), EXPECTED[section]) for name, one in values[section].items()]
        for section in ("callbacks", "loggers")
        if section in values
    }
    arguments = builder.arguments(values["trainer"], ("trainer",), builder.checker.trainer_signature())
    try:
        trainer = Trainer(
            **arguments,
            callbacks=parts.get("callbacks"),
            logger=parts["loggers"] or False if "loggers" in parts else True,
            seed=values["seed"],
            run_name=values["run"]["name"],
            default_root_dir=values["run"]["root"],
            save_code=values["run"]["save_code"],
            write_csv=values["run"]["csv"],
        )
    except ConfigError as error:
        named = re.match(r"trainer\.(\w+)(?:: (\w+)=)?", str(error))  # an argument, and perhaps one of its options
        place = config.origin(("trainer", *filter(None, named.groups()))) if named else ""
        raise ConfigError(f"{place}: {error}" if named else str(error)) from error
    again = config.to_run_again()
    trainer.config_text, trainer.given_config = again.text(), again.given_text()
    return ConfiguredRun(trainer, task, data, values["resume"], values["checkpoint"], config.directory, config.resumed)


class _InstanceBuilder:
    """Makes instances of the classes that a config names, after a check of the imported classes' bases."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.checker = Checker(config.values, config.sources, may_import=True)
        self.made: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Objects made for arguments, and their configs, by the objects' ids."""

    def arguments(self, value: Mapping[str, Any], key: Key, signature: Signature) -> dict[str, Any]:
        """Convert plain arguments to the types of the parameters."""
        fitted: dict[str, Any] = self.checker.arguments(value, key, "", signature, self.on_target)[0]
        return fitted

    def on_target(self, value: Mapping[str, Any], key: Key, expected: str) -> Fitted:
        """Make an instance for an argument, or return why it cannot be one of this class: a union has others."""
        problems = self.checker.on_target(value, key, expected)[1]
        return (value, problems) if problems else (self.make(value, key, expected), [])

    def make(self, value: Mapping[str, Any], key: Key, expected: str) -> Any:
        """Make what a mapping with `_target_` describes.

        For an argument that is an instance of the class at the dotted path `expected` (of any, if that is no class),
        by a class or a function, or a partial of those. Else it is an instance of a subclass.
        """
        place = f"{self.config.origin((*key, TARGET))}: {dotted((*key, TARGET))}"
        try:
            target, base = load_target(value[TARGET]), object if expected == ANYTHING else load_target(expected)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        partial, nested = bool(value.get(PARTIAL)), not is_entry(key)
        if not isinstance(target, type) and not (nested and callable(target)):
            raise ConfigError(f"{place}: {value[TARGET]!r} is not a class{' or function' if nested else ''}.")
        base = base if isinstance(base, type) else object  # an annotation may be a function, or a module
        # Not issubclass: an abstract base class may register classes that do not inherit from it.
        if isinstance(target, type) and base not in target.__mro__:
            raise ConfigError(f"{place}: {value[TARGET]!r} is not a subclass of {expected}, which is required here.")
        signature = self.checker.sources.signature(value[TARGET], may_import=True) or Signature(open=True)
        arguments = self.arguments(value, key, signature)
        try:
            made = call_target(target, arguments, partial)
        except ConfigError as error:
            raise ConfigError(f"{self.config.origin(key)}: {dotted(key)}: {error}") from error
        except Exception as error:
            add_note(error, f"{self.config.origin(key)}: {dotted(key)} was being built.")
            raise
        if not isinstance(target, type) and not partial and not isinstance(made, base):
            kind = type(made).__name__
            raise ConfigError(f"{place}: {value[TARGET]!r} returned {kind}, not {expected}, which is required here.")
        configs = {name: self._config_of(one) for name, one in arguments.items()}
        for secret, text in self.config.secrets.items():
            if secret[: len(key)] == key and isinstance(reduce(getitem, secret, self.config.values), str):
                configs = replace_item(configs, secret[len(key) :], text)
        if nested and not isinstance(made, _PLAIN):
            # the object is kept as well, so that its id is not given to another one
            self.made[id(made)] = made, {TARGET: value[TARGET], **({PARTIAL: True} if partial else {}), **configs}
        elif isinstance(made, Hyperparameters):
            made.record_configs(
                {name: (arguments[name], one) for name, one in configs.items() if one is not arguments[name]}
            )
        return made

    def _config_of(self, value: Any) -> Any:
        """Return an argument with the configs of objects in place of those that were made; itself if there are none."""
        if id(value) in self.made:
            return self.made[id(value)][1]
        if isinstance(value, dict):
            inner = {name: self._config_of(item) for name, item in value.items()}
            return inner if any(inner[name] is not value[name] for name in value) else value
        if isinstance(value, list | tuple):
            items = type(value)(map(self._config_of, value))
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return value
