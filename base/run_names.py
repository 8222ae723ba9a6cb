"""File names in run directories, and checks for names and paths. Doesn't import torch, to keep config checks fast."""

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
"""File with the id and the status of a run. A folder without this file is not a run directory."""
EVALUATIONS = "evaluations"
"""Folder in a run directory for evaluations of its checkpoints."""
REPLAY = ".replay-"
"""Separator between the run directory's name and the replay's number in the name of a replay's directory."""
EVENT_FILES = "events.out.tfevents."
"""Prefix of TensorBoard event file names."""
LARGEST = 64 << 20
"""Maximum size in bytes of a small file in a run directory, such as `run.json`."""
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
"""Pattern of an address such as s3://bucket/run, or s3:/bucket/run from `Path`. A single letter is a Windows drive."""
LONGEST = 255
"""Maximum length of a file name in bytes on common file systems."""


def run_directory_gone(folder: Path) -> ConfigError:
    """Return the error for a run directory that has disappeared."""
    return ConfigError(
        f"The run directory {folder} was deleted or moved during the run, so the run has ended. Resume from a "
        f"remaining checkpoint (resume=PATH), or start a new run."
    )


def not_writable(folder: Path, reason: object) -> ConfigError:
    """Return the error for a run directory that is no longer writable. `reason` is the system's message."""
    # compare the text, because callers only have the system's message
    is_full = str(reason) in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    return ConfigError(
        f"Cannot write to the run directory {folder}: {reason}. The run has ended. "
        f"{'Free some space' if is_full else 'Change its permissions'}, or continue in another folder from one of the "
        f"run's checkpoints (resume=PATH, run.root)."
    )


def name_problem(name: str) -> str | None:
    """Return the reason a run name is not valid as a folder name below the root; None if it is valid."""
    parts = Path(name).parts
    # a name may contain slashes, which create nested folders below the root
    if not parts or Path(name).is_absolute() or ".." in parts or not name.isprintable():
        return f"must be a relative folder name below run.root, got {name[:60]!r}."
    return path_problem(name)


def require_local(path: object, argument: str = "") -> None:
    """Raise ConfigError if `path` is an address in an object store. The message begins with `argument`."""
    problem = address_problem(path)
    if problem is not None:
        raise ConfigError(f"{argument or 'A path'} {problem}")


def address_problem(path: object) -> str | None:
    """Return a message if a path is an address in an object store, such as s3://bucket; None for a local path."""
    address = ADDRESS.match(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
    if address is None:
        return None
    scheme, rest = address[1], address[2]
    if scheme == "file":
        return f"is the address 'file:///{rest}'. Write it as a path: {'/' + rest!r}."
    return (
        f"is '{scheme}://{rest}', an address in an object store, but must be a local path. Mount the store or copy the "
        f"files, and pass the local folder."
    )


def path_problem(path: str) -> str | None:
    """Return the reason no common file system accepts a path; None if the path is valid."""
    if (problem := address_problem(path)) is not None:
        return problem
    if "\0" in path:
        return f"contains a null byte, which is not allowed in a path: {path[:60]!r}."
    size, name = max(((len(os.fsencode(name)), name) for name in Path(path).parts), default=(0, ""))
    if size > LONGEST:
        return f"is too long: {name[:40]!r}... has {size} bytes, but a folder name may have at most {LONGEST}."
    return None


def is_run_directory(folder: Path, name: str) -> bool:
    """Return whether a folder is a run directory of the run `name`.

    That is true of NAME/version_N and of any folder with checkpoints, which may be a copy of a run directory.
    """
    parts = Path(name).parts
    if parts and VERSION.fullmatch(folder.name) is not None and folder.parts[-len(parts) - 1 : -1] == parts:
        return True
    return any((folder / CHECKPOINTS).glob(f"*/{MANIFEST}"))


def parse_small(path: Path) -> Any:
    """Return the contents of a small JSON file; None if it is missing or invalid."""
    try:
        return json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return None


def read_small(path: Path) -> bytes:
    """Return the contents of a regular file of at most LARGEST bytes. Raises OSError for anything else."""
    if regular_file_size(path) > LARGEST:
        raise OSError(f"{path} has more than {LARGEST:,} bytes")
    return path.read_bytes()


def regular_file_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises OSError for anything else."""
    # opening a FIFO would wait for a writer, and reading /dev/zero through a link would never end
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    return status.st_size
