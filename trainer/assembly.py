"""The Trainer's arguments, checked, and what they stand for: a strategy, callbacks, loggers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import Callback
from .arguments import TrainerArguments
from .errors import ConfigError, did_you_mean
from .loggers.logger import Logger
from .messages import let_be_seen
from .precision import Precision
from .strategies import STRATEGIES
from .strategies import __getattr__ as strategy_class
from .strategies.strategy import Strategy

if TYPE_CHECKING:
    from .trainer import Trainer

LEAST = {
    "accumulate_grad_batches": 1,
    "num_nodes": 1,
    "log_every_n_steps": 1,
    "max_epochs": -1,
    "max_steps": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "fast_dev_run": 0,
    "num_sanity_val_steps": -1,
    "check_val_every_n_epoch": 1,
    "reload_dataloaders_every_n_epochs": 0,
    "replicas": 1,
    "threads": 1,
    "max_restarts": 0,
    "nan_skips": 0,
}
"""Counts, and the least that each may be."""
MAY_BE_NONE = ("max_epochs", "min_epochs", "min_steps", "check_val_every_n_epoch", "replicas", "threads")
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
NONE_FOR_DEFAULT = (
    *LIMITS[:4],
    *("val_check_interval", "num_sanity_val_steps", "log_every_n_steps", "gradient_clip_algorithm", "precision"),
    *("default_root_dir", "deterministic", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
)
"""Where None is Lightning's default, and so may be given without a wish."""
CHOICES = {
    "reproducible": ("off", "order", "bitwise"),
    "gradient_clip_algorithm": ("norm", "value"),
    "nan": ("raise", "skip", "ignore"),
    "cluster": ("auto", "off"),
}


def check_arguments(trainer: "Trainer") -> None:
    """Refuse arguments that cannot work, naming them; and put those in that follow from others."""
    let_be_seen()
    for name in NONE_FOR_DEFAULT:
        if getattr(trainer, name) is None:
            setattr(trainer, name, TrainerArguments.__dataclass_fields__[name].default)
    for name, least in LEAST.items():
        value = getattr(trainer, name)
        if value is None and name in MAY_BE_NONE:
            continue
        if not isinstance(value, int) or (isinstance(value, bool) and name != "fast_dev_run") or value < least:
            raise ConfigError(f"trainer.{name}={value!r}: expected an integer of at least {least}.")
    for name in LIMITS:
        value = getattr(trainer, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not value >= 0
            or (isinstance(value, float) and value > 1)
        ):
            raise ConfigError(
                f"trainer.{name}={value!r}: expected a count (int) or a fraction from 0.0 to 1.0 (float)."
            )
    for name, choices in CHOICES.items():
        value = getattr(trainer, name)
        if value not in choices:
            raise ConfigError(
                f"trainer.{name}={value!r}: expected one of {choices}.{did_you_mean(str(value), choices)}"
            )
    clip, interval = trainer.gradient_clip_val, trainer.val_check_interval
    if clip is not None and (not isinstance(clip, (int, float)) or isinstance(clip, bool) or not clip >= 0):
        raise ConfigError(f"trainer.gradient_clip_val={clip!r}: expected a positive number; None or 0 for none.")
    trainer.gradient_clip_val = clip or None
    hang = trainer.hang_timeout
    if hang is not None and (not isinstance(hang, (int, float)) or isinstance(hang, bool) or not hang > 0):
        raise ConfigError(f"trainer.hang_timeout={hang!r}: expected a positive number of seconds, or None.")
    if (
        not isinstance(interval, (int, float))
        or isinstance(interval, bool)
        or not interval > 0
        or (isinstance(interval, float) and interval > 1)
    ):
        raise ConfigError(
            f"trainer.val_check_interval={interval!r}: expected a count (int) or a fraction up to 1.0 (float)."
        )
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
            found.append(getattr(known, name)(**options))
    savers = [
        callback for callback in found if not trainer.enable_checkpointing and isinstance(callback, known.Checkpoint)
    ]
    if savers and not trainer.fast_dev_run:
        raise ConfigError("enable_checkpointing=False, but callbacks has a Checkpoint; leave one of the two out.")
    return [callback for callback in found if callback not in savers]
