"""State dicts of a task and its optimizers for checkpoints, in a format that is the same under all strategies."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..processes.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    from ...tasks.task import Task


class StateParts(NamedTuple):
    """How batches and state are divided among a run's processes."""

    batches: int
    """Number of processes, or groups of processes, that work on different batches."""
    weights: int | None = 1
    """Number of equal shards of the weights and the gradients; None if it depends on the task."""
    optimizer: int = 1
    """Number of equal shards of the optimizer's state."""
    layers: int = 1
    """Number of processes that the layers, and therefore a batch's activations, are divided among."""


class StateDicts:
    """Creates and loads state dicts. In this base class, every rank has the full state, and rank 0 writes it."""

    read_in_parts: tuple[str, ...] = ()
    """Checkpoint keys from which a rank reads only the parts of tensors that it needs."""

    def __init__(self) -> None:
        self.writers: Ranks = SINGLE
        """The ranks that write a checkpoint together; a single rank if rank 0 has the full state."""

    def parts(self, world_size: int) -> StateParts:
        """Return how a run will be divided among `world_size` processes, before any of them starts."""
        return StateParts(world_size)

    def model(self, task: "Task") -> dict[str, Tensor]:
        """Return the task's state dict, with the task's own parameter names. All ranks must call this.

        If the state is sharded, each rank returns its own shards, and empty shards in place of other ranks' tensors
        (see checkpoints.shards).
        """
        return task.state_dict()

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load a state dict returned by `model`, possibly under a different layout."""
        task.load_state_dict(dict(weights), strict=strict)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`, sharded like the result of `model`. All ranks must call this."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state dict returned by `optimizer`, possibly under a different layout."""
        optimizer.load_state_dict(state)

    def parameter_names(self, task: "Task", optimizer: Optimizer) -> list[list[str]] | None:
        """Return the names of an optimizer's parameters in each parameter group, or None if a name is unknown."""
        # by identity: an optimizer has ordered parameters, but no names
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
        return None if any(None in group for group in groups) else groups  # type: ignore[return-value]


class ShardedStateDicts(StateDicts):
    """Sharded state dicts: every rank stores and writes its own shards."""

    def __init__(self) -> None:
        super().__init__()
        self._default_group: dist.ProcessGroup | None = None
        """The default group when `writers` was created."""

    def open_writers(self, rank: int, size: int) -> None:
        """Create a process group for background saves, whose collectives must not be mixed with training collectives.

        All ranks must call this. Later calls to the trainer's methods reuse the group.
        """
        # always gloo, because NCCL cannot communicate tensors on the host
        if size > 1 and self._default_group is not dist.group.WORLD:
            self.writers = Ranks(rank, size, dist.new_group(backend="gloo"))
            self._default_group = dist.group.WORLD
