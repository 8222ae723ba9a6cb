"""Functions that run, log or warn on rank 0 only, and the categories of warnings."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from ...trainer.processes.environment import current_rank

log = logging.getLogger("lightning.pytorch")


class RankZeroOnly:
    """Decorator for functions that run on rank 0 only; `rank` is this process's rank, or one that a script has set."""

    def __init__(self) -> None:
        self._given: int | None = None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return current_rank() if self._given is None else self._given

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._given = value

    @rank.deleter
    def rank(self) -> None:
        self._given = None

    def __call__(self, fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        """Return `fn` as a function that does nothing and returns `default` on ranks other than 0."""

        @functools.wraps(fn)
        def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if rank_zero_only.rank == 0 else default

        return on_rank_zero

    def __reduce__(self) -> str:
        return "rank_zero_only"


rank_zero_only = RankZeroOnly()


class LightningDeprecationWarning(DeprecationWarning):
    """Warning that a name will be removed."""


class PossibleUserWarning(UserWarning):
    """Warning of something that may be meant."""


def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message for debugging, on rank 0."""
    if rank_zero_only.rank == 0:
        log.debug(*args, stacklevel=max(stacklevel - 2, 1), **kwargs)


def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message, on rank 0."""
    if rank_zero_only.rank == 0:
        log.info(*args, stacklevel=max(stacklevel - 2, 1), **kwargs)


def rank_zero_warn(message: str | Warning, stacklevel: int = 4, **kwargs: Any) -> None:
    """Warn, on rank 0; the default `stacklevel` names the caller of the function that warns."""
    if rank_zero_only.rank == 0:
        warnings.warn(message, stacklevel=max(stacklevel - 1, 1), **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn of a name that will be removed, on rank 0."""
    rank_zero_warn(message, stacklevel, **{"category": LightningDeprecationWarning, **kwargs})


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message with its rank before it, if there is one."""
    return message if rank is None else f"[rank: {rank}] {message}"


class WarningCache(set[str]):
    """Messages that were given already; each is given once."""

    def warn(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Warn, once, on rank 0."""
        self._once(rank_zero_warn, message, stacklevel=stacklevel, **kwargs)

    def deprecation(self, message: str, stacklevel: int = 6, **kwargs: Any) -> None:
        """Warn of a name that will be removed, once, on rank 0."""
        self._once(rank_zero_deprecation, message, stacklevel=stacklevel, **kwargs)

    def info(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Log a message, once, on rank 0."""
        self._once(rank_zero_info, message, stacklevel=stacklevel, **kwargs)

    def _once(self, give: Callable[..., None], message: str, **kwargs: Any) -> None:
        if message not in self:
            self.add(message)
            give(message, **kwargs)


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings of the category PossibleUserWarning, from all modules or the named one."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
