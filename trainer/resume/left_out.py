"""Hyperparameters that checkpoints leave out, as they are code; a checkpoint names them."""

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
"""Key of the names of hyperparameters that a checkpoint does not hold."""
BUILT = "hyper_parameters_built"
"""Key of the names of hyperparameters of which a checkpoint holds the config that they were built from."""


def split_hyperparameters(owner: "Hyperparameters") -> tuple[dict[str, Any], list[str]]:
    """Return the hyperparameters that a checkpoint can hold, and the names of the others."""
    plain = plain_hyperparameters(owner)
    values = {}
    for name, value in plain.items():
        # the writer itself decides, so that no list of storable types can differ from it
        with suppress(CheckpointError):
            flatten({name: value})  # which raises for what no checkpoint holds
            values[name] = value
    return values, [name for name in plain if name not in values]


def tell_left_out(owners: Mapping[str, "Hyperparameters | None"], contents: Mapping[str, Any]) -> None:
    """Warn, once for a task or data module, of its hyperparameters that a checkpoint does not hold.

    owners: these objects, by the prefix of their keys in the contents.
    """
    for prefix, owner in owners.items():
        names = contents.get(prefix + LEFT_OUT)
        if owner is not None and names and not owner.__dict__.get("_hparams_told"):
            owner.__dict__["_hparams_told"] = True
            log.warning("%s", _advice(type(owner), names))


def require_hyperparameters(kind: type, left_out: Sequence[str], replaced: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a hyperparameter that a checkpoint leaves out is not `replaced`."""
    names = [name for name in left_out if name not in replaced]
    if names:
        raise CheckpointError(_advice(kind, names))


def _advice(kind: type, names: Sequence[str]) -> str:
    return (
        f"Hyperparameters of {kind.__name__} that checkpoints do not hold, as they are code: {', '.join(names)}. Hand "
        f"them over when you load one: {kind.__name__}.load_from_checkpoint(path, "
        f"{', '.join(f'{name}=...' for name in names)})."
    )
