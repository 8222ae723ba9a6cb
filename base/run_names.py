"""Names of run directories, and checks of them; without torch, so that the config check can use them."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from .errors import ConfigError

VERSION = re.compile(r"version_(\d+)")
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
"""File name of the run's config in its directory."""
MANIFEST = "manifest.json"
"""File name of a checkpoint's manifest in its directory."""
RUN_FILE = "run.json"
"""File of a run directory that says which run it is of, and how that stands; a folder without it is none."""
EVALUATIONS = "evaluations"
"""Folder, in a run directory, of the evaluations of its checkpoints."""
REPLAY = ".replay-"
"""Separator between the name of a run directory and the number of a replay, in the name of its directory."""
EVENT_FILES = "events.out.tfevents."
"""Beginning of the names of TensorBoard's event files."""
LARGEST = 64 << 20
"""Bytes of a small file of a run directory: its `run.json`, its record."""
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
"""The address of a store such as s3://bucket/run; `Path` takes one slash off. One letter is a drive of Windows."""
LONGEST = 255
"""Maximum bytes of a file's name, on all usual file systems."""


def run_directory_gone(folder: Path) -> ConfigError:
    """Return the error for a run directory that has disappeared."""
    return ConfigError(
        f"The run directory {folder} is gone: somebody has deleted or moved it. The run ends here; resume from a "
        f"checkpoint that is left (resume=PATH), or begin a new run."
    )


def not_writable(folder: Path, reason: object) -> ConfigError:
    """Return the error for a run directory that is not writable any more; `reason`: the system's."""
    # by text: a caller has the words of the system alone
    is_full = str(reason) in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    return ConfigError(
        f"The run directory {folder} cannot be written to: {reason}. The run ends here; "
        f"{'free some space' if is_full else 'see to its rights'}, or go on elsewhere from one of its checkpoints "
        f"(resume=PATH, run.root)."
    )


def name_problem(name: str) -> str | None:
    """Return why a run's name is not a folder below the root; None if it is."""
    parts = Path(name).parts
    # a name with slashes is fine: it becomes nested folders below the root
    if not parts or Path(name).is_absolute() or ".." in parts or not name.isprintable():
        return f"must be a plain name, since it becomes a folder below run.root, not {name[:60]!r}."
    return path_problem(name)


def require_local(path: object, what: str = "") -> None:
    """Raise ConfigError for the address of a store; `what`: the argument that has it, such as "dirpath"."""
    problem = address_problem(path)
    if problem is not None:
        raise ConfigError(f"{what or 'A path'} {problem}")


def address_problem(path: object) -> str | None:
    """Return why a path is no local one but the address of a store, such as s3://bucket; None if it is local."""
    address = ADDRESS.match(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
    if address is None:
        return None
    scheme, rest = address[1], address[2]
    if scheme == "file":
        return f"is the address 'file:///{rest}': write it as a path, {'/' + rest!r}."
    return (
        f"is '{scheme}://{rest}', the address of a store. Legato reads and writes folders of this machine only: mount "
        f"the store, or copy the files, and name the folder."
    )


def path_problem(path: str) -> str | None:
    """Return why no file system accepts a path; None if one may."""
    if (problem := address_problem(path)) is not None:
        return problem
    if "\0" in path:
        return f"has a null byte, which no path can have: {path[:60]!r}."
    size, part = max(((len(os.fsencode(part)), part) for part in Path(path).parts), default=(0, ""))
    if size > LONGEST:
        return f"is too long: {part[:40]!r}... takes {size} bytes, and the name of a folder has {LONGEST} at most."
    return None


def is_run_directory(folder: Path, name: str) -> bool:
    """Return whether a run of this name writes, or wrote, to a folder.

    True for NAME/version_N, and for a folder with checkpoints: a run directory may have been copied.
    """
    parts = Path(name).parts
    named = bool(parts) and VERSION.fullmatch(folder.name) is not None and folder.parts[-len(parts) - 1 : -1] == parts
    return named or any((folder / CHECKPOINTS).glob(f"*/{MANIFEST}"))


def parse_small(path: Path) -> Any:
    """Return the contents of a small JSON file; None where there is none, or where it cannot be read."""
    try:
        return json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):  # the last: of thousands of brackets within each other
        return None


def read_small(path: Path) -> bytes:
    """Return the bytes of a regular file of at most LARGEST bytes; raises OSError for anything else."""
    if regular_file_size(path) > LARGEST:
        raise OSError(f"{path} has more than {LARGEST:,} bytes")
    return path.read_bytes()


def regular_file_size(path: Path) -> int:
    """Return the size of a regular file; raises OSError for anything else."""
    # opening a FIFO would wait for a writer, and reading a link to /dev/zero would not end
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no regular file")
    return status.st_size
