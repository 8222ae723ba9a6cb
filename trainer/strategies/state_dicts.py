"""State dicts of a task and its optimizers, as a checkpoint holds them: alike under every strategy and layout."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..processes.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    from ...tasks.task import Task


class StateParts(NamedTuple):
    """How the processes of a run share its batches and its state, as far as their number tells."""

    batches: int
    """Number of processes, or groups of them, that have batches of their own."""
    weights: int | None = 1
    """Number of equal parts of the weights and of the gradients; None if the task decides."""
    optimizer: int = 1
    """Number of equal parts of the optimizer's state."""
    layers: int = 1
    """Number of processes that a batch's layers, and with them its activations, are spread over."""


class StateDicts:
    """Reads and loads state dicts. Here every rank has all of the state, and rank 0 writes it."""

    read_in_parts: tuple[str, ...] = ()
    """The keys of a checkpoint under which a rank reads only what it needs of the stored tensors."""

    def __init__(self) -> None:
        self.writers: Ranks = SINGLE
        """The ranks that write a checkpoint together, where each has a part of the state; alone: rank 0 has it all."""

    def parts(self, world_size: int) -> StateParts:
        """Return how so many processes share a run, before any is started."""
        return StateParts(world_size)

    def model(self, task: "Task") -> dict[str, Tensor]:
        """Return the task's state dict under the task's own names; every rank calls it.

        Where ranks have parts of the state, each returns its own and empty shards of the others (checkpoints.shards).
        """
        return task.state_dict()

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load what `model` returned on any layout."""
        task.load_state_dict(dict(weights), strict=strict)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`, as `model` does for the task; every rank calls it."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what `optimizer` returned on any layout."""
        optimizer.load_state_dict(state)

    def parameter_names(self, task: "Task", optimizer: Optimizer) -> list[list[str]] | None:
        """Return the names of the parameters in an optimizer's state dict, group by group; None if they are unknown."""
        # by identity: an optimizer knows parameters, and their order, but no names
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        groups = [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
        return None if any(None in group for group in groups) else groups  # type: ignore[return-value]


class ShardedStateDicts(StateDicts):
    """State dicts of which every rank has, and writes, a part."""

    def __init__(self) -> None:
        super().__init__()
        self._default_group: dist.ProcessGroup | None = None
        """The default group that `writers` was made beside."""

    def open_writers(self, rank: int, size: int) -> None:
        """Make a process group for writing, as a save in the background must not mix with training's collectives.

        Every rank calls it. The group serves all stages of a trainer.
        """
        # gloo, whatever trains: what is written is on the host, and NCCL could not carry it
        if size > 1 and self._default_group is not dist.group.WORLD:
            self.writers = Ranks(rank, size, dist.new_group(backend="gloo"))
            self._default_group = dist.group.WORLD
