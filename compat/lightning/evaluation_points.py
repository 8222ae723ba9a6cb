"""EvaluationPoints: what steps of an evaluation log with `on_step`, of which Lightning writes a point a batch."""

from typing import Any

import torch
from torch import Tensor

from ...trainer.metrics.reduce import to_floats
from .loggers import FabricLogger


class EvaluationPoints:
    """Keeps what the steps of one run's evaluations log for a batch, and writes it when the batch ends."""

    def __init__(self, trainer: Any, run: Any) -> None:
        self.trainer, self.run = trainer, run
        self.newest: dict[str, tuple[Any, bool, bool]] = {}
        """By name the value of the batch, whether the progress bar shows it, and whether loggers get it."""
        self.batches: dict[tuple[str, int], int] = {}
        """Batches done of each loader of each kind of evaluation: the place of a point."""

    def follow(self, word: str) -> None:
        """Write a point after each batch of the evaluation `word`."""
        hooks, name = self.run.hooks, f"on_{word}_batch_end"
        # evaluate comes once for each validation, and the run keeps its hooks
        if self.write not in hooks[name]:
            hooks[name] = (*hooks[name], self.write)

    def note(self, name: str, value: Any, shown: bool, logged: bool) -> None:
        """Keep a number, or a tensor with one, that a step logs; metric objects have a value per epoch only."""
        if isinstance(value, (int, float, Tensor)):
            self.newest[name] = value.detach() if isinstance(value, Tensor) else value, shown, logged

    def write(self, output: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Publish the values of a batch; a sanity check's reach the progress bar alone."""
        newest, self.newest, doing = self.newest, {}, self.run.loop.doing
        values = dict(zip(newest, to_floats([value for value, *_ in newest.values()]), strict=True))
        self.trainer.progress_bar_metrics.update({name: values[name] for name in newest if newest[name][1]})
        if doing == "sanity_check":
            return
        index = self.batches[doing, dataloader_idx] = self.batches.get((doing, dataloader_idx), -1) + 1
        logged = {name: values[name] for name in newest if newest[name][2]}
        if logged:
            # by the method of dict: values of a batch are not shown in callback_metrics
            dict.update(self.trainer.logged_metrics, {name: torch.tensor(value) for name, value in logged.items()})
            self.run.write(index, logged)
            for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
                if isinstance(logger, FabricLogger):  # whose points are saved one by one
                    logger.save()
