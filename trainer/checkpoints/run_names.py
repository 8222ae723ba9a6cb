"""Names of run directories, and how one is told from another folder; without torch, so that a config can ask."""

import os
import re
from pathlib import Path

from ..errors import ConfigError

VERSION = re.compile(r"version_(\d+)")
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
"""Where a run directory keeps the config that it was made from."""
LONGEST = 255
"""Bytes of a file's name, on all usual file systems."""


def run_directory_gone(folder: Path) -> ConfigError:
    """Return the error for a run directory that is not there any more."""
    return ConfigError(
        f"The run directory {folder} is gone: somebody has deleted or moved it. The run ends here; resume from a "
        f"checkpoint that is left (resume=PATH), or begin anew."
    )


def unwritable(folder: Path, reason: object) -> ConfigError:
    """Return the error for a run directory in which nothing can be written any more."""
    return ConfigError(
        f"The run directory {folder} cannot be written to: {reason}. The run ends here; see to its rights, or go "
        f"on elsewhere from one of its checkpoints (resume=PATH, run.root)."
    )


def fault_of_name(name: str) -> str | None:
    """Say what keeps a run's name from being a folder below the root; None where nothing does."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or not name.isprintable():
        return f"must be a plain name, since it becomes a folder below run.root, not {name[:60]!r}."
    return fault_of_path(name)


def fault_of_path(path: str) -> str | None:
    """Say why no file system takes a path; None where one may."""
    if "\0" in path:
        return f"has a null byte, which no path can have: {path[:60]!r}."
    size, part = max(((len(os.fsencode(part)), part) for part in Path(path).parts), default=(0, ""))
    if size > LONGEST:
        return f"is too long: {part[:40]!r}... takes {size} bytes, and the name of a folder has {LONGEST} at most."
    return None


def is_run_directory(folder: Path, name: str) -> bool:
    """Return whether a run of this name writes, or wrote, to a folder.

    It is NAME/version_N, or holds checkpoints: a run directory may have been copied to elsewhere.
    """
    parts = Path(name).parts
    named = bool(parts) and VERSION.fullmatch(folder.name) is not None and folder.parts[-len(parts) - 1 : -1] == parts
    return named or any((folder / CHECKPOINTS).glob("step-*"))
