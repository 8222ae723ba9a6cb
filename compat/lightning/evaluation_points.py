"""EvaluationPoints: writes values that evaluation steps log with `on_step`, once per batch, as in Lightning."""

from typing import Any

import torch
from torch import Tensor

from ...trainer.metrics.reduce import to_floats
from .loggers import FabricLogger


class EvaluationPoints:
    """Stores the values that evaluation steps log for a batch and writes them when the batch ends."""

    def __init__(self, trainer: Any, run: Any) -> None:
        self.trainer, self.run = trainer, run
        self.newest: dict[str, tuple[Any, bool, bool]] = {}
        """For each name: the batch's value, whether the progress bar shows it, and whether loggers receive it."""
        self.batches: dict[tuple[str, int], int] = {}
        """Number of completed batches for each loader and stage: the x-axis of the points."""

    def follow(self, word: str) -> None:
        """Write the stored values after each batch of a stage."""
        hooks, name = self.run.hooks, f"on_{word}_batch_end"
        # evaluate calls this for each validation run, but the run keeps its hooks
        if self.write not in hooks[name]:
            hooks[name] = (*hooks[name], self.write)

    def note(self, name: str, value: Any, shown: bool, logged: bool) -> None:
        """Store a logged number or one-element tensor. Ignore metric objects, because they have one value per epoch."""
        if isinstance(value, (int, float, Tensor)):
            self.newest[name] = value.detach() if isinstance(value, Tensor) else value, shown, logged

    def write(self, output: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Publish a batch's values. Values from a sanity check are shown only in the progress bar."""
        newest, self.newest, doing = self.newest, {}, self.run.loop.doing
        values = dict(zip(newest, to_floats([value for value, *_ in newest.values()]), strict=True))
        self.trainer.progress_bar_metrics.update({name: values[name] for name in newest if newest[name][1]})
        if doing == "sanity_check":
            return
        index = self.batches[doing, dataloader_idx] = self.batches.get((doing, dataloader_idx), -1) + 1
        logged = {name: values[name] for name in newest if newest[name][2]}
        if logged:
            # calls dict's method, so that callback_metrics does not show per-batch values
            dict.update(self.trainer.logged_metrics, {name: torch.tensor(value) for name, value in logged.items()})
            self.run.write(index, logged)
            for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
                if isinstance(logger, FabricLogger):  # FabricLogger saves each point
                    logger.save()
