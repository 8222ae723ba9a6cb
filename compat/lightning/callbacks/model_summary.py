"""ModelSummary and RichModelSummary, with Lightning's table."""

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ....callbacks import model_summary
from ..model_summary import ModelSummary as Summary
from ..model_summary import format_summary, shown_totals
from ..model_summary import summarize as summarize_module
from .callback import Callback

if TYPE_CHECKING:
    from ....tasks.task import Task
    from ....trainer.trainer import Trainer

log = logging.getLogger("legato")


class ModelSummary(model_summary.ModelSummary, Callback):
    """Logs a table of the module's layers when a fit begins."""

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)
        self._max_depth, self._summarize_kwargs = max_depth, summarize_kwargs

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Log the table, on rank 0."""
        if not self._max_depth:
            return
        found = self._summary(trainer, task)
        if trainer.is_global_zero:
            self.summarize(
                list(found.columns().items()),
                found.total_parameters,
                found.trainable_parameters,
                found.model_size,
                found.total_training_modes,
                total_flops=found.total_flops,
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
        """Log the table; override to show it elsewhere."""
        totals = shown_totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        log.info("\n%s", format_summary(dict(summary_data), totals))


class RichModelSummary(ModelSummary):
    """Prints the table by rich when a fit begins."""

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        if find_spec("rich") is None:
            raise ModuleNotFoundError("RichModelSummary needs the package rich: pip install rich.")
        super().__init__(max_depth, **summarize_kwargs)

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
        """Print the table; override to show it elsewhere."""
        from rich import get_console
        from rich.table import Table

        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for head, _ in summary_data:
            table.add_column(head, justify="left" if head in (" ", "Name", "Type", "Mode") else "right")
        for row in zip(*(column for _, column in summary_data), strict=True):
            table.add_row(*row)
        totals = shown_totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        get_console().print(table)
        get_console().print("\n".join(f"[bold]{name}[/]: {value}" for name, value in totals.items()))
