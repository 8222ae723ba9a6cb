"""Tasks and data modules built from a checkpoint: `load_from_checkpoint`."""

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
"""Device of the weights. Callables, which torch.load would call for each storage, are ignored: the host has all."""


def rebuild_task(
    kind: type[TaskType],
    source: Location | Mapping[str, Any],
    map_location: MapLocation,
    hparams_file: str | Path | None,
    strict: bool | None,
    replaced: Mapping[str, Any],
) -> TaskType:
    """Build a task from a checkpoint's hyperparameters and load its weights; see `Task.load_from_checkpoint`.

    source: the checkpoint, or its contents.
    """
    saved = dict(source) if isinstance(source, Mapping) else reading.read(source)
    task = _build_from_checkpoint(kind, saved, "", hparams_file, replaced)
    task.configure_model()  # a model made there has its weights only from here on
    if not isinstance(source, Mapping) and is_file(source):
        # only now: whether "module." is a wrapper of DDP's or a name of the task's own only the task can tell
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
    made = _build_from_checkpoint(kind, saved, "datamodule_", hparams_file, replaced)
    if saved.get("datamodule"):
        made.load_state_dict(saved["datamodule"])
    return made


def _build_from_checkpoint(
    kind: type[Built],
    saved: Mapping[str, Any],
    prefix: str,
    hparams_file: str | Path | None,
    replaced: Mapping[str, Any],
) -> Built:
    """Call `kind` with hyperparameters: the checkpoint's, updated with the file's, and with `replaced`.

    Raises CheckpointError if an argument is missing.
    """
    known = inspect.signature(kind).parameters
    # a file's hyperparameters may be more than __init__ takes, as Lightning's are
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    values = dict(saved.get(f"{prefix}hyper_parameters") or {}) | _read_hparams_file(hparams_file)
    for name in saved.get(prefix + BUILT) or ():
        if name not in replaced and name in values:
            values[name] = rebuild_targets(values[name], kind, name)
    require_hyperparameters(kind, saved.get(prefix + LEFT_OUT) or (), replaced)
    # save_hyperparameters("config") keeps what a single argument has held
    together: str | None = saved.get(f"{prefix}hparams_name")
    if together is not None and together in known and known[together].kind is not inspect.Parameter.VAR_KEYWORD:
        values |= {name: value for name, value in replaced.items() if name not in known}
        replaced = {name: value for name, value in replaced.items() if name in known}
        arguments: dict[str, Any] = {together: values}
    else:
        arguments = {name: value for name, value in values.items() if takes_any or name in known}
    try:
        return kind(**{name: _as_attributes(value) for name, value in arguments.items()} | dict(replaced))
    except TypeError as error:
        raise CheckpointError(
            f"{kind.__name__} cannot be built from the checkpoint's hyperparameters {sorted(values)}: {error}. "
            f"Call save_hyperparameters() in __init__, or hand over what is missing as keyword arguments."
        ) from error


def _read_hparams_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from omegaconf import OmegaConf

    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of hyperparameters.")
    return {str(name): value for name, value in loaded.items()}


def _as_attributes(value: Any) -> Any:
    """Convert nested mappings to dicts whose keys can also be read as attributes, as some originals' could."""
    if isinstance(value, dict):
        return AttributeDict({key: _as_attributes(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_as_attributes(item) for item in value)
    return value


def averaging_state(contents: Mapping[str, Any], but: Iterable[str] = ()) -> Mapping[str, Any] | None:
    """Return the state of the callback with whose averages a run is evaluated; `but`: keys of states left out."""
    states = [one for key, one in contents.get("callbacks", {}).items() if key not in but and isinstance(one, Mapping)]
    # the averages of StochasticWeightAveraging, whose state has more, are evaluated when training is over
    return next((one for one in states if one.get("averages") and "rates_before" not in one), None)


def averaged_weights(contents: Mapping[str, Any], but: Iterable[str] = ()) -> Any:
    """Return the weights by which a checkpoint was evaluated: the averages where it holds any."""
    state, weights = averaging_state(contents, but), contents.get("state_dict")
    if state is None or weights is None:
        return weights
    averages = state["averages"]
    return {name: averages[name].to(value.dtype) if name in averages else value for name, value in weights.items()}
