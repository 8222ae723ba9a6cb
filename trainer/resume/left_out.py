"""Hyperparameters whose values cannot be stored, such as functions. A checkpoint contains only their names."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...base.errors import CheckpointError
from ...tasks.hyperparameters import plain_hyperparameters
from ..checkpoints.codec import flatten

if TYPE_CHECKING:
    from ...tasks.hyperparameters import Hyperparameters

log = logging.getLogger("legato")

LEFT_OUT = "hyper_parameters_left_out"
"""Key in a checkpoint for the names of the hyperparameters that it does not contain."""
BUILT = "hyper_parameters_built"
"""Key in a checkpoint for the names of the hyperparameters that are stored as configs and rebuilt from them."""


def split_hyperparameters(owner: "Hyperparameters") -> tuple[dict[str, Any], list[str]]:
    """Return the hyperparameters that a checkpoint can store, and the names of all other hyperparameters."""
    plain = plain_hyperparameters(owner)
    values = {}
    for name, value in plain.items():
        # the encoder decides, because a separate list of types could differ from what the encoder accepts
        with suppress(CheckpointError):
            flatten({name: value})
            values[name] = value
    return values, [name for name in plain if name not in values]


def tell_left_out(owners: Mapping[str, "Hyperparameters | None"], contents: Mapping[str, Any]) -> None:
    """Warn, once per task or data module, about hyperparameters that the checkpoint does not contain.

    Args:
        owners: the task and the data module, keyed by the prefix of their keys in the contents.
    """
    for prefix, owner in owners.items():
        names = contents.get(prefix + LEFT_OUT)
        if owner is not None and names and not owner.__dict__.get("_hparams_told"):
            owner.__dict__["_hparams_told"] = True
            log.warning("%s", _advice(type(owner), names))


def require_hyperparameters(kind: type, left_out: Sequence[str], replaced: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a hyperparameter that the checkpoint omits is also missing from `replaced`."""
    names = [name for name in left_out if name not in replaced]
    if names:
        raise CheckpointError(_advice(kind, names))


def _advice(kind: type, names: Sequence[str]) -> str:
    return (
        f"Checkpoints cannot store these hyperparameters of {kind.__name__}, because they are code: "
        f"{', '.join(names)}. Pass them when you load a checkpoint: {kind.__name__}.load_from_checkpoint(path, "
        f"{', '.join(f'{name}=...' for name in names)})."
    )
