"""Buffers, such as batch norm's running statistics, of replicas that a process runs in turn."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...base.torch_private import Tensors, own_buffers

if TYPE_CHECKING:
    from ...tasks.task import Task

BufferSlot = tuple[Tensors, str, Tensor | None]
"""A buffer: the module's dict of buffers, the key in it, and the original tensor."""
Values = list[Tensor | None]


class ReplicaBuffers:
    """Starts every replica of a step from the same buffers, and keeps those of the first replica.

    So the buffers follow replica 0 whatever the number of processes: at the end of a step rank 0 broadcasts them.

    A step may also assign a new tensor to a buffer (`self.average = 0.9 * self.average + ...`). Its values are copied
    to the original tensor.
    """

    def __init__(self, task: "Task | None") -> None:
        """`task`: None for a no-op."""
        self.task = task
        owners = [] if task is None else [own_buffers(module) for module in task.modules()]
        self.places: list[BufferSlot] = [(owner, name, buffer) for owner in owners for name, buffer in owner.items()]
        self.start: Values = []
        self.step = -1
        """The step that started from the buffers in `start`."""
        self.first: Values = []

    def open_replica(self, index: int) -> None:
        """Reset the buffers for the local replica at `index`."""
        if not self.places or self.task is None:
            return
        if index == 0 or self.step != self.task.global_step:
            self.start, self.step, self.first = self._copies(), self.task.global_step, []
            return
        # the first replica has just run
        if not self.first:
            self.first = self._copies()
        self._set(self.start)

    def close_step(self) -> None:
        """Restore the buffers of the first replica, after the last local one."""
        self._set(self.first or [owner[name] for owner, name, _ in self.places])
        self.first = []

    def rewind(self) -> None:
        """Restore the buffers from the start of an unfinished step, so that it can be repeated."""
        # Any collective of the step may break, after which the step is repeated: batch norm must not count it twice. A
        # step that is already counted keeps its buffers.
        if self.task is not None and self.step == self.task.global_step:
            self._set(self.start)
        self.start, self.step, self.first = [], -1, []

    def _copies(self) -> Values:
        present = [owner[name] for owner, name, _ in self.places]
        return [None if buffer is None else buffer.detach().clone() for buffer in present]

    def _set(self, values: Values) -> None:
        for (owner, name, original), value in zip(self.places, values, strict=True):
            if value is original:
                continue
            # a buffer that was None, or has another shape now, does not fit the original tensor
            if original is None or value is None or original.shape != value.shape or original.dtype != value.dtype:
                owner[name] = None if value is None else value.clone()
                continue
            with torch.no_grad():
                owner[name] = original.copy_(value)
