"""State dicts for a pipeline. Each rank writes and reads the tensors of its stage under their names in the task."""

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
    """State dicts with empty shards in place of other stages' tensors."""

    def __init__(self, mesh: MeshStateDicts, owners: StageOwners, stages: Ranks) -> None:
        """Create the state dicts.

        Args:
            mesh: state dicts of the mesh. This class uses their `writers`.
            stages: the ranks in the pipeline.
        """
        super().__init__(mesh.asked)
        self.writers, self.owners, self.stages = mesh.writers, owners, stages

    def model(self, task: "Task") -> dict[str, Any]:
        """Return the task's state dict."""
        # keep_vars, because `owners` finds a tensor by its id
        state = task.state_dict(keep_vars=True)
        owned = {name: value for name, value in state.items() if self.owners.place_of(value) == self.owners.place}
        return with_own_data(self._described(without_data(owned), state), owned)

    def load_model(self, task: "Task", weights: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of this rank's stage."""
        state = task.state_dict(keep_vars=True)
        # torch copies into every tensor. A foreign tensor is copied to itself, so it is not read from the files.
        foreign = {name: value for name, value in state.items() if self.owners.is_foreign(value)}
        kept = {name: foreign.get(name, value) for name, value in weights.items()}
        super().load_model(task, kept, strict)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of `optimizer`."""
        full = super().optimizer(optimizer)
        # Adagrad has a state for every parameter from the start, including parameters of other stages
        foreign, count = self._foreign(optimizer)
        owned = {index: values for index, values in full["state"].items() if index not in foreign}
        described = self._described({index: without_data(values) for index, values in owned.items()}, range(count))
        return {**full, "state": {key: with_own_data(data, owned.get(key, {})) for key, data in described.items()}}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the states of the parameters in this rank's stage."""
        # torch would allocate states for other stages' parameters
        foreign, _ = self._foreign(optimizer)
        owned = {index: values for index, values in state["state"].items() if index not in foreign}
        super().load_optimizer(optimizer, {**state, "state": owned})

    def _foreign(self, optimizer: Optimizer) -> tuple[set[int], int]:
        """Return the indices of an optimizer's parameters that belong to other stages, and the number of parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {index for index, weight in enumerate(parameters) if self.owners.is_foreign(weight)}, len(parameters)

    def _described(self, owned: Mapping[Any, Any], order: Iterable[Any]) -> dict[Any, Any]:
        """Return the tensor descriptions from all ranks in the pipeline, with their keys in the given order."""
        # descriptions only: no rank has memory for the tensors of all stages
        described = {key: value for each in self.stages.gather_objects(owned) for key, value in each.items()}
        return {key: described[key] for key in order if key in described}
