"""Exceptions that programs written for Lightning raise and catch."""

import os
from typing import Any

from ...base.errors import CheckpointError, LegatoError

MisconfigurationException = LegatoError
"""The base of Legato's errors, so that `except MisconfigurationException` catches each of them."""


class SIGTERMException(SystemExit):
    """The end of a process that was told to terminate."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is nothing at the path of a checkpoint."""


def require_checkpoint(path: Any) -> None:
    """Raise CheckpointMissingError where a path of a checkpoint leads nowhere."""
    if not os.path.exists(path):
        raise CheckpointMissingError(f"There is no checkpoint at {str(path)!r}: give the path of one that was saved.")
