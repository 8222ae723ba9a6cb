"""The gradient of a step from those of its replicas, in the one order that nodes.py fixes: on any number of processes.

Gradients go through the tree in buckets. In the last backward of a process's share of a step a bucket is sent as soon
as its last gradient is there, so that it travels while backward goes on; all processes send them in the same order.
"""

from collections import deque
from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...data.sampling import Layout
from .buckets import Bucket, make_buckets

BUCKET_ELEMENTS = 1 << 22
"""Numbers that travel together: enough to use the wire, few enough to add up one bucket while the next travels."""
TRAVELLING = 2
"""Buckets on their way before the oldest is waited for."""


class GradientTree:
    """Turns the gradients of this process's replicas into the gradient of the step, on every process the same bits."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        layout: Layout,
        process: int,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = make_buckets(trained, layout, process, bucket_elements)
        self.alone = layout.processes == 1
        self.hooks: list[RemovableHandle] = []
        self.replica: int | None = None
        """The replica whose last backward is under way."""
        self.next_to_send = 0
        self.travelling: deque[Bucket] = deque()

    def send_early(self) -> None:
        """From now on send each bucket while the backward that completes it goes on."""
        for bucket in [] if self.alone else self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._arrived, bucket, index)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def expect_last(self, replica: int) -> None:
        """The next backward is this process's last one in the step, and brings the rest of `replica`'s gradients."""
        self.replica = replica
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def begin(self) -> None:
        """Begin a step, before its first backward."""
        for bucket in self.buckets:
            bucket.begin()

    def take(self, replica: int) -> None:
        """Take the gradients of `replica` from the parameters; replicas before it that had no batch have none."""
        for bucket in self.buckets[self.next_to_send :]:
            bucket.take(replica)

    def abandon(self) -> None:
        """Drop the gradients of a step that ends before the last backward of this process's share."""
        for bucket in self.buckets:
            bucket.abandon()

    def finish(self) -> None:
        """Give every parameter the gradient of the whole step; every process calls it."""
        self.replica = None
        if self.alone:
            for bucket in self.buckets:
                bucket.finish_alone()
            return
        for bucket in self.buckets[: self.next_to_send]:
            bucket.refuse_late_gradients()
        while self.next_to_send < len(self.buckets):
            self._send_next()
        while self.travelling:
            self.travelling.popleft().hand_out()
        for bucket in self.buckets:
            bucket.write()
        self.next_to_send = 0

    def _arrived(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Backward has completed the gradient of `parameter`: send the buckets that lack nothing now."""
        if self.replica is None:
            return
        bucket.missing.discard(index)
        while self.next_to_send < len(self.buckets) and not self.buckets[self.next_to_send].missing:
            self.buckets[self.next_to_send].take(self.replica)
            self._send_next()

    def _send_next(self) -> None:
        # The order of these calls is the same in all processes, whenever they come to them.
        bucket = self.buckets[self.next_to_send]
        self.next_to_send += 1
        bucket.send()
        self.travelling.append(bucket)
        if len(self.travelling) > TRAVELLING:
            self.travelling.popleft().hand_out()
