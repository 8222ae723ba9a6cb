"""The run directory: default_root_dir/run_name/version_N. A run writes to its own and touches no other."""

import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError, ConfigError
from . import checkpoint
from .checkpoint import Check
from .run_lock import is_left_by_training
from .run_names import CHECKPOINTS as CHECKPOINTS
from .run_names import CONFIG, VERSION, fault_of_name

if TYPE_CHECKING:
    from .saver import Saver

log = logging.getLogger("legato")


def versions(root: Path, name: str) -> list[Path]:
    """Return the run directories of a name, oldest first."""
    folder = root / name
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if VERSION.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))


def create(root: Path, name: str) -> Path:
    """Make a new run directory and return it. Raises ConfigError where nothing can be written there."""
    fault = fault_of_name(name)
    if fault is not None:
        raise ConfigError(f"run.name {fault}")
    number = 1 + max((int(path.name.removeprefix("version_")) for path in versions(root, name)), default=-1)
    while True:
        path = root / name / f"version_{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} is in the way: expected a folder or nothing; move it, or set run.root."
                ) from None
            number += 1  # another run took it a moment ago
            continue
        except OSError as error:
            raise ConfigError(
                f"The run directory {path} cannot be made: {error.strerror}. Set run.root elsewhere."
            ) from error
        if not os.access(path, os.W_OK):
            raise ConfigError(f"The run directory {path} cannot be written to. Set run.root elsewhere.")
        return path


def write_config(directory: Path, text: str, weights: Path | None) -> None:
    """Store the config of a run; that of an evaluation names the weights it took, so that it can be done again."""
    if weights is not None:
        line = f"checkpoint: {json.dumps(os.path.abspath(weights), ensure_ascii=False)}"
        text = re.sub(r"(?m)^checkpoint: .*$", lambda _: line, text, count=1)
    (directory / CONFIG).write_text(text, encoding="utf-8")


def newest_in(directory: Path, check: Check = checkpoint.verify) -> Path | None:
    """Return the newest checkpoint of a run directory that passes `check`."""
    folder = directory / CHECKPOINTS
    return checkpoint.newest_whole(folder, check) if folder.is_dir() else None


def newest_checkpoint(root: Path, name: str, check: Check = checkpoint.verify) -> tuple[Path, Path] | None:
    """Return the newest run directory of a name that holds a checkpoint which passes `check`, and that checkpoint."""
    for directory in reversed(versions(root, name)):
        found = newest_in(directory, check)
        if found is not None:
            return directory, found
    return None


def newest_held(root: Path, name: str, saver: "Saver", check: Check) -> tuple[Path, Path] | None:
    """Return what `newest_checkpoint` does, with the directory held before anything is read in it.

    Raises ConfigError where another run of this name writes to it, or to a newer one that has no checkpoint yet.
    """
    for directory in reversed(versions(root, name)):
        if any((directory / CHECKPOINTS).glob("*step-*")) or is_left_by_training(directory):
            saver.hold(directory, "fit")
            found = newest_in(directory, check)
            if found is not None:
                return directory, found
            saver.release(directory)
    return None


def find(
    root: Path, name: str, resume: str | Path | None, saver: "Saver | None" = None, check: Check = checkpoint.verify
) -> tuple[Path | None, Path | None]:
    """Return the directory and the checkpoint that `resume` leads to; None for a new directory, or for no checkpoint.

    "auto" goes on in the newest run directory of this name that holds a whole checkpoint, if there is one. A path (a
    checkpoint, or a folder with some) is started from in a new run directory. Raises CheckpointError where it has none.
    """
    if resume is None:
        return None, None
    if resume == "auto":
        found = newest_checkpoint(root, name, check) if saver is None else newest_held(root, name, saver, check)
        if found is None:
            log.info("resume=auto: there is no whole checkpoint in %s, so the run begins anew.", root / name)
        return found if found is not None else (None, None)
    path = Path(resume)
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}. Expected a path, 'auto', 'last', 'best' or nothing.")
    return None, checkpoint.resolve(path, check)
