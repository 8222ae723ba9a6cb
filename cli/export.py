"""`legato export`: writes a checkpoint's weights as safetensors, or its model as ONNX or a program of torch.export."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import torch

from ..base.errors import CheckpointError, ConfigError
from ..trainer.checkpoints import find, reading, storage
from ..trainer.checkpoints.codec import KNOWN_EVERYWHERE
from ..trainer.checkpoints.hashed import HashedFile
from ..trainer.checkpoints.tensors import write_tensors
from ..trainer.resume.rebuild import averaged_weights
from ..trainer.runs.directory import find_run

MODELS = " The whole model is written to x.onnx or x.pt2."


def run_export(arguments: Namespace) -> None:
    """Run `legato export`: the suffix of the file says what it is."""
    source, target = path_of(arguments.checkpoint), Path(arguments.out)
    if target.suffix not in (".onnx", ".pt2"):
        print(f"{export_weights(source, target)} tensors  {target}")
        return
    storage.require_new(target)
    from .export_model import export_model

    with storage.whole_file(target) as partial:
        said = export_model(source, partial, arguments.config)
    print(f"{said}  {target}")


def path_of(word: str) -> Path:
    """Return the path of a checkpoint or run directory that a word is, or that of the run which is called so."""
    path = Path(word)
    with suppress(ConfigError):
        return path if path.exists() else find_run(word).path
    return path


def export_weights(source: Path, target: Path) -> int:
    """Write a checkpoint's weights to a new safetensors file under the task's own names; return the number of tensors.

    `source`: a checkpoint, or a run directory or folder, of which the newest complete one is taken; written by any
    number of processes. Raises CheckpointError if there is none, if weights are not plain tensors, or if `target`
    exists or has another suffix.
    """
    if target.suffix != ".safetensors":
        raise CheckpointError(
            f"{target}: the file is one of safetensors, and its name must end in .safetensors.{MODELS}"
        )
    storage.require_new(target)
    weights = averaged_weights(reading.read_checkpoint(find.resolve(source)))
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source} holds no weights ('state_dict').")
    odd = [name for name, value in weights.items() if getattr(value, "dtype", None) not in KNOWN_EVERYWHERE]
    if odd:
        raise CheckpointError(
            f"{source}: {', '.join(odd[:4])} cannot be stored in a safetensors file: not a plain tensor."
        )
    with storage.whole_file(target) as partial:
        write_tensors(HashedFile(partial), {name: torch.as_tensor(value) for name, value in weights.items()})
    return len(weights)
