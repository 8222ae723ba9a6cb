"""Checkpoints as programs for Lightning read them: `torch.load` of one opens it, though it is a directory."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ...tasks.hyperparameters import IN_PROCESS
from ...tasks.task import Task
from ...trainer.checkpoints import reading
from ...trainer.checkpoints.foreign import LIGHTNING
from ...trainer.checkpoints.manifest import MANIFEST
from ...trainer.resume.convert import as_lightning
from ...trainer.resume.left_out import LEFT_OUT, OMEGACONF, as_omegaconf, find_hyperparameters
from ...trainer.resume.pickled import pickled, write_pickled
from .file_functions import alone_in, in_place_of
from .inner import VERSION

load_file, save_file = torch.load, torch.save


def is_checkpoint(path: Any) -> bool:
    """Return whether a path is a checkpoint directory."""
    return isinstance(path, (str, os.PathLike)) and os.path.isfile(os.path.join(os.fspath(path), MANIFEST))


def load(f: Any, *arguments: Any, **options: Any) -> Any:
    """Do what `torch.load` does; of a checkpoint directory return what Lightning's file would hold.

    That includes hyperparameters that the directory leaves out, while their object lives in this process.
    """
    if not is_checkpoint(f):
        return load_file(f, *arguments, **options)
    saved = reading.read_checkpoint(Path(os.fspath(f)))
    left_out = saved.get(LEFT_OUT) or {}
    found = load_file(pickled(as_lightning(saved), BytesIO()), *arguments, **options)
    values = found.get("hyper_parameters", {})
    if left_out.get("object") in IN_PROCESS:
        values = {**values, **find_hyperparameters(dict, left_out, {})}
    if values:
        found["hyper_parameters"] = as_omegaconf(values, saved.get(OMEGACONF) or ())
    return found


def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
    """Do what `torch.save` does; a checkpoint directory of that name is replaced by the file, as a file would be."""

    def put(beside: Path) -> None:
        save_file(obj, beside / "new", *arguments, **options)
        os.rename(beside / "new", f)

    if is_checkpoint(f):
        path = Path(os.fspath(f))
        with alone_in(path.parent):
            in_place_of(path, put)
    else:
        save_file(obj, f, *arguments, **options)


def save_untrained(module: Task, path: str | Path) -> None:
    """Write a file of a module's weights, before any run."""
    write_pickled(Path(path), {"state_dict": module.state_dict(), LIGHTNING: VERSION})


def open_directories() -> None:
    """Let `torch.load` open checkpoint directories, and `torch.save` replace them, in this process."""
    torch.load, torch.save = load, save
