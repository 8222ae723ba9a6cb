"""Files that `torch.save` writes, for other programs. Legato's own checkpoints hold no pickle."""

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from ..checkpoints.storage import whole_file

File = TypeVar("File", bound=IO[bytes])


def pickled(contents: Mapping[str, Any], file: File) -> File:
    """Write what `write_pickled` writes to an open file; return it, to be read from its beginning."""
    torch.save(dict(contents), file)
    file.seek(0)
    return file


def write_pickled(target: Path, contents: Mapping[str, Any]) -> None:
    """Write a new file, whole or not at all. Raises CheckpointError if that fails."""
    with whole_file(target) as partial:
        try:
            torch.save(dict(contents), partial)
        except RuntimeError as error:  # of torch's writer, on a full disk for one
            raise OSError(str(error)) from error
