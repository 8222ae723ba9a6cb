"""rank_zero_only: what one process does for all."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from .environment import find_place


def rank_zero_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function, or a method, run on rank 0 only; on every other rank it returns None."""

    @wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _rank() == 0 else None

    return on_rank_zero


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    place = find_place()
    return 0 if place is None else place.rank
