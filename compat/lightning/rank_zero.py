"""Functions that run, log or warn only on rank 0. They come from lightning_utilities, which other packages also use."""

import logging
import warnings
from typing import Any

from ...base.place import current_rank

try:
    from lightning_utilities.core import rank_zero
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "Lightning compatibility mode requires lightning_utilities: pip install 'legato[lightning]'.",
        name="lightning_utilities",
    ) from None

log = logging.getLogger("lightning.pytorch")

WarningCache = rank_zero.WarningCache
rank_prefixed_message = rank_zero.rank_prefixed_message
rank_zero_only: Any = rank_zero.rank_zero_only
"""Decorator for functions that run only on rank 0. Its attribute `rank` is the rank of this process."""
rank_zero_warn = rank_zero.rank_zero_warn

if getattr(rank_zero_only, "rank", None) is None:  # these functions raise an error if no rank is set
    rank_zero_only.rank = current_rank()


@rank_zero_only  # type: ignore[untyped-decorator]
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a debug message on rank 0 with Lightning's logger."""
    log.debug(*args, stacklevel=max(stacklevel - 1, 1), **kwargs)


@rank_zero_only  # type: ignore[untyped-decorator]
def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message on rank 0 with Lightning's logger, which programs may silence or redirect."""
    log.info(*args, stacklevel=max(stacklevel - 1, 1), **kwargs)


class LightningDeprecationWarning(DeprecationWarning):
    """Warning that a name will be removed."""


class PossibleUserWarning(UserWarning):
    """Warning about code that may be intentional."""


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn on rank 0 that a name will be removed."""
    rank_zero_warn(message, stacklevel=stacklevel, **{"category": LightningDeprecationWarning, **kwargs})


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore PossibleUserWarning from all modules or from the given module."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
