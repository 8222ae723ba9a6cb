"""State dicts of a pipeline: each rank writes and reads its parts of its own stages, under the task's own names."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ...checkpoints.shards import with_own_data, without_data
from ...processes.ranks import Ranks
from ..mesh.state_dicts import MeshStateDicts
from .stages import StageOwners

if TYPE_CHECKING:
    from ....tasks.task import Task


class PipelineStateDicts(MeshStateDicts):
    """State dicts with empty shards for the tensors of other stages."""

    def __init__(self, mesh: MeshStateDicts, owners: StageOwners, stages: Ranks) -> None:
        """`mesh`: those of the mesh, with whose ranks they are written. `stages`: the ranks of the pipeline."""
        super().__init__(mesh.asked)
        self.writers, self.owners, self.stages = mesh.writers, owners, stages

    def model(self, task: "Task") -> dict[str, Any]:
        """Return the task's state dict."""
        state = task.state_dict(keep_vars=True)
        own = {name: value for name, value in state.items() if self.owners.place_of(value) == self.owners.own}
        return with_own_data(self._described(without_data(own), state), own)

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of this rank's stage."""
        state = task.state_dict(keep_vars=True)
        # torch copies into every tensor; one that is copied to itself stays as it is, and is not read from the files
        foreign = {name: value for name, value in state.items() if self.owners.is_foreign(value)}
        kept = {name: foreign.get(name, value) for name, value in weights.items()}
        super().load_model(task, kept, strict)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`."""
        found = super().optimizer(optimizer)
        # Adagrad has a state for every parameter from the start, of other stages' too
        foreign, count = self._foreign(optimizer)
        own = {index: values for index, values in found["state"].items() if index not in foreign}
        described = self._described({index: without_data(values) for index, values in own.items()}, range(count))
        return {**found, "state": {index: with_own_data(one, own.get(index, {})) for index, one in described.items()}}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what belongs to the parameters of this rank's stage."""
        # torch would take a state for a parameter of another stage, and allocate it
        foreign, _ = self._foreign(optimizer)
        own = {index: values for index, values in state["state"].items() if index not in foreign}
        super().load_optimizer(optimizer, {**state, "state": own})

    def _foreign(self, optimizer: Optimizer) -> tuple[set[int], int]:
        """Return the places of an optimizer's parameters that other stages have, and the count of all."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {index for index, one in enumerate(parameters) if self.owners.is_foreign(one)}, len(parameters)

    def _described(self, own: Mapping[Any, Any], order: Iterable[Any]) -> dict[Any, Any]:
        """Return what all ranks of the pipeline describe between them, in this order."""
        # descriptions only: no rank has memory for the tensors of all stages
        described = {key: value for each in self.stages.gather_objects(own) for key, value in each.items()}
        return {key: described[key] for key in order if key in described}
