"""A task or a data module, built again from a checkpoint."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...tasks.hyperparameters import AttributeDict
from ..errors import CheckpointError, ConfigError
from . import checkpoint
from .restore import load_weights

if TYPE_CHECKING:
    from ...tasks.data_module import DataModule
    from ...tasks.task import Task

Built = TypeVar("Built")
TaskType = TypeVar("TaskType", bound="Task")
DataModuleType = TypeVar("DataModuleType", bound="DataModule")
Location = torch.device | str | int | Callable[..., Any] | Mapping[str, str] | None
"""Where weights go. What torch.load would call for each storage has nothing to do here: they are read on the host."""


def rebuild_task(
    kind: type[TaskType],
    path: Path,
    map_location: Location,
    hparams_file: str | Path | None,
    strict: bool | None,
    replaced: Mapping[str, Any],
) -> TaskType:
    """Build a task from a checkpoint's hyperparameters and load its weights; see `Task.load_from_checkpoint`."""
    saved = checkpoint.read_any(path)
    task = _build(kind, saved, "", hparams_file, replaced)
    task.configure_model()
    if path.is_file():
        saved["state_dict"] = checkpoint.read_foreign(path, task.state_dict().keys())
    task.on_load_checkpoint(saved)
    load_weights(task, saved, task.strict_loading if strict is None else strict)
    return task.to(map_location) if isinstance(map_location, (torch.device, str, int)) else task


def rebuild_data_module(
    kind: type[DataModuleType], path: Path, hparams_file: str | Path | None, replaced: Mapping[str, Any]
) -> DataModuleType:
    """Build a data module from a checkpoint's hyperparameters; see `DataModule.load_from_checkpoint`."""
    return _build(kind, checkpoint.read_any(path), "datamodule_", hparams_file, replaced)


def _build(
    kind: type[Built],
    saved: Mapping[str, Any],
    prefix: str,
    hparams_file: str | Path | None,
    replaced: Mapping[str, Any],
) -> Built:
    """Call `kind` with the hyperparameters that the checkpoint holds, those in the file, and `replaced` on top.

    Raises CheckpointError where an argument is missing.
    """
    known = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    values = dict(saved.get(f"{prefix}hyper_parameters") or {}) | _read_file(hparams_file)
    together: str | None = saved.get(f"{prefix}hparams_name")
    if together is not None and together in known:
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


def _read_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from omegaconf import OmegaConf

    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of hyperparameters.")
    return {str(name): value for name, value in loaded.items()}


def _as_attributes(value: Any) -> Any:
    """Return mappings, however deep, as dicts whose keys can also be read as attributes, which some of them were."""
    if isinstance(value, Mapping):
        return AttributeDict({key: _as_attributes(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_as_attributes(item) for item in value)
    return value
