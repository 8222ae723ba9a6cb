"""Files that `torch.save` writes, for other programs. Legato's own checkpoints hold no pickle."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import commit


def pickled(contents: Mapping[str, Any]) -> BytesIO:
    """Return what `write_pickled` writes, to be read from memory."""
    found = BytesIO()
    torch.save(dict(contents), found)
    found.seek(0)
    return found


def write_pickled(target: Path, contents: Mapping[str, Any]) -> None:
    """Write a new file, whole or not at all. Raises CheckpointError if that fails."""
    partial = commit.temporary_path(target, commit.PARTIAL)
    try:
        commit.make_folder(target.absolute().parent)
        torch.save(dict(contents), partial)
        partial.rename(target)
        commit.sync_folder(target.absolute().parent)
    except (OSError, RuntimeError) as error:  # torch raises the second where its writer fails
        raise CheckpointError(f"{target} could not be written: {getattr(error, 'strerror', None) or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
