"""Exceptions that programs written for Lightning raise and catch."""

import os
from typing import Any

from ...base.errors import CheckpointError, LegatoError

MisconfigurationException = LegatoError
"""The base class of Legato's errors, so `except MisconfigurationException` catches all of them."""


class SIGTERMException(SystemExit):
    """Raised to stop a process that has received a termination signal."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """Raised when a checkpoint path does not exist."""


def require_checkpoint(path: Any) -> None:
    """Raise CheckpointMissingError if a checkpoint path does not exist."""
    if not os.path.exists(path):
        raise CheckpointMissingError(f"There is no checkpoint at {str(path)!r}. Pass the path to a saved checkpoint.")
