"""`legato convert`: writes a checkpoint as a file of Lightning's, or such a file as a checkpoint."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError
from ..trainer.checkpoints import commit, find, reading, storage
from ..trainer.checkpoints.foreign import read_contents
from ..trainer.resume.convert import as_lightning
from ..trainer.resume.pickled import write_pickled
from .export import path_of

SUFFIX = ".ckpt"


def run_convert(arguments: Namespace) -> None:
    """Run `legato convert`."""
    source, target = path_of(arguments.source), Path(arguments.target)
    contents = convert_checkpoint(source, target)
    print(f"epoch {contents.get('epoch')}, step {contents.get('global_step')}  {target}")


def convert_checkpoint(source: Path, target: Path) -> Mapping[str, Any]:
    """Write the checkpoint at `source` as Lightning's file `target`, or the reverse; return the written contents.

    `source`: a checkpoint, or a run directory or folder, of which the newest complete one is taken, written by any
    number of processes; or a file. A checkpoint made from a file holds what the file holds, so that a run takes over
    the same from both. Raises CheckpointError if there is no checkpoint, if a value cannot be stored, or if `target`
    exists or has another suffix.
    """
    storage.require_new(target)
    if source.is_file():
        contents = read_contents(source)
        storage.make_folder(target.absolute().parent)
        commit.write(target, contents)
        return contents
    if target.suffix != SUFFIX:
        raise CheckpointError(f"{target}: the file is one of Lightning's, and its name must end in {SUFFIX}.")
    contents = as_lightning(reading.read_checkpoint(find.resolve(source)))
    write_pickled(target, contents)
    return contents
