"""Files that `torch.save` writes, for other programs. Legato's own checkpoints hold no pickle."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from . import commit


def pickled(contents: Mapping[str, Any]) -> BytesIO:
    """Return what `write_pickled` writes, to be read from memory."""
    found = BytesIO()
    torch.save(dict(contents), found)
    found.seek(0)
    return found


def write_pickled(target: Path, contents: Mapping[str, Any]) -> None:
    """Write a new file, whole or not at all. Raises CheckpointError if that fails."""
    with commit.whole_file(target) as partial:
        try:
            torch.save(dict(contents), partial)
        except RuntimeError as error:  # of torch's writer, on a full disk for one
            raise OSError(str(error)) from error
