"""ModelSummary: prints a table of the task's modules."""

from typing import TYPE_CHECKING

from ..base.quantities import format_bytes
from .callback import Callback

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..base.contracts import Task, Trainer


class ModelSummary(Callback):
    """Prints a table of the task's modules when a fit begins, on rank 0.

    Args:
        max_depth: levels of modules to show; 0: totals only, -1: all.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Print the table."""
        if trainer.is_global_zero:
            trainer.print(summarize(task, self.max_depth), flush=True)


def summarize(task: "nn.Module", max_depth: int = 1) -> str:
    """Return a table of each module's name, type, parameters and trainable parameters, with totals.

    Shared parameters count in each module that has them, and once in the totals. Uninitialised (lazy) parameters count
    as 0 and are marked.
    """
    rows = [("name", "type", "parameters", "trainable")]
    for name, module in task.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            total, trainable, lazy = _count_parameters(module)
            mark = " + uninitialised" if lazy else ""
            rows.append((name, type(module).__name__, f"{total:,}{mark}", f"{trainable:,}"))
    total, trainable, lazy = _count_parameters(task)
    # an uninitialised parameter has no number of elements to ask for
    size = sum(tensor.numel() * tensor.element_size() for tensor in task.parameters() if not _is_lazy(tensor))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    line = "  ".join("-" * width for width in widths)
    lines = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {parameters:>{widths[2]}}  {trained:>{widths[3]}}"
        for name, kind, parameters, trained in rows
    ]
    table = [lines[0], line, *lines[1:], line] if len(rows) > 1 else []
    more = f", and {lazy} parameter tensors that are not initialised yet" if lazy else ""
    return "\n".join(
        [
            *table,
            f"{total:,} parameters ({trainable:,} trainable, {total - trainable:,} frozen), {format_bytes(size)}{more}",
        ]
    )


def _count_parameters(module: "nn.Module") -> tuple[int, int, int]:
    """Return (parameters, trainable parameters, uninitialised tensors) of a module."""
    tensors = list(module.parameters())
    known = [tensor for tensor in tensors if not _is_lazy(tensor)]
    trainable = sum(tensor.numel() for tensor in known if tensor.requires_grad)
    return sum(tensor.numel() for tensor in known), trainable, len(tensors) - len(known)


def _is_lazy(tensor: "Tensor") -> bool:
    from torch.nn.parameter import is_lazy

    return bool(is_lazy(tensor))
