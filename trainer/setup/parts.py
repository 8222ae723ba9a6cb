"""The strategy, loggers and callbacks that a Trainer's arguments specify."""

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from ...base.arguments import TORCH_OPTIONS
from ...base.errors import ConfigError, correction, describe_kind, did_you_mean
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
    """Return the strategy for a name, a mapping with a `name` key, or a Strategy."""
    if isinstance(wanted, Strategy):
        return wanted
    # a copy, as `name` is removed from it
    options = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    name = options.pop("name", None)
    if name == "auto":
        name = choose_name(trainer)
    if name not in STRATEGIES:
        names = ("auto", *STRATEGIES)
        hint = did_you_mean(str(name), names)
        if str(name).startswith("ddp_"):
            hint = " Pass options together with the name: {'name': 'ddp', 'find_unused_parameters': True}."
        raise ConfigError(f"trainer.strategy={name!r} is unknown; expected one of {', '.join(names)}.{hint}")
    kind = getattr(strategies, STRATEGIES[name].split(":")[1])
    unknown = [option for option in options if option not in option_names(kind)]
    if unknown:
        raise ConfigError(f"trainer.strategy: {name} has no option {unknown[0]!r}.{alternative(unknown[0], kind)}")
    try:
        strategy: Strategy = kind(**options)
    except TypeError as error:  # an option that the class sets itself, such as the axis of fsdp
        raise ConfigError(f"trainer.strategy.{name}: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"trainer.strategy: {str(error).removeprefix('trainer.strategy: ')}") from error
    return strategy


def option_names(kind: type[Strategy]) -> list[str]:
    """Return the names of a strategy's arguments, including those that `**options` passes to its base classes."""
    names: list[str] = []
    for base in (base for base in kind.__mro__ if "__init__" in vars(base)):
        arguments = signature(vars(base)["__init__"]).parameters.values()
        names += [argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD][1:]
        if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
            break
    return names


def alternative(option: str, kind: type[Strategy]) -> str:
    """Return advice about an option that a strategy class does not accept."""
    if option in TORCH_OPTIONS:
        return f" {TORCH_OPTIONS[option]}"
    classes = {name: getattr(strategies, home.split(":")[1]) for name, home in STRATEGIES.items()}
    # a class that only inherits an option may refuse it, as zero1 refuses elastic
    names = [name for name, each in classes.items() if option in signature(each).parameters] or [
        name for name, each in classes.items() if option in option_names(each)
    ]
    return f" It is an option of {', '.join(names)}." if names else did_you_mean(option, option_names(kind))


def choose_name(trainer: "Trainer") -> str:
    """Return the name of the strategy that "auto" selects."""
    place = find_place(trainer.cluster) or Place()
    several = len(trainer.device_list) * trainer.num_nodes > 1 or place.world_size > 1
    return "ddp" if several else "single"


def make_loggers(wanted: Any) -> list[Logger]:
    """Return the loggers for the `logger` argument."""
    # imported here: TensorBoard takes 1.2 s, which a trainer with logger=False need not wait for
    from ...loggers import JSONLinesLogger, TensorBoardLogger

    if wanted is True:
        wanted = [TensorBoardLogger(), JSONLinesLogger()]
    loggers = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted else []
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise ConfigError(
                f"trainer.logger must be True, False, a Legato Logger or a list of loggers; got "
                f"{describe_kind(logger)}."
            )
    return loggers


def make_callbacks(trainer: "Trainer", wanted: Any) -> list[Callback]:
    """Return the user's callbacks, followed by those added by other Trainer arguments."""
    from ... import callbacks as classes

    callbacks = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] if wanted is not None else []
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else ""
            example = correction(f"callbacks=[{name}]", f"callbacks=[{name}()]") if name else ""
            raise ConfigError(f"trainer.callbacks must be Callback objects; got {describe_kind(callback)}.{example}")
    logs = bool(trainer.loggers)
    defaults: list[tuple[bool, type[Callback], dict[str, Any]]] = [
        (trainer.enable_progress_bar, classes.ProgressBar, {}),
        (trainer.enable_model_summary, classes.ModelSummary, {}),
        (logs, classes.LearningRateMonitor, {}),
        (logs, classes.ThroughputMonitor, {}),
        (trainer.max_time is not None, classes.Timer, {"duration": trainer.max_time}),
        (trainer.enable_checkpointing, classes.Checkpoint, {}),
    ]
    for is_wanted, kind, options in defaults:
        # the user's progress bar or checkpoint callback takes the place of the default one
        roles = (CheckpointCallback, ProgressDisplay, classes.ModelSummary)
        role = next((base for base in roles if issubclass(kind, base)), kind)
        if is_wanted and (kind is classes.Timer or not any(isinstance(callback, role) for callback in callbacks)):
            try:
                callbacks.append(kind(**options))
            except ConfigError as error:
                raise ConfigError(f"trainer.max_time: {error}") from error
    if trainer.enable_checkpointing:
        return callbacks
    savers = [callback for callback in callbacks if isinstance(callback, CheckpointCallback)]
    if savers and not trainer.fast_dev_run:
        raise ConfigError("enable_checkpointing is False, but callbacks contains a Checkpoint. Remove one of the two.")
    return [callback for callback in callbacks if callback not in savers]


def with_callbacks_of(task: Task, callbacks: list[Callback]) -> list[Callback]:
    """Return the trainer's and the task's callbacks. The task's callbacks replace trainer callbacks of the same class.

    Checkpoint callbacks come last.
    """
    configured = task.configure_callbacks() or []  # None: the task has none, or has added them to the trainer itself
    of_task = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    kinds = {type(callback) for callback in of_task}
    restored = [callback for callback in callbacks if type(callback) not in kinds or callback in of_task]
    added = [callback for callback in of_task if callback not in restored]
    return sorted(restored + added, key=lambda callback: isinstance(callback, CheckpointCallback))  # stable
