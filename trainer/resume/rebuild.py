"""Builds tasks and data modules from checkpoints, for `load_from_checkpoint`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...base.errors import CheckpointError, ConfigError
from ...base.location import Location
from ...base.targets import rebuild_targets
from ...tasks.hyperparameters import AttributeDict, Hyperparameters
from ..checkpoints import reading
from ..checkpoints.foreign import plain_names
from ..checkpoints.storage import is_file
from .left_out import BUILT, LEFT_OUT, require_hyperparameters
from .restore import load_task_weights

if TYPE_CHECKING:
    from ...tasks.data_module import DataModule
    from ...tasks.task import Task

Built = TypeVar("Built", bound=Hyperparameters)
TaskType = TypeVar("TaskType", bound="Task")
DataModuleType = TypeVar("DataModuleType", bound="DataModule")
MapLocation = torch.device | str | int | Callable[..., Any] | Mapping[str, str] | None
"""Device for the weights. A callable, which torch.load accepts, is ignored, and the weights remain on the CPU."""


def rebuild_task(
    kind: type[TaskType],
    source: Location | Mapping[str, Any],
    map_location: MapLocation,
    hparams_file: str | Path | None,
    strict: bool | None,
    replaced: Mapping[str, Any],
) -> TaskType:
    """Build a task from a checkpoint's hyperparameters and load its weights; see `Task.load_from_checkpoint`.

    Args:
        source: the checkpoint or its contents.
    """
    saved = dict(source) if isinstance(source, Mapping) else reading.read(source)
    task = _build_from_checkpoint(kind, saved, "", hparams_file, replaced)
    task.configure_model()  # a task may create its model here
    if not isinstance(source, Mapping) and is_file(source):
        # only now, because the task's parameter names show whether "module." is DDP's prefix or an attribute
        saved["state_dict"] = plain_names(source, saved["state_dict"], task.state_dict().keys())
    else:
        saved["state_dict"] = averaged_weights(saved)
    task.on_load_checkpoint(saved)
    load_task_weights(task, saved, task.strict_loading if strict is None else strict)
    return task.to(map_location) if isinstance(map_location, (torch.device, str, int)) else task


def rebuild_data_module(
    kind: type[DataModuleType],
    source: Location | Mapping[str, Any],
    hparams_file: str | Path | None,
    replaced: Mapping[str, Any],
) -> DataModuleType:
    """Build a data module from a checkpoint's hyperparameters; see `DataModule.load_from_checkpoint`."""
    saved = dict(source) if isinstance(source, Mapping) else reading.read(source)
    data_module = _build_from_checkpoint(kind, saved, "datamodule_", hparams_file, replaced)
    if saved.get("datamodule"):
        data_module.load_state_dict(saved["datamodule"])
    return data_module


def _build_from_checkpoint(
    kind: type[Built],
    saved: Mapping[str, Any],
    prefix: str,
    hparams_file: str | Path | None,
    replaced: Mapping[str, Any],
) -> Built:
    """Call `kind` with the checkpoint's hyperparameters, overridden first by `hparams_file` and then by `replaced`.

    Raises CheckpointError if an argument is missing.
    """
    parameters = inspect.signature(kind).parameters
    # Lightning's files may contain more hyperparameters than __init__ accepts
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    values = dict(saved.get(f"{prefix}hyper_parameters") or {}) | _read_hparams_file(hparams_file)
    for name in saved.get(prefix + BUILT) or ():
        if name not in replaced and name in values:
            values[name] = rebuild_targets(values[name], kind, name)
    require_hyperparameters(kind, saved.get(prefix + LEFT_OUT) or (), replaced)
    # save_hyperparameters("config") stores the items of a single argument
    single: str | None = saved.get(f"{prefix}hparams_name")
    if single is not None and single in parameters and parameters[single].kind is not inspect.Parameter.VAR_KEYWORD:
        values |= {name: value for name, value in replaced.items() if name not in parameters}
        replaced = {name: value for name, value in replaced.items() if name in parameters}
        arguments: dict[str, Any] = {single: values}
    else:
        arguments = {name: value for name, value in values.items() if takes_any or name in parameters}
    try:
        return kind(**{name: _as_attributes(value) for name, value in arguments.items()} | dict(replaced))
    except TypeError as error:
        raise CheckpointError(
            f"{kind.__name__} cannot be built from the checkpoint's hyperparameters {sorted(values)}: {error}. "
            f"Call save_hyperparameters() in __init__, or pass the missing values as keyword arguments."
        ) from error


def _read_hparams_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from omegaconf import OmegaConf

    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must contain a mapping of hyperparameters.")
    return {str(name): value for name, value in loaded.items()}


def _as_attributes(value: Any) -> Any:
    """Convert nested mappings to dicts with attribute access, which some of the original mappings supported."""
    if isinstance(value, dict):
        return AttributeDict({key: _as_attributes(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_as_attributes(item) for item in value)
    return value


def averaging_state(contents: Mapping[str, Any], but: Iterable[str] = ()) -> Mapping[str, Any] | None:
    """Return the state of the callback whose averaged weights are used for evaluation; None if there is none.

    Callbacks whose keys are in `but` are ignored.
    """
    saved = contents.get("callbacks", {})
    states = [saved[key] for key in saved if key not in but and isinstance(saved[key], Mapping)]
    # StochasticWeightAveraging, whose state has "rates_before", uses its averages for evaluation only after training
    return next((state for state in states if state.get("averages") and "rates_before" not in state), None)


def averaged_weights(contents: Mapping[str, Any], but: Iterable[str] = ()) -> Any:
    """Return the weights to evaluate: the averaged weights if the checkpoint has any, otherwise its regular weights."""
    state, weights = averaging_state(contents, but), contents.get("state_dict")
    if state is None or weights is None:
        return weights
    averages = state["averages"]
    return {name: averages[name].to(value.dtype) if name in averages else value for name, value in weights.items()}
