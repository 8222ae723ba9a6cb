"""Functions that run, log or warn on rank 0 only: those of lightning_utilities, which other libraries use too."""

import logging
import warnings
from typing import Any

from ...base.place import current_rank

try:
    from lightning_utilities.core import rank_zero
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "Lightning compatibility mode needs lightning_utilities: pip install 'legato[lightning]'.",
        name="lightning_utilities",
    ) from None

log = logging.getLogger("lightning.pytorch")

WarningCache = rank_zero.WarningCache
rank_prefixed_message = rank_zero.rank_prefixed_message
rank_zero_only: Any = rank_zero.rank_zero_only
"""Decorator for functions that run on rank 0 only; its attribute `rank` is this process's rank."""
rank_zero_warn = rank_zero.rank_zero_warn

if getattr(rank_zero_only, "rank", None) is None:  # until a run sets it: without a rank each of these functions raises
    rank_zero_only.rank = current_rank()


@rank_zero_only  # type: ignore[untyped-decorator]
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message for debugging, on rank 0, by Lightning's logger."""
    log.debug(*args, stacklevel=max(stacklevel - 1, 1), **kwargs)


@rank_zero_only  # type: ignore[untyped-decorator]
def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message, on rank 0, by Lightning's logger, which programs silence or send elsewhere."""
    log.info(*args, stacklevel=max(stacklevel - 1, 1), **kwargs)


class LightningDeprecationWarning(DeprecationWarning):
    """Warning that a name will be removed."""


class PossibleUserWarning(UserWarning):
    """Warning of something that may be meant."""


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn of a name that will be removed, on rank 0."""
    rank_zero_warn(message, stacklevel=stacklevel, **{"category": LightningDeprecationWarning, **kwargs})


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings of the category PossibleUserWarning, from all modules or the named one."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
