"""Checks on a task's modules before the first step, with clearer errors than torch would raise later."""

from collections.abc import Sequence

from torch import nn
from torch.nn.utils import parametrize

from ...base.errors import ConfigError, TaskError, correction, first_names


def require_parameters(task: nn.Module) -> None:
    """Raise TaskError if a task has no parameters. torch itself would only report an empty parameter list."""
    if next(task.parameters(), None) is None:
        raise TaskError(
            f"{type(task).__name__} has no parameters, so configure_optimizers has nothing to train. Assign modules to "
            f"the task as attributes, and lists or dicts of modules as nn.ModuleList or nn.ModuleDict."
            + correction("self.layers = [nn.Linear(8, 8)]", "self.layers = nn.ModuleList([nn.Linear(8, 8)])")
        )


def require_sendable(task: nn.Module) -> None:
    """Raise TaskError if a task that must be sent to other processes has parametrized modules.

    torch cannot pickle such modules.
    """
    for name, module in task.named_modules():
        # parametrize gives each module a new class, which pickle cannot find by name
        if parametrize.is_parametrized(module):
            raise TaskError(
                f"{type(task).__name__}.{name} is parametrized (by spectral_norm, for example), and torch cannot send "
                f"parametrized modules to other processes. Start the processes with torchrun, or train on one process."
            )


def require_dense_gradients(task: nn.Module, reasons: Sequence[str]) -> None:
    """Raise ConfigError for modules with sparse gradients if config settings (`reasons`) do not support them."""
    names = [
        name
        for name, module in task.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]
    # torch fails in the first backward pass or when clipping, and reports a kernel rather than a layer
    if names and reasons:
        raise ConfigError(
            f"{' and '.join(reasons)} cannot be used with the sparse gradients of {first_names(names)}. Create the "
            f"layer with sparse=False, or omit {' and '.join(reasons)}."
        )


def sparse_weights(task: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings whose gradients are sparse."""
    sparse = (getattr(layer, "weight", None) for layer in task.modules() if getattr(layer, "sparse", False) is True)
    return {weight for weight in sparse if isinstance(weight, nn.Parameter)}


def require_told_sparse(task: nn.Module) -> None:
    """Raise TaskError for a sparse gradient outside Embedding(sparse=True), because processes cannot reduce it."""
    declared = sparse_weights(task)
    for name, parameter in task.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse and parameter not in declared:
            raise TaskError(
                f"{type(task).__name__}.{name} has a sparse gradient but is not in an Embedding(sparse=True), so the "
                f"processes cannot know before step 1 that it is sparse. Use nn.Embedding(n, d, sparse=True) instead "
                f"of functional.embedding(..., sparse=True), or omit sparse=True."
            )


def require_dimensions(task: nn.Module, strategy: str) -> None:
    """Raise TaskError for 0-dim parameters, which a strategy cannot shard."""
    # torch's sharding error does not identify the parameter
    names = [name for name, parameter in task.named_parameters() if parameter.dim() == 0]
    if names:
        raise TaskError(
            f"strategy={strategy} shards parameters along their first dimension, but {first_names(names)} has no "
            f"dimensions. Use nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )
