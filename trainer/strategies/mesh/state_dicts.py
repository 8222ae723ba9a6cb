"""State dicts on a mesh: every rank writes and reads its parts of tensors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..state_dicts import ShardedStateDicts, StateParts
from . import dtensors
from .sizes import Size, fit_sizes

if TYPE_CHECKING:
    from ....tasks.task import Task


class MeshStateDicts(ShardedStateDicts):
    """State dicts whose tensors are DTensors, with this rank's part of each."""

    read_in_parts = ("state_dict", "optimizer_states")

    def __init__(self, asked: Mapping[str, Size]) -> None:
        """`asked`: the sizes of the mesh's axes, as the config has them."""
        super().__init__()
        self.asked = asked

    def parts(self, world_size: int) -> StateParts:
        """Return the sizes of the axes; raises ConfigError where they do not multiply out."""
        sizes = fit_sizes(self.asked, world_size)
        cut = world_size // sizes.data
        return StateParts(sizes.replicating, weights=cut, optimizer=cut, layers=sizes.tensor * sizes.pipeline)

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's parts of whole weights."""
        dtensors.load_sharded_weights(task, weights, strict)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's parts of an optimizer's state."""
        dtensors.load_optimizer(optimizer, state)
        dtensors.step_one_by_one([optimizer])
