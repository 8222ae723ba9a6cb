"""Checks on arguments and tasks that run before anything starts, so that mistakes are caught within seconds."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...base.arguments import ARGUMENT_NAMES, LIMITS, LOADER_OPTIONS, problems
from ...base.errors import ConfigError, TaskError, correction, describe_kind, did_you_mean
from ...base.location import place_problem, to_absolute
from ...base.messages import let_be_seen
from ...base.quantities import parse_duration
from ...base.run_names import name_problem
from ...tasks.data_hooks import DataHooks
from ...tasks.task import Task
from ..hooks import STEP_NAMES, TASK_HOOKS, check_nones, count_arguments, overrides
from ..optimization.model_checks import require_sendable
from ..optimization.precision import Precision
from ..request import DOING_OF_STAGE, Request
from ..resume.checkpoint_format import CheckpointFormat
from .data import LOADERS

if TYPE_CHECKING:
    from ...base.contracts import Trainer


def check_arguments(trainer: "Trainer") -> None:
    """Raise ConfigError for invalid arguments, and set arguments that are derived from others."""
    let_be_seen()
    if isinstance(trainer.default_root_dir, str | os.PathLike):  # before its type check: Path drops a slash of "s3://"
        root = to_absolute(trainer.default_root_dir)  # the process may change its directory later
        if (fault := place_problem(str(root))) is not None:
            raise ConfigError(f"trainer.default_root_dir {fault}")
        trainer.default_root_dir = str(root) if isinstance(trainer.default_root_dir, str) else root
    values = {name: getattr(trainer, name) for name in ARGUMENT_NAMES}
    mistakes = [f"trainer.{key[1]}={values[str(key[1])]!r} {message}" for key, message, *_ in problems(values)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if isinstance(trainer.val_check_interval, (str, timedelta, Mapping)):
        try:
            parse_duration(trainer.val_check_interval)
        except ConfigError as error:
            raise ConfigError(f"trainer.val_check_interval must be a number or a duration. {error}") from None
    fault = name_problem(trainer.run_name)
    if fault is not None:
        raise ConfigError(f"trainer.run_name {fault}")
    for option in trainer.loader or ():
        if option not in LOADER_OPTIONS:
            hint = did_you_mean(option, LOADER_OPTIONS) or f" Its options are {', '.join(LOADER_OPTIONS)}."
            raise ConfigError(f"trainer.loader has no option {option!r}.{hint}")
    if not isinstance(trainer.checkpoint_format, (CheckpointFormat, type(None))):
        raise ConfigError(
            f"trainer.checkpoint_format must be an object with the methods name, write, read and remove (see "
            f"legato.CheckpointFormat); got {describe_kind(trainer.checkpoint_format)}."
        )
    # Lightning's 0 means no clipping
    trainer.gradient_clip_val = trainer.gradient_clip_val or None
    # only for its checks: the device may not support the precision
    Precision(trainer.precision, trainer.device_list[0].type)
    if trainer.fast_dev_run:
        _shorten(trainer, int(trainer.fast_dev_run))
    if trainer.max_epochs is None:
        trainer.max_epochs = 1000 if trainer.max_steps == -1 and trainer.max_time is None else -1


def _shorten(trainer: "Trainer", batches: int) -> None:
    """Set the arguments for fast_dev_run: a few batches per stage, and no output files."""
    for name in LIMITS[:4]:
        setattr(trainer, name, batches)
    trainer.max_epochs, trainer.max_steps, trainer.num_sanity_val_steps = 1, batches, 0
    trainer.val_check_interval, trainer.check_val_every_n_epoch, trainer.overfit_batches = 1.0, 1, 0.0
    trainer.logger, trainer.enable_checkpointing = None, False


def check_task(trainer: "Trainer", task: Any, request: Request, is_sent: bool = False) -> None:
    """Raise TaskError if a task lacks a method the stage needs, or has misspelled hooks.

    Args:
        is_sent: whether the task will be sent to other processes.
    """
    stage = request.stage
    if not isinstance(task, Task):
        is_class = isinstance(task, type)
        kind = task if is_class else type(task)
        base = "" if is_class else ": subclass lg.Task instead of nn.Module"
        call, head = f"trainer.{stage}({kind.__name__}", f"class {kind.__name__}("
        lines = (f"{call})", f"{call}())") if is_class else (f"{head}nn.Module):", f"{head}lg.Task):")
        raise TaskError(f"{stage} expects a Legato Task, got {describe_kind(task)}{base}.{correction(*lines)}")
    # the task is pickled for the workers, which would fail late and with an obscure message
    if is_sent:
        require_sendable(task)
    trainer.check(task, *([] if request.datamodule is None else [request.datamodule]))
    step = f"{DOING_OF_STAGE[stage] if stage != 'fit' else 'training'}_step"
    for name in (step, "configure_optimizers" if stage == "fit" else None):
        is_ready = name == "predict_step" and task.predict_step is not None
        if name is not None and not is_ready and not overrides(task, Task, name):
            raise TaskError(f"{lacking(task, name)}, which {stage} requires. Define it.{nearest(task, name)}")
    if stage == "fit" and "validation" in request.loaders and not overrides(task, Task, "validation_step"):
        raise TaskError(
            f"fit got validation loaders, but {lacking(task, 'validation_step')}. Define it or omit the loaders."
        )
    # as in Lightning, None disables a step, loader or hook; any other method set to None would fail when called
    check_nones(task, Task, (*STEP_NAMES, *LOADERS.values(), *TASK_HOOKS, *vars(DataHooks)))
    called = (step, "validation_step") if stage == "fit" else (step,)
    for name in called:
        if overrides(task, Task, name):
            count_arguments(task, name)


def lacking(task: Task, name: str) -> str:
    """Describe a missing method of a task."""
    return (
        f"{type(task).__name__}.{name} is None"
        if getattr(task, name) is None
        else f"{type(task).__name__} has no {name}"
    )


def nearest(task: Task, name: str) -> str:
    """Return a hint that suggests the task's method whose name is most similar to `name`."""
    methods = {method for kind in type(task).__mro__ if kind not in Task.__mro__ for method in vars(kind)}
    return did_you_mean(name, methods - {name}, 0.8)
