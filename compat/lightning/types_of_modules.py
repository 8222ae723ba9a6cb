"""Type names and small functions of modules, strategies and loops."""

from typing import Any, TypeVar

import torch

TBroadcast = TypeVar("TBroadcast")
TReduce = TypeVar("TReduce")


def check_finite_loss(loss: Any) -> None:
    """Raise ValueError for a loss that is not finite."""
    if isinstance(loss, torch.Tensor) and not torch.isfinite(loss).all():
        raise ValueError(f"The loss returned in training_step is {loss}.")
