"""What checkpoints leave out, as it is code: hyperparameters, and values that a program's hooks add.

It stays with the task or data module that has it. A checkpoint names it, with the id of that object, so that it is
found again while the object lives in this process; `load_from_checkpoint` takes a copy.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...tasks.hyperparameters import IN_PROCESS
from ..errors import CheckpointError
from .format import flatten

if TYPE_CHECKING:
    from ...tasks.hyperparameters import Hyperparameters

log = logging.getLogger("legato")

LEFT_OUT = "hyper_parameters_left_out"
"""Key of what a checkpoint says of hyperparameters that it does not hold: their names, and the id of their object."""
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
    """Return all hyperparameters, in plain dicts and lists, for loggers."""
    return {name: plain_containers(value) for name, value in owner.hparams.items()}


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


def tell_left_out(owner: "Hyperparameters") -> None:
    """Warn, once for an object, of hyperparameters that its checkpoints do not hold."""
    left = split_hyperparameters(owner)[1]
    if not left or owner.__dict__.get("_hparams_told"):
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
    return {name: copy.deepcopy(owner.hparams[name]) for name in names if owner is not None and name in owner.hparams}


# --- values of hooks --------------------------------------------------------------------------------------------------
def leave_out_added(owner: "Hyperparameters", contents: dict[str, Any], known: set[str], tells: bool) -> None:
    """Take from a checkpoint's contents what hooks added beside the `known` keys and a checkpoint cannot hold.

    `owner`: the task that keeps it. `tells`: whether to warn of it, once for a task.
    """
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


def add_left_out(contents: dict[str, Any]) -> None:
    """Add copies of what hooks had added to a checkpoint, as far as its task lives in this process."""
    left = contents.get(ADDED)
    if isinstance(left, Mapping):
        owner = IN_PROCESS.get(left.get("object", ""))
        added = {} if owner is None else owner.__dict__.get("_added_to_checkpoints", {})
        contents.update({name: copy.deepcopy(added[name]) for name in left.get("names", ()) if name in added})
