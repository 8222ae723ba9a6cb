"""ModelSummary: prints a table of the task's modules."""

from typing import TYPE_CHECKING

from ..base.quantities import format_bytes
from .callback import Callback

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..base.contracts import Task, Trainer


class ModelSummary(Callback):
    """Prints a table of the task's modules on rank 0 when `fit` begins.

    Args:
        max_depth: Number of levels of the module tree to show. 0: only the totals; -1: all levels.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Print the table."""
        if trainer.is_global_zero:
            trainer.print(summarize(task, self.max_depth), flush=True)


def summarize(task: "nn.Module", max_depth: int = 1) -> str:
    """Return a table of the modules with their names, types and parameter counts, followed by totals.

    A shared parameter is counted once in each module that contains it and once in the totals. An uninitialized (lazy)
    parameter is marked and counted as 0.
    """
    rows = [("name", "type", "parameters", "trainable")]
    for name, module in task.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            total, trainable, lazy = _count_parameters(module)
            mark = " + uninitialized" if lazy else ""
            rows.append((name, type(module).__name__, f"{total:,}{mark}", f"{trainable:,}"))
    total, trainable, lazy = _count_parameters(task)
    # an uninitialized parameter has no shape yet
    size = sum(tensor.numel() * tensor.element_size() for tensor in task.parameters() if not _is_lazy(tensor))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    line = "  ".join("-" * width for width in widths)
    lines = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {parameters:>{widths[2]}}  {trained:>{widths[3]}}"
        for name, kind, parameters, trained in rows
    ]
    table = [lines[0], line, *lines[1:], line] if len(rows) > 1 else []
    more = f", and {lazy} uninitialized parameter tensors" if lazy else ""
    return "\n".join(
        [
            *table,
            f"{total:,} parameters ({trainable:,} trainable, {total - trainable:,} frozen), {format_bytes(size)}{more}",
        ]
    )


def _count_parameters(module: "nn.Module") -> tuple[int, int, int]:
    """Return the counts (parameters, trainable parameters, uninitialized tensors) for a module."""
    tensors = list(module.parameters())
    initialized = [tensor for tensor in tensors if not _is_lazy(tensor)]
    trainable = sum(tensor.numel() for tensor in initialized if tensor.requires_grad)
    return sum(tensor.numel() for tensor in initialized), trainable, len(tensors) - len(initialized)


def _is_lazy(tensor: "Tensor") -> bool:
    from torch.nn.parameter import is_lazy

    return bool(is_lazy(tensor))
