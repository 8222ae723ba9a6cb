"""Handles buffers, such as batch norm's running statistics, in a process that runs multiple replicas in turn."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...base.torch_private import Tensors, own_buffers

if TYPE_CHECKING:
    from ...tasks.task import Task

BufferSlot = tuple[Tensors, str, Tensor | None]
"""A buffer: the module's dict of buffers, the buffer's key in it, and the original tensor."""
Values = list[Tensor | None]


class ReplicaBuffers:
    """Starts every replica of a step with the same buffers, and keeps the first replica's buffers.

    At the end of a step, rank 0 broadcasts its buffers. All ranks then have the buffers of replica 0, regardless of
    the number of processes.

    A step may also assign a new tensor to a buffer (`self.average = 0.9 * self.average + ...`). In that case, the new
    values are copied to the original tensor.
    """

    def __init__(self, task: "Task | None") -> None:
        """Record the buffers of `task`. If `task` is None, all methods are no-ops."""
        self.task = task
        owners = [] if task is None else [own_buffers(module) for module in task.modules()]
        self.places: list[BufferSlot] = [(owner, name, buffer) for owner in owners for name, buffer in owner.items()]
        self.start: Values = []
        self.step = -1
        """The step that started from the buffers in `start`."""
        self.first: Values = []

    def open_replica(self, index: int) -> None:
        """Reset the buffers before the local replica at `index` runs."""
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
        """Restore the buffers of the first replica after the last local replica has run."""
        self._set(self.first or [owner[name] for owner, name, _ in self.places])
        self.first = []

    def rewind(self) -> None:
        """Restore the buffers to their values at the start of an unfinished step, so that the step can be repeated."""
        # If a collective fails, the step is repeated, and batch norm must not count it twice. A step that is already
        # counted keeps its buffers.
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
            # a buffer that was None or has changed shape does not fit the original tensor
            if original is None or value is None or original.shape != value.shape or original.dtype != value.dtype:
                owner[name] = None if value is None else value.clone()
                continue
            with torch.no_grad():
                owner[name] = original.copy_(value)
