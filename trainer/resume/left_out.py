"""Values that checkpoints leave out, as they are code: hyperparameters, and what a program's hooks add.

It stays with the task or data module that has it. A checkpoint names it, with the id of that object, so that it is
found again while the object lives in this process; `load_from_checkpoint` takes a copy.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...base.errors import CheckpointError
from ...tasks.hyperparameters import IN_PROCESS
from ..checkpoints.codec import flatten

if TYPE_CHECKING:
    from ...tasks.hyperparameters import Hyperparameters

log = logging.getLogger("legato")

LEFT_OUT = "hyper_parameters_left_out"
"""Key of what a checkpoint says of hyperparameters that it does not hold: their names, and the id of their object."""
BUILT = "hyper_parameters_built"
"""Key of the names of hyperparameters of which a checkpoint holds the config that they were built from."""
OMEGACONF = "hyper_parameters_omegaconf"
"""Key of the names of hyperparameters that were containers of OmegaConf's, which a checkpoint holds as plain ones."""
ADDED = "left_out"
"""Key of the same for values that hooks on_save_checkpoint added."""


def can_be_stored(value: Any) -> bool:
    """Return whether a checkpoint can hold a value."""
    with suppress(CheckpointError):
        flatten({"value": value})
        return True
    return False


# --- hyperparameters --------------------------------------------------------------------------------------------------
def split_hyperparameters(owner: "Hyperparameters") -> tuple[dict[str, Any], list[str]]:
    """Return the hyperparameters that a checkpoint can hold, and the names of the others."""
    plain = logged_hyperparameters(owner)
    values = {name: value for name, value in plain.items() if can_be_stored(value)}
    return values, [name for name in plain if name not in values]


def logged_hyperparameters(owner: "Hyperparameters") -> dict[str, Any]:
    """Return all hyperparameters, in plain dicts and lists, for loggers; of what a config built, the config."""
    built = built_hyperparameters(owner)
    return {name: built[name] if name in built else plain_containers(value) for name, value in owner.hparams.items()}


def built_hyperparameters(owner: "Hyperparameters") -> dict[str, Any]:
    """Return the configs of those hyperparameters that a config built, by name."""
    recorded = owner.__dict__.get("_hparams_configs", {})
    return {name: config for name, (value, config) in recorded.items() if owner.hparams.get(name) is value}


def is_omegaconf(value: Any) -> bool:
    """Return whether a value is a config of OmegaConf's."""
    return type(value).__module__.startswith("omegaconf.")


def as_omegaconf(values: dict[str, Any], names: Sequence[str]) -> Any:
    """Return hyperparameters with those named as configs of OmegaConf's; the name "" makes them one config."""
    if not names:
        return values
    from omegaconf import OmegaConf

    if "" in names:
        return OmegaConf.create(values)
    return values | {name: OmegaConf.create(values[name]) for name in names if name in values}


def plain_containers(value: Any) -> Any:
    """Convert mappings and sequences of other types, such as OmegaConf's, to dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain_containers(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return (
            tuple(map(plain_containers, value))
            if isinstance(value, tuple)
            else [plain_containers(item) for item in value]
        )
    return value


def tell_left_out(owner: "Hyperparameters", left: Sequence[str]) -> None:
    """Warn, once for an object, of the named hyperparameters, which its checkpoints do not hold."""
    if owner.__dict__.get("_hparams_told"):
        return
    owner.__dict__["_hparams_told"] = True
    kind = type(owner).__name__
    named = ", ".join(f"{name} ({type(owner.hparams[name]).__name__})" for name in left)
    log.warning(
        "Hyperparameters of %s that checkpoints do not hold, as they are code: %s. load_from_checkpoint finds them "
        "in this process; elsewhere hand them over: %s.load_from_checkpoint(path, %s).",
        kind, named, kind, ", ".join(f"{name}=..." for name in left),
    )  # fmt: skip


def find_hyperparameters(kind: type, left_out: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the hyperparameters that a checkpoint leaves out, from the object that they belong to.

    Raises CheckpointError if that is not in this process, and they are not `replaced`.
    """
    names = [name for name in left_out.get("names", ()) if name not in replaced]
    owner = IN_PROCESS.get(left_out.get("object", ""))
    if owner is None and names:
        raise CheckpointError(
            f"{kind.__name__} was saved with hyperparameters that a checkpoint does not hold, as they are code: "
            f"{', '.join(names)}. Hand them over: {kind.__name__}.load_from_checkpoint(path, "
            f"{', '.join(f'{name}=...' for name in names)})."
        )
    if owner is None:
        return {}
    values = {**owner.hparams, **owner.__dict__.get("_added_hyperparameters", {})}
    return {name: copy.deepcopy(values[name]) for name in names if name in values}


# --- values of hooks --------------------------------------------------------------------------------------------------
def leave_out_added(owner: "Hyperparameters", contents: dict[str, Any], known: set[str], tells: bool) -> None:
    """Take from a checkpoint's contents what hooks added beside the `known` keys and a checkpoint cannot hold.

    `owner`: the task that keeps it. `tells`: whether to warn of it, once for a task.
    """
    hyperparameters = contents["hyper_parameters"]
    changed = {name: value for name, value in hyperparameters.items() if not can_be_stored(plain_containers(value))}
    if changed:
        contents["hyper_parameters"] = {name: hyperparameters[name] for name in hyperparameters.keys() - changed.keys()}
        names = contents.get(LEFT_OUT, {}).get("names", [])
        names = [*names, *(name for name in changed if name not in names)]
        contents[LEFT_OUT] = {"names": names, "object": owner.identity_in_process()}
        owner.__dict__["_added_hyperparameters"] = changed
    left = {key: value for key, value in contents.items() if key not in known and not can_be_stored(value)}
    if not left:
        return
    for key in left:
        del contents[key]
    contents[ADDED] = {"names": list(left), "object": owner.identity_in_process()}
    told = "_added_to_checkpoints" in owner.__dict__
    owner.__dict__["_added_to_checkpoints"] = left
    if tells and not told:
        named = ", ".join(f"{name} ({type(value).__name__})" for name, value in left.items())
        log.warning(
            "on_save_checkpoint of %s or of a callback adds what checkpoints do not hold, as it is code: %s. "
            "on_load_checkpoint finds it in this process, and must do without it elsewhere.",
            type(owner).__name__, named,
        )  # fmt: skip


def add_left_out(contents: dict[str, Any], hook: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Add copies of what hooks had added to a checkpoint, as far as it can be had.

    It comes from the task that was saved, if that lives in this process, else from `hook`: on_save_checkpoint of the
    task that continues the run.
    """
    left, names = contents.get(ADDED), names_added(contents)
    owner = IN_PROCESS.get(left.get("object", "")) if isinstance(left, Mapping) else None
    added = {} if owner is None else owner.__dict__.get("_added_to_checkpoints", {})
    if hook is not None and any(name not in added for name in names):
        added = {**contents, "hyper_parameters": dict(contents.get("hyper_parameters") or {})}
        hook(added)
    contents.update({name: copy.deepcopy(added[name]) for name in names if name in added})


def names_added(contents: Mapping[str, Any]) -> list[str]:
    """Return the names of what hooks had added to a checkpoint and it does not hold."""
    left = contents.get(ADDED)
    return list(left.get("names", ())) if isinstance(left, Mapping) else []
