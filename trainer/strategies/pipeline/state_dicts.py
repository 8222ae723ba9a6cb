"""State dicts of a pipeline: each rank writes and reads its parts of its own stages, under the task's own names."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...checkpoints.shards import with_own_data, without_data
from ..mesh import dtensors
from ..mesh.sizes import Size
from ..mesh.state_dicts import MeshStateDicts
from .stages import StageOwners

if TYPE_CHECKING:
    from ....tasks.task import Task


class PipelineStateDicts(MeshStateDicts):
    """State dicts with empty shards for the tensors of other stages. Without a pipeline, those of a mesh."""

    def __init__(self, asked: Mapping[str, Size]) -> None:
        super().__init__(asked)
        self.owners: StageOwners | None = None
        self.line: dist.ProcessGroup | None = None

    def open_stages(self, owners: StageOwners | None, line: dist.ProcessGroup | None) -> None:
        """Use the stages of these owners from now on, on the processes of `line`; None: the task is whole again."""
        self.owners, self.line = owners, line

    def model(self, task: "Task") -> dict[str, Any]:
        """Return the task's state dict."""
        if self.owners is None:
            return super().model(task)
        state = task.state_dict(keep_vars=True)
        own = {name: value for name, value in state.items() if self.owners.place_of(value) == self.owners.own}
        return with_own_data(self._known(self.owners, without_data(own), state), own)

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of this rank's stages."""
        if self.owners is None:
            super().load_model(task, weights, strict)
            return
        state = task.state_dict(keep_vars=True)
        others = {name: weights[name] for name in state.keys() & weights.keys() if not isinstance(state[name], Tensor)}
        with torch.no_grad():
            for name in state.keys() & weights.keys() - others.keys():
                if not self.owners.is_foreign(state[name]):
                    dtensors.fill(state[name], weights[name])
        if others:  # a module's extra state
            task.load_state_dict(others, strict=False)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`."""
        found = super().optimizer(optimizer)
        if self.owners is None:
            return found
        own = found["state"]
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._known(self.owners, {index: without_data(values) for index, values in own.items()}, range(count))
        found["state"] = {index: with_own_data(values, own.get(index, {})) for index, values in known.items()}
        return found

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what belongs to the parameters of this rank's stages."""
        if self.owners is None:
            super().load_optimizer(optimizer, state)
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # torch would take a state for a parameter of another stage, and allocate it
        foreign = {index for index, parameter in enumerate(parameters) if self.owners.is_foreign(parameter)}
        own = {index: values for index, values in state["state"].items() if index not in foreign}
        super().load_optimizer(optimizer, {**state, "state": own})

    def _known(self, owners: StageOwners, mine: Mapping[Any, Any], order: Iterable[Any]) -> dict[Any, Any]:
        """Return what all ranks of the pipeline describe between them, in this order."""
        # descriptions only: no rank has memory for the tensors of all stages
        every: list[Any] = [None] * (owners.last + 1)
        dist.all_gather_object(every, mine, group=self.line)
        merged = {key: value for each in every for key, value in each.items()}
        return {key: merged[key] for key in order if key in merged}
