"""ModelSummary, with Lightning's table."""

import logging
from typing import TYPE_CHECKING, Any

from ....callbacks import model_summary
from ..model_summary import ModelSummary as Summary
from ..model_summary import format_summary, shown_totals
from ..model_summary import summarize as summarize_module
from .callback import Callback

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task

log = logging.getLogger("legato")


class ModelSummary(model_summary.ModelSummary, Callback):
    """Logs a table of the module's layers when fit starts."""

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)
        self._max_depth, self._summarize_kwargs = max_depth, summarize_kwargs

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Log the table on rank 0."""
        if not self._max_depth:
            return
        # on every rank, because counting the parameters of a sharded module requires all ranks
        summary = self._summary(trainer, task)
        if trainer.is_global_zero:
            self.summarize(
                list(summary.columns().items()),
                summary.total_parameters,
                summary.trainable_parameters,
                summary.model_size,
                summary.total_training_modes,
                total_flops=summary.total_flops,
                **self._summarize_kwargs,
            )

    def _summary(self, trainer: "Trainer", task: "Task") -> Summary:
        return summarize_module(task, max_depth=self._max_depth)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Log the table. Override this method to display the table elsewhere."""
        totals = shown_totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        log.info("\n%s", format_summary(dict(summary_data), totals))


class RichModelSummary(ModelSummary):
    """Logs the ModelSummary table, for programs that use Lightning's rich version."""
