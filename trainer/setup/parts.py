"""Strategy, loggers and callbacks that the arguments of a Trainer ask for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...base.arguments import TORCH_OPTIONS
from ...base.errors import ConfigError, describe_kind, did_you_mean
from ...base.place import Place, find_place
from ...callbacks.callback import Callback
from ...callbacks.checkpoint_callback import CheckpointCallback
from ...callbacks.progress_bar import ProgressDisplay
from ...loggers.logger import Logger
from ...tasks.task import Task
from .. import strategies
from ..strategies import STRATEGIES
from ..strategies.strategy import Strategy

if TYPE_CHECKING:
    from ...base.contracts import Trainer


def make_strategy(trainer: "Trainer", wanted: Any) -> Strategy:
    """Return the strategy that a name, a mapping with `name`, or an object asks for."""
    if isinstance(wanted, Strategy):
        return wanted
    # a copy, as `name` is taken out of it
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    name = options.pop("name", None)
    if name == "auto":
        name = choose_name(trainer)
    if name not in STRATEGIES:
        known = ("auto", *STRATEGIES)
        hint = did_you_mean(str(name), known)
        if str(name).startswith("ddp_"):
            hint = " Options are given beside the name: {'name': 'ddp', 'find_unused_parameters': True}."
        raise ConfigError(f"trainer.strategy={name!r} is not known; there are {', '.join(known)}.{hint}")
    try:
        found: Strategy = getattr(strategies, STRATEGIES[name].split(":")[1])(**options)
    # of the strategy's __init__, whose message names an argument but not where it stands in a config
    except TypeError as error:
        unknown = [option for option in options if option in TORCH_OPTIONS]
        instead = f" {TORCH_OPTIONS[unknown[0]]}" if unknown else ""
        raise ConfigError(f"trainer.strategy.{name}: {error}.{instead}") from error
    except ConfigError as error:
        raise ConfigError(f"trainer.strategy: {str(error).removeprefix('trainer.strategy: ')}") from error
    return found


def choose_name(trainer: "Trainer") -> str:
    """Return the name of the strategy that "auto" stands for."""
    place = find_place(trainer.cluster) or Place()
    several = len(trainer.device_list) * trainer.num_nodes > 1 or place.world_size > 1
    return "ddp" if several else "single"


def make_loggers(wanted: Any) -> list[Logger]:
    """Return the loggers that the argument `logger` asks for."""
    # imported here: TensorBoard takes 1.2 s, and a trainer with logger=False does without
    from ...loggers import JSONLinesLogger, TensorBoardLogger

    if wanted is True:
        wanted = [TensorBoardLogger(), JSONLinesLogger()]
    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted else []
    for logger in found:
        if not isinstance(logger, Logger):
            raise ConfigError(
                f"trainer.logger takes True, False, a legato Logger or a list of them; got {describe_kind(logger)}."
            )
    return found


def make_callbacks(trainer: "Trainer", wanted: Any) -> list[Callback]:
    """Return the given callbacks and, after them, those that the trainer's other arguments ask for."""
    from ... import callbacks as known

    found = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted is not None else []
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(f"trainer.callbacks takes legato Callbacks; got {describe_kind(callback)}.")
    logs = bool(trainer.loggers)
    defaults: list[tuple[bool, type[Callback], dict[str, Any]]] = [
        (trainer.enable_progress_bar, known.ProgressBar, {}),
        (trainer.enable_model_summary, known.ModelSummary, {}),
        (logs, known.LearningRateMonitor, {}),
        (logs, known.ThroughputMonitor, {}),
        (trainer.max_time is not None, known.Timer, {"duration": trainer.max_time}),
        (trainer.enable_checkpointing, known.Checkpoint, {}),
    ]
    for wish, kind, options in defaults:
        # one's own progress bar or checkpoint callback takes the place of the default of the same role
        roles = (CheckpointCallback, ProgressDisplay, known.ModelSummary)
        role = next((base for base in roles if issubclass(kind, base)), kind)
        if wish and (kind is known.Timer or not any(isinstance(callback, role) for callback in found)):
            try:
                found.append(kind(**options))
            except ConfigError as error:
                raise ConfigError(f"trainer.max_time: {error}") from error
    savers = [
        callback for callback in found if not trainer.enable_checkpointing and isinstance(callback, CheckpointCallback)
    ]
    if savers and not trainer.fast_dev_run:
        raise ConfigError("enable_checkpointing=False, but callbacks has a Checkpoint; leave one of the two out.")
    return [callback for callback in found if callback not in savers]


def with_callbacks_of(task: Task, callbacks: list[Callback]) -> list[Callback]:
    """Return the trainer's callbacks and the task's, which replace those of the same class; those that save last."""
    brought = task.configure_callbacks() or []  # None: it has none, or has given them to the trainer itself
    own = list(brought) if isinstance(brought, (list, tuple)) else [brought]
    kinds = {type(callback) for callback in own}
    restored = [callback for callback in callbacks if type(callback) not in kinds or callback in own]
    added = [callback for callback in own if callback not in restored]
    return sorted(restored + added, key=lambda callback: isinstance(callback, CheckpointCallback))  # stable
