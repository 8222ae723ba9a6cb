"""`legato export CHECKPOINT out.safetensors`: the weights of a checkpoint as one file for any safetensors reader."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import CheckpointError, ConfigError
from . import checkpoint, commit
from .tensor_files import write_tensors
from .tree import KNOWN_EVERYWHERE


def export(source: Path, target: Path) -> int:
    """Write a checkpoint's weights to a new file, whole, under the task's own names; return how many tensors.

    source: a checkpoint, or a run directory or folder of some, of which the newest whole one is taken; however many
    processes wrote it. Raises CheckpointError where it is none, weights are no plain tensors, or `target` is there or
    has another ending than its content.
    """
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: the file is one of safetensors, and its name must end in .safetensors.")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already, and is not replaced. Choose another name.")
    weights = checkpoint.read(checkpoint.resolve(source)).get("state_dict")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source} holds no weights ('state_dict').")
    odd = [name for name, value in weights.items() if getattr(value, "dtype", None) not in KNOWN_EVERYWHERE]
    if odd:
        raise CheckpointError(f"{source}: {', '.join(odd[:4])} cannot stand in a safetensors file: no plain tensor.")
    partial = commit.beside(target, commit.PARTIAL)
    try:
        commit.make_folder(target.absolute().parent)
        write_tensors(partial, {name: torch.as_tensor(value) for name, value in weights.items()})
        partial.rename(target)
        commit.sync_folder(target.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(weights)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    if len(arguments) != 2:
        raise ConfigError("legato export takes a checkpoint (or a run directory) and the file to write: x.safetensors.")
    source, target = map(Path, arguments)
    print(f"{export(source, target)} tensors  {target}")
