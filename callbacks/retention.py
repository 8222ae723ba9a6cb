"""Retention: which checkpoints a run has, which are the best, and which may go."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .callback import Callback

if TYPE_CHECKING:
    import torch


NAME = re.compile(r"step-[0-9]{8,}")


def is_name(name: object) -> bool:
    """Tell whether this is a name as checkpoints have it, which leads nowhere else."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


class Retention(Callback):
    """Knows the checkpoints that a run wrote and did not delete, by name, with their monitored values.

    Kept are the `save_top_k` best (-1: all; without a `monitor` the newest count as best) and, with `save_last`, the
    newest. Names sort by age.
    """

    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool
    dirpath: Path | None
    scores: dict[str, float | None]
    """None: there was no value, or none that counts."""

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint; "" where there is none."""
        return self.path(max(self.scores, default=None))

    @property
    def best_model_path(self) -> str:
        """The checkpoint with the best monitored value, or without a monitor the newest; "" where there is none."""
        return self.path(next(iter(self._best_of(self.scores)), None))

    @property
    def best_model_score(self) -> "torch.Tensor | None":
        """The best monitored value."""
        return next(iter(self.best_k_models.values()), None)

    @property
    def best_k_models(self) -> "dict[str, torch.Tensor]":
        """The best checkpoints and their monitored values, best first."""
        from torch import tensor

        scored = ((name, self.scores[name]) for name in self._best_of(self.scores))
        return {self.path(name): tensor(score) for name, score in scored if score is not None}

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the best checkpoints; "" where there is none."""
        return next(reversed(self.best_k_models), "")

    def path(self, name: str | None) -> str:
        """Return where a checkpoint stands."""
        return "" if name is None or self.dirpath is None else str(self.dirpath / name)

    def keeps(self, name: str, score: float | None) -> bool:
        """Return whether a new checkpoint would be kept."""
        self.scores[name] = score
        kept = name in self._kept_of(self.scores)
        del self.scores[name]
        return kept

    def surplus(self) -> list[str]:
        """Return what is not kept."""
        kept = self._kept_of(self.scores)
        return [name for name in self.scores if name not in kept]

    def _kept_of(self, names: Iterable[str]) -> set[str]:
        names = list(names)
        return {*self._best_of(names), *([max(names)] if self.save_last and names else [])}

    def _best_of(self, names: Iterable[str]) -> list[str]:
        """Return the best, best first; of two that are equally good the earlier one comes first."""
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
