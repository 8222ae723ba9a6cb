"""LightningCLI: a command line for a module, a data module and a trainer, based on jsonargparse."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks.callback import Callback as CallbackOfLegato
from .callbacks.callback import Callback
from .checkpoint import read as read_checkpoint
from .exceptions import MisconfigurationException
from .inner import ROOT, VERSION
from .instantiation import instantiate_module as instantiate_module
from .instantiation import require_jsonargparse
from .module import INSTANTIATOR, LightningDataModule, LightningModule, hyperparameters_of
from .overrides import is_overridden
from .rank_zero import rank_zero_warn
from .trainer import Trainer
from .utilities import seed_everything

require_jsonargparse()
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, class_from_function  # noqa: E402

CLASS_PATH = re.compile(rf"\b{re.escape(ROOT)}(\.\w+)+")
"""Pattern for the import paths of this package's classes in a written config."""


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """ReduceLROnPlateau with the name of the monitored metric as an attribute."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
ArgsType = list[str] | dict[str, Any] | Namespace | None
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]


class LightningArgumentParser(ArgumentParser):  # type: ignore[misc]
    """jsonargparse's parser, with arguments for modules, callbacks, optimizers and schedulers."""

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self.optimizer_keys: dict[str, tuple[Any, str]] = {}
        self.scheduler_keys: dict[str, tuple[Any, str]] = {}

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a trainer, module, data module or callback class, and return the argument names.

        Raises MisconfigurationException for any other class.
        """
        kind = lightning_class if isinstance(lightning_class, type) else class_of(lightning_class)
        if not issubclass(kind, (Trainer, LightningModule, LightningDataModule, CallbackOfLegato)):
            raise MisconfigurationException(
                f"Cannot add arguments from: {lightning_class}. Expected a Trainer, LightningModule, "
                "LightningDataModule or Callback class, or a function that returns one of these."
            )
        if issubclass(kind, CallbackOfLegato):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added = self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
        else:
            skip = not issubclass(kind, Trainer)
            added = self.add_class_arguments(kind, nested_key, fail_untyped=False, instantiate=skip, sub_configs=True)
        return list(added or [])

    def add_optimizer_args(
        self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = "AUTOMATIC"
    ) -> None:
        """Add the arguments of an optimizer class. For a tuple of classes, any of their subclasses is allowed."""
        self._add_deferred(optimizer_class, nested_key, "params")
        self.optimizer_keys[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a scheduler class. For a tuple of classes, any of their subclasses is allowed."""
        self._add_deferred(lr_scheduler_class, nested_key, "optimizer")
        self.scheduler_keys[nested_key] = (lr_scheduler_class, link_to)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Return a config as text. This package's public classes are written with their Lightning paths."""
        text: str = super().dump(*args, **kwargs)
        stands_for_lightning = getattr(sys.modules.get("lightning"), "__name__", None) == ROOT
        return CLASS_PATH.sub(lambda match: lightnings_path(match[0]), text) if stands_for_lightning else text

    def _add_deferred(self, kinds: Any, key: str, first: str) -> None:
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {first}}
        if isinstance(kinds, tuple):
            self.add_subclass_arguments(kinds, key, **options)
        else:
            self.add_class_arguments(kinds, key, sub_configs=True, **options)


def lightnings_path(path: str) -> str:
    """Return the shortest path under `lightning` for one of this package's public classes, or `path` unchanged."""
    module, _, name = path.rpartition(".")
    value = getattr(sys.modules.get(module), name, None)
    for package in sorted(package for package in sys.modules if f"{package}.".startswith(f"{ROOT}.pytorch.")):
        if value is not None and vars(sys.modules[package]).get(name) is value:
            return f"lightning{package.removeprefix(ROOT)}.{name}"
    return path


class SaveConfigCallback(Callback):
    """Writes a LightningCLI's config to the log directory when a run starts.

    Raises RuntimeError if the file already exists and `overwrite` is not set.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser, self.config, self.config_filename = parser, config, config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and not is_overridden("save_config", self, SaveConfigCallback):
            raise ValueError("`save_to_log_dir=False` only makes sense for a subclass that overrides `save_config`.")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write the config once, on rank 0."""
        if self.already_saved:
            return
        folder = trainer.log_dir
        if self.save_to_log_dir and trainer.is_global_zero and folder is not None:
            path = Path(folder, self.config_filename)
            if path.is_file() and not self.overwrite:
                raise RuntimeError(
                    f"{type(self).__name__} expected {path} to NOT exist. Delete it, or set "
                    f'`LightningCLI(save_config_kwargs={{"overwrite": True}})`, or `save_config_callback=None`.'
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            options = {"overwrite": self.overwrite, "multifile": self.multifile}
            self.parser.save(self.config, str(path), skip_unset=False, **options)
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called on rank 0 to save the config elsewhere. Does nothing by default; subclasses may override it."""


class LightningCLI:
    """Parses the command line, creates the module, data module and trainer, and calls the requested trainer method."""

    def __init__(  # noqa: PLR0913 (Lightning's arguments)
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: Any = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class, self.trainer_class = model_class, datamodule_class, trainer_class
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_defaults, self.seed_everything_default = trainer_defaults or {}, seed_everything_default
        self.parser_kwargs, self.parser_class = parser_kwargs or {}, parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self._parsers: dict[str | None, LightningArgumentParser] = {}
        self._arguments: dict[str, list[str]] = {}
        commands = self.subcommands()
        main = {name: value for name, value in self.parser_kwargs.items() if name not in commands}
        options = {name: value for name, value in self.parser_kwargs.items() if name in commands}
        self.setup_parser(run, main, options)
        self.parse_arguments(self.parser, args)
        self.subcommand = self.config["subcommand"] if run else None
        self._take_hyperparameters()
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # --- the parser -------------------------------------------------------------------------------------------------
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser with the `--config` option. Configs written by the parser start with Lightning's version."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={VERSION}"])
        parser = self.parser_class(**kwargs)
        help_text = "Path to a configuration file in json or yaml format."
        parser.add_argument("-c", "--config", action=ActionConfigFile, help=help_text)
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create the parser, or one parser for each subcommand."""
        self.parser = self._parsers[None] = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        kind = self.trainer_class if isinstance(self.trainer_class, type) else class_of(self.trainer_class)
        group = self.parser.add_subcommands()
        for name, skipped in self.subcommands().items():
            about = (getattr(kind, name).__doc__ or "").strip().partition("\n")[0]
            parser = self.init_parser(**{"description": about, **subparser_kwargs.get(name, {})})
            self._add_arguments(parser)
            self._arguments[name] = parser.add_method_arguments(kind, name, skip=set(skipped), fail_untyped=False)
            self._parsers[name] = parser
            group.add_subcommand(name, parser, help=about)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return a dict that maps subcommands to the method arguments that the command line does not accept."""
        loaders = {"model", "dataloaders", "datamodule"}
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fit, "validate": loaders, "test": loaders, "predict": loaders}

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers and not parser.optimizer_keys:
            parser.add_optimizer_args((Optimizer,))
        if self.auto_configure_optimizers and not parser.scheduler_keys:
            parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--seed_everything`."""
        about = "Seed all random number generators before creating objects; True chooses a seed."
        parser.add_argument("--seed_everything", type=bool | int, default=self.seed_everything_default, help=about)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the trainer, module and data module arguments."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {name: value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items()})
        model, data = self.model_class or LightningModule, self.datamodule_class or LightningDataModule
        parser.add_lightning_class_args(model, "model", subclass_mode=self.subclass_mode_model)
        needed = self.datamodule_class is not None
        parser.add_lightning_class_args(data, "data", subclass_mode=self.subclass_mode_data, required=needed)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add or link arguments. Does nothing by default; subclasses may override it."""

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Link the arguments of optimizers and schedulers to the keys specified by `link_to`."""
        for key, (kinds, target) in {**parser.optimizer_keys, **parser.scheduler_keys}.items():
            if target != "AUTOMATIC" and isinstance(kinds, tuple):
                parser.link_arguments(key, target)
            elif target != "AUTOMATIC":
                parser.link_arguments(key, target, compute_fn=partial(_spec_of, kinds))

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line, a list of arguments or a dict into `config`."""
        if args is not None and len(sys.argv) > 1:
            rank_zero_warn(f"LightningCLI uses args={args} and ignores the command-line arguments {sys.argv[1:]}.")
        values = isinstance(args, (dict, Namespace))
        self.config = parser.parse_object(args) if values else parser.parse_args(args)

    def _take_hyperparameters(self) -> None:
        """Use the hyperparameters in the checkpoint passed as `ckpt_path` as defaults for the module."""
        path = None if self.subcommand is None else self.config[self.subcommand].get("ckpt_path")
        # "last" and "best" are names that the trainer resolves later
        if not path or not Path(path).exists():
            return
        saved = read_checkpoint(path).get("hyper_parameters") or {}
        # the name of the function that creates the module, which is not an argument of the module
        values = {name: value for name, value in saved.items() if name != "_instantiator"}
        if "_class_path" in values:
            values = {"class_path": values.pop("_class_path"), "dict_kwargs": values}
        if values:
            self.config = self.parser.parse_object({self.subcommand: {"model": values}}, self.config)

    def config_of(self, key: str) -> dict[str, Any]:
        """Return the command-line values for the module or the data module, in YAML form."""
        text = self.parser.dump(self.config, skip_unset=False, skip_link_targets=False, format="yaml")
        values = self._get(yaml.safe_load(text), key) or {}
        if "class_path" not in values:
            return dict(values)
        arguments = {**(values.get("init_args") or {}), **(values.get("dict_kwargs") or {})}
        return {"_class_path": values["class_path"], **arguments}

    def _instantiators(self) -> list[tuple[Callable[..., Any], type, bool]]:
        """Return the functions that create the module and the data module from command-line values."""
        if not self.load_from_checkpoint_support:
            return []
        wanted = (
            ("model", self.model_class or LightningModule, self.subclass_mode_model),
            ("data", self.datamodule_class or LightningDataModule, self.subclass_mode_data),
        )
        return [
            (
                partial(_make, self, key),
                kind if isinstance(kind, type) else signature(kind).return_annotation,
                subclasses,
            )
            for key, kind, subclasses in wanted
        ]

    # --- the objects ------------------------------------------------------------------------------------------------
    def before_instantiate_classes(self) -> None:
        """Called before the module, data module and trainer are created. Subclasses may override it."""

    def instantiate_classes(self) -> None:
        """Create the module, data module and trainer."""
        self.config_init = self.parser.instantiate(self.config, instantiators=self._instantiators())
        self.datamodule, self.model = self._get(self.config_init, "data"), self._get(self.config_init, "model")
        self._give_model_optimizers()
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Called after the module, data module and trainer are created. Subclasses may override it."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Create the trainer with the callbacks from the command line and the callback that saves the config."""
        config = {**self._get(self.config_init, "trainer", {}), **kwargs}
        parser, wanted = self._parsers[self.subcommand], config.get("callbacks") or []
        defaults = self.trainer_defaults.get("callbacks", [])
        if not accepts(self.trainer_class, "callbacks"):
            rank_zero_warn(f"The `{self.trainer_class.__name__}` class does not expose the `callbacks` argument.")
            return self.trainer_class(**config)
        callbacks = [*(wanted if isinstance(wanted, list) else [wanted])]
        callbacks += [self._get(self.config_init, key) for key in parser.callback_keys]
        callbacks += defaults if isinstance(defaults, list) else [defaults]
        if self.save_config_callback and not config.get("fast_dev_run", False):
            saved = self.config if self.subcommand is None else self.config[self.subcommand]
            callbacks.append(self.save_config_callback(parser, saved, **self.save_config_kwargs))
        return self.trainer_class(**{**config, "callbacks": callbacks})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return what the module's `configure_optimizers` should return. Subclasses may override this method."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            plateau = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": plateau}
        return [optimizer], [lr_scheduler]

    def _give_model_optimizers(self) -> None:
        """Replace the module's `configure_optimizers` with one that returns the optimizer and scheduler from the
        command line.

        Raises MisconfigurationException if there are multiple optimizers or schedulers.
        """
        parser = self._parsers[self.subcommand]
        groups = [
            {key: kinds for key, (kinds, target) in keys.items() if target == "AUTOMATIC"}
            for keys in (parser.optimizer_keys, parser.scheduler_keys)
        ]
        if not self.auto_configure_optimizers or not groups[0]:
            return
        if any(len(keys) > 1 for keys in groups):
            raise MisconfigurationException(
                f"There are several optimizers or schedulers: {[*groups[0], *groups[1]]}. Link each one to an "
                "argument of the module (link_to=...) and return them all from configure_optimizers."
            )
        specs = [self._spec(key, kinds) for keys in groups for key, kinds in keys.items()]
        if not specs[0]:
            return
        if is_overridden("configure_optimizers", self.model):
            name = type(self.model).__name__
            rank_zero_warn(
                f"`{name}.configure_optimizers` will be overridden by `{type(self).__name__}.configure_optimizers`."
            )
        combine, scheduler_spec = self.configure_optimizers, specs[1] if len(specs) > 1 else None

        def configure_optimizers(module: Any) -> Any:
            optimizer = instantiate_class(module.parameters(), specs[0])
            return combine(module, optimizer, instantiate_class(optimizer, scheduler_spec) if scheduler_spec else None)

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    def _spec(self, key: str, kinds: Any) -> Any:
        config = self._get(self.config_init, key)
        return config if isinstance(kinds, tuple) or config is None else _spec_of(kinds, config)

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        return (config if self.subcommand is None else config[self.subcommand]).get(key, default)

    # --- the run ----------------------------------------------------------------------------------------------------
    def _run_subcommand(self, subcommand: str) -> None:
        """Call the CLI's or the trainer's method with the given name, between its `before_` and `after_` methods."""
        getattr(self, f"before_{subcommand}", lambda: None)()
        function = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        config = self.config_init[subcommand]
        options = {name: config[name] for name in self._arguments[subcommand] if name in config}
        data = {} if self.datamodule is None else {"datamodule": self.datamodule}
        function(model=self.model, **data, **options)
        getattr(self, f"after_{subcommand}", lambda: None)()

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False or seed is None:
            return
        chosen = seed_everything(None if seed is True else seed, workers=True)
        (self.config if self.subcommand is None else self.config[self.subcommand])["seed_everything"] = chosen


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a class or a function accepts an argument with the given name."""
    parameters = signature(function).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def class_of(function: Callable[..., Any]) -> type:
    """Return a class whose constructor accepts a function's arguments and returns the function's result."""
    created_class: type = class_from_function(function)
    return created_class


def _make(
    cli: LightningCLI, key: str, kind: type, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
) -> Any:
    """Create a module or data module whose `save_hyperparameters` method saves the command-line values."""
    values = cli.config_of(key)
    for target, value in applied_instantiation_links.items():
        first, *path = target.replace("init_args.", "").split(".")
        if first == key:
            place = values
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = value
    with hyperparameters_of(kind, {**values, "_instantiator": INSTANTIATOR}):
        return kind(*args, **kwargs)


def _spec_of(kind: type, values: Any) -> dict[str, Any]:
    config = values.as_dict() if hasattr(values, "as_dict") else dict(values or {})
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": config}


def instantiate_class(args: Any, init: Any) -> Any:
    """Create an instance of `init["class_path"]` from `args` and `init["init_args"]`."""
    module, _, name = init["class_path"].rpartition(".")
    options = init.get("init_args") or {}
    options = options.as_dict() if hasattr(options, "as_dict") else options
    return getattr(import_module(module), name)(*(args if isinstance(args, tuple) else (args,)), **options)
