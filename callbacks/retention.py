"""Retention: which checkpoints to keep and which to delete."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .callback import Callback

if TYPE_CHECKING:
    import torch


NAME = re.compile(r"step-[0-9]{8,}")


def is_name(name: object) -> bool:
    """Return whether this is the name of a checkpoint, so that as a path it cannot lead elsewhere."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


class Retention(Callback):
    """Base of Checkpoint: tracks the checkpoints that a run wrote, by name, with their monitored values.

    Keeps the `save_top_k` best (-1: all; without a `monitor` the newest are best) and, with `save_last`, the newest.
    Names sort by age.
    """

    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool
    dirpath: Path | None
    scores: dict[str, float | None]
    """Monitored values by name; None if there was no valid value."""

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint, or ""."""
        return self.path(max(self.scores, default=None))

    @property
    def best_model_path(self) -> str:
        """Path of the checkpoint with the best value, without a monitor of the newest, or ""."""
        return self.path(next(iter(self._best_of(self.scores)), None))

    @property
    def best_model_score(self) -> "torch.Tensor | None":
        """The best monitored value."""
        return next(iter(self.best_k_models.values()), None)

    @property
    def best_k_models(self) -> "dict[str, torch.Tensor]":
        """Paths of the best checkpoints and their values, best first."""
        from torch import tensor

        scored = ((name, self.scores[name]) for name in self._best_of(self.scores))
        return {self.path(name): tensor(score) for name, score in scored if score is not None}

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst of the best checkpoints, or ""."""
        return next(reversed(self.best_k_models), "")

    def path(self, name: str | None) -> str:
        """Return the path of a checkpoint."""
        return "" if name is None or self.dirpath is None else str(self.dirpath / name)

    def keeps(self, name: str, score: float | None) -> bool:
        """Return whether a new checkpoint would be kept."""
        self.scores[name] = score
        kept = name in self._kept_of(self.scores)
        del self.scores[name]
        return kept

    def surplus(self) -> list[str]:
        """Return the names of checkpoints to delete."""
        kept = self._kept_of(self.scores)
        return [name for name in self.scores if name not in kept]

    def _kept_of(self, names: Iterable[str]) -> set[str]:
        names = list(names)
        return {*self._best_of(names), *([max(names)] if self.save_last and names else [])}

    def _best_of(self, names: Iterable[str]) -> list[str]:
        """Return the best names, best first; ties go to the earlier one."""
        names = list(names)
        if self.monitor is None:
            ranked = sorted(names, reverse=True)
        else:
            sign = 1 if self.mode == "min" else -1
            scored = {name: score for name in names if (score := self.scores[name]) is not None}
            ranked = sorted(scored, key=lambda name: (sign * scored[name], name))
        if self.save_top_k == -1:
            return ranked + [name for name in names if name not in ranked]
        return ranked[: self.save_top_k]
