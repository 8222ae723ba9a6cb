"""Buffers such as batch norm's running statistics, when one process runs several replicas in turn."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...base.torch_private import Tensors, own_buffers

if TYPE_CHECKING:
    from ...tasks.task import Task

BufferSlot = tuple[Tensors, str, Tensor | None]
"""Place of a buffer: the dict of a module's buffers, its name there, and the tensor that was there at first."""
Values = list[Tensor | None]


class ReplicaBuffers:
    """Lets every replica of a step begin with the same buffers, and keeps those of the first one.

    So the buffers follow replica 0 whatever the number of processes: with one process for each replica they do so
    because rank 0 broadcasts its buffers at the end of a step.

    A step may also assign another tensor to a buffer (`self.average = 0.9 * self.average + ...`). Its values are kept
    like any other's, in the tensor that the task began with.
    """

    def __init__(self, task: "Task | None") -> None:
        """`task`: None for a no-op."""
        self.task = task
        owners = [] if task is None else [own_buffers(module) for module in task.modules()]
        self.places: list[BufferSlot] = [(owner, name, buffer) for owner in owners for name, buffer in owner.items()]
        self.start: Values = []
        self.step = -1
        """The step that began with the buffers in `start`."""
        self.first: Values = []

    def open_replica(self, index: int) -> None:
        """Reset the buffers for the replica at `index` among the local ones of this step."""
        if not self.places or self.task is None:
            return
        if index == 0 or self.step != self.task.global_step:
            self.start, self.step, self.first = self._copies(), self.task.global_step, []
            return
        if not self.first:
            self.first = self._copies()
        self._set(self.start)

    def close_step(self) -> None:
        """Keep the buffers of the first replica, after the last local one has run."""
        self._set(self.first or [owner[name] for owner, name, _ in self.places])
        self.first = []

    def rewind(self) -> None:
        """Restore the buffers that an unfinished step began with, so that it can be repeated."""
        # A step that has been counted keeps its buffers. Until then every collective of the step may break and have it
        # done again, in which batch norm would count it twice.
        if self.task is not None and self.step == self.task.global_step:
            self._set(self.start)
        self.start, self.step, self.first = [], -1, []

    def _copies(self) -> Values:
        present = [owner[name] for owner, name, _ in self.places]
        return [None if buffer is None else buffer.detach().clone() for buffer in present]

    def _set(self, values: Values) -> None:
        for (owner, name, home), value in zip(self.places, values, strict=True):
            if value is home:
                continue
            # a buffer that was None, or has grown, has no home that could take its values
            if home is None or value is None or home.shape != value.shape or home.dtype != value.dtype:
                owner[name] = None if value is None else value.clone()
                continue
            with torch.no_grad():
                owner[name] = home.copy_(value)
