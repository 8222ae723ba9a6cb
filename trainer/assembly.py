"""The Trainer's arguments, checked, and what they stand for: a strategy, callbacks, loggers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import Callback
from .arguments import ACCELERATORS, ARGUMENT_NAMES, CHOICES, LIMITS, TrainerArguments, wanted
from .checkpoints.run_names import fault_of_name
from .errors import ConfigError, did_you_mean
from .loggers.logger import Logger
from .messages import let_be_seen
from .precision import Precision
from .strategies import STRATEGIES
from .strategies import __getattr__ as strategy_class
from .strategies.strategy import Strategy

if TYPE_CHECKING:
    from .trainer import Trainer

NONE_FOR_DEFAULT = (
    *LIMITS[:4],
    *("val_check_interval", "num_sanity_val_steps", "log_every_n_steps", "gradient_clip_algorithm", "precision"),
    *("default_root_dir", "deterministic", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
)
"""Where None is Lightning's default, and so may be given without a wish."""


def check_arguments(trainer: "Trainer") -> None:
    """Refuse arguments that cannot work, naming them; and put those in that follow from others."""
    let_be_seen()
    for name in NONE_FOR_DEFAULT:
        if getattr(trainer, name) is None:
            setattr(trainer, name, TrainerArguments.__dataclass_fields__[name].default)
    root = os.path.abspath(trainer.default_root_dir)  # wherever the process goes later
    trainer.default_root_dir = root if isinstance(trainer.default_root_dir, str) else Path(root)
    for name in ARGUMENT_NAMES:
        value = getattr(trainer, name)
        expected = wanted(name, value)
        if expected is not None:
            hint = did_you_mean(str(value), (*CHOICES.get(name, ()), *(ACCELERATORS if name == "accelerator" else ())))
            raise ConfigError(f"trainer.{name}={value!r}: expected {expected}.{hint}")
    fault = fault_of_name(trainer.run_name)
    if fault is not None:
        raise ConfigError(f"trainer.run_name {fault}")
    trainer.gradient_clip_val = trainer.gradient_clip_val or None
    Precision(trainer.precision, trainer.device_list[0].type)
    if trainer.fast_dev_run:
        _shorten(trainer, int(trainer.fast_dev_run))
    if trainer.max_epochs is None:
        trainer.max_epochs = 1000 if trainer.max_steps == -1 and trainer.max_time is None else -1


def _shorten(trainer: "Trainer", batches: int) -> None:
    """Run a few batches of each stage and write nothing."""
    for name in LIMITS[:4]:
        setattr(trainer, name, batches)
    trainer.max_epochs, trainer.max_steps, trainer.num_sanity_val_steps = 1, batches, 0
    trainer.val_check_interval, trainer.check_val_every_n_epoch, trainer.overfit_batches = 1.0, 1, 0.0
    trainer.logger, trainer.enable_checkpointing = None, False


def make_strategy(trainer: "Trainer", wanted: Any) -> Strategy:
    """Return the strategy that a name, a mapping with `name`, or an object asks for."""
    if isinstance(wanted, Strategy):
        return wanted
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    name = options.pop("name", None)
    if name == "auto":
        name = "ddp" if len(trainer.device_list) * trainer.num_nodes > 1 else "single"
        name = "ddp" if delegate_place(trainer) > 1 else name
    if name not in STRATEGIES:
        known = ("auto", *STRATEGIES)
        hint = did_you_mean(str(name), known)
        if str(name).startswith("ddp_"):
            hint = " Options stand beside the name: {'name': 'ddp', 'find_unused_parameters': True}."
        raise ConfigError(f"trainer.strategy={name!r} is not known; there are {', '.join(known)}.{hint}")
    kind = strategy_class(STRATEGIES[name].split(":")[1])
    try:
        found: Strategy = kind(**options)
    except TypeError as error:
        raise ConfigError(f"trainer.strategy.{name}: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"trainer.strategy: {str(error).removeprefix('trainer.strategy: ')}") from error
    return found


def delegate_place(trainer: "Trainer") -> int:
    """Return how many processes a launcher has started us among; 1 where none has."""
    from .processes.launch import find_place

    place = find_place(trainer.cluster)
    return 1 if place is None else place.world_size


def make_loggers(wanted: Any) -> list[Logger]:
    """Return the loggers that the argument `logger` asks for."""
    if wanted is True:
        from .loggers.json_lines import JSONLinesLogger
        from .loggers.tensorboard import TensorBoardLogger

        return [TensorBoardLogger(), JSONLinesLogger()]
    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted else []
    for logger in found:
        if not isinstance(logger, Logger):
            raise ConfigError(
                f"trainer.logger takes True, False, a legato Logger or a list of them; got {type(logger).__name__}."
            )
    return found


def make_callbacks(trainer: "Trainer", wanted: Any) -> list[Callback]:
    """Return the given callbacks and, after them, those that the trainer's other arguments ask for."""
    from .. import callbacks as known

    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted is not None else []
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(f"trainer.callbacks takes legato Callbacks; got {type(callback).__name__}.")
    logs = bool(trainer.loggers)
    wishes: list[tuple[bool, str, dict[str, Any]]] = [
        (trainer.enable_progress_bar, "ProgressBar", {}),
        (trainer.enable_model_summary, "ModelSummary", {}),
        (logs, "LearningRateMonitor", {}),
        (logs, "ThroughputMonitor", {}),
        (trainer.max_time is not None, "Timer", {"duration": trainer.max_time}),
        (trainer.enable_checkpointing, "Checkpoint", {}),
    ]
    for wish, name, options in wishes:
        if wish and (name == "Timer" or not any(isinstance(callback, getattr(known, name)) for callback in found)):
            try:
                found.append(getattr(known, name)(**options))
            except ConfigError as error:
                raise ConfigError(f"trainer.max_time: {error}") from error
    savers = [
        callback for callback in found if not trainer.enable_checkpointing and isinstance(callback, known.Checkpoint)
    ]
    if savers and not trainer.fast_dev_run:
        raise ConfigError("enable_checkpointing=False, but callbacks has a Checkpoint; leave one of the two out.")
    return [callback for callback in found if callback not in savers]
