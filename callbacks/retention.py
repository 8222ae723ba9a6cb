"""Retention: which checkpoints to keep and which to delete."""

import string
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, did_you_mean
from .checkpoint_callback import CheckpointCallback

if TYPE_CHECKING:
    import torch

NEW = ""
"""Stands for a checkpoint that has no name yet; no checkpoint has this one."""


def is_name(name: object) -> bool:
    """Return whether this may be the name of a checkpoint: as a path it leads to one folder's own entry."""
    return isinstance(name, str) and name.isprintable() and name[:1] not in ("", ".") and "/" not in name


def checkpoint_name(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with values in place of its fields, which are names of metrics, `epoch` or `step`.

    Raises ConfigError for a field without a value, and for a result that is no plain name.
    """
    try:
        found = Template().vformat(template, (), values)
    except (KeyError, ValueError) as error:
        name = str(error.args[0])
        raise ConfigError(
            f"Checkpoint: filename={template!r} cannot be filled in: {name}.{did_you_mean(name, values)} There are "
            f"{', '.join(sorted(values))}."
        ) from None
    if not is_name(found):
        raise ConfigError(
            f"Checkpoint: filename={template!r} makes {found!r}, which is no plain name; it becomes a folder in "
            f"dirpath, so it must have no '/' and not begin with a dot."
        )
    return found


class Template(string.Formatter):
    """Formats fields whose names may have any characters but braces, colons and exclamation marks."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the value of a field; dots and brackets belong to its name."""
        return kwargs[field_name], field_name


class Retention(CheckpointCallback):
    """Base of Checkpoint: tracks the checkpoints that a run wrote, by name, with their monitored values.

    Keeps the `save_top_k` best (-1: all; without a `monitor` the newest are best) and, with `save_last`, the newest.
    """

    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool
    dirpath: Path | None
    scores: dict[str, float | None]
    """Monitored values by name, oldest checkpoint first; None if there was no valid value."""

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint, or ""."""
        return self.path(next(reversed(self.scores), None))

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

    def keeps(self, score: float | None) -> bool:
        """Return whether a new checkpoint would be kept."""
        return NEW in self._kept_of({**self.scores, NEW: score})

    def free_name(self, name: str, score: float | None) -> str:
        """Return `name`, with a number if a checkpoint of that name is kept beside the new one."""
        kept = self._kept_of({**self.scores, NEW: score})
        versions = chain([name], (f"{name}-v{number}" for number in count(1)))
        return next(version for version in versions if version not in kept)

    def surplus(self) -> list[str]:
        """Return the names of checkpoints to delete."""
        kept = self._kept_of(self.scores)
        return [name for name in self.scores if name not in kept]

    def _kept_of(self, scores: Mapping[str, float | None]) -> set[str]:
        return {*self._best_of(scores), *([list(scores)[-1]] if self.save_last and scores else [])}

    def _best_of(self, scores: Mapping[str, float | None]) -> list[str]:
        """Return the best names, best first; ties go to the earlier one."""
        if self.monitor is None:
            ranked = list(reversed(list(scores)))
        else:
            sign = 1 if self.mode == "min" else -1
            scored = {name: sign * score for name, score in scores.items() if score is not None}
            ranked = sorted(scored, key=lambda name: scored[name])
        if self.save_top_k == -1:
            return ranked + [name for name in scores if name not in ranked]
        return ranked[: self.save_top_k]
