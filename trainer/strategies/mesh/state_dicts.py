"""State dicts on a mesh. Every rank writes and reads its own shards of the tensors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....base.errors import CheckpointError
from ...checkpoints.shards import StoredTensor, load_stored
from ..state_dicts import ShardedStateDicts, StateParts
from . import dtensors
from .sizes import Size, fit_sizes

if TYPE_CHECKING:
    from ....tasks.task import Task


class MeshStateDicts(ShardedStateDicts):
    """State dicts whose DTensors contain this rank's shard of each tensor."""

    read_in_parts = ("state_dict", "optimizer_states")

    def __init__(self, asked: Mapping[str, Size]) -> None:
        """Create the state dicts.

        Args:
            asked: the sizes of the mesh axes as set in the config.
        """
        super().__init__()
        self.asked = asked

    def parts(self, world_size: int) -> StateParts:
        """Return how a run is divided among processes.

        Raises ConfigError if the product of the axes is not `world_size`.
        """
        sizes = fit_sizes(self.asked, world_size)
        cut = world_size // sizes.data
        return StateParts(sizes.data * sizes.shard, weights=cut, optimizer=cut, layers=sizes.tensor * sizes.pipeline)

    @torch.no_grad()
    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's shards of the full weights. torch loads other values, such as a module's extra state."""
        # keep_vars, to fill the DTensors themselves: without it, state_dict returns detached tensors
        targets, plain = task.state_dict(keep_vars=True), {}
        for name, value in weights.items():
            target = targets.get(name)
            if isinstance(target, DTensor) and value is not target:
                dtensors.fill(target, value)
            # they are already filled in place, but `strict` checks every name
            plain[name] = target if isinstance(target, DTensor) else load_stored(value)
        task.load_state_dict(plain, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's shards of a full optimizer state dict."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shards = {}
        for index, values in state["state"].items():
            if not isinstance(index, int) or index >= len(parameters):
                raise CheckpointError(
                    f"The checkpoint contains optimizer state for parameter {index}, which this run does not have."
                )
            shards[index] = {name: _with_layout(value, parameters[index]) for name, value in values.items()}
        optimizer.load_state_dict({**state, "state": shards})
        dtensors.disable_foreach([optimizer])


def _with_layout(value: Any, parameter: Tensor) -> Any:
    """Return a value from an optimizer's state, sharded in the same way as its parameter unless it is a scalar.

    Raises CheckpointError if the value and the parameter have different shapes.
    """
    is_tensor = isinstance(value, (Tensor, StoredTensor))
    if not isinstance(parameter, DTensor) or not is_tensor or not value.shape:
        return load_stored(value)
    if value.shape != parameter.shape:
        raise CheckpointError(
            f"The checkpoint contains optimizer state of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}, which a mesh cannot shard. Resume with strategy=single or ddp, or use an "
            f"optimizer whose state tensors have the shapes of the parameters."
        )
    return dtensors.local_shard(value, parameter)
