"""Reducers: how the gradients of a step's replicas become the gradient of the step, where DDP does not reduce them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...base.torch_private import divide_each, local_part
from ..data.sampling import Layout
from ..optimization.finite import are_finite
from .averaging import FlatAverage, TreeAverage
from .bitwise.tree import GradientTree


class Reducer:
    """The base class, and the reducer of a single process: backward adds gradients up in `grad`, so nothing is left.

    It is made for the parameters that are trained at that time; when others are, the strategy makes another one.
    """

    scale = 1.0
    """Sum of a step's loss weights in one process that makes the result a mean over samples."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.parameters = list(parameters)
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.has_frozen = not all(self.trained)

    def is_outdated(self) -> bool:
        """Return whether other parameters are trained by now."""
        return [parameter.requires_grad for parameter in self.parameters] != self.trained

    def drop_early_gradients(self) -> None:
        """Drop gradients of parameters that were frozen when the step began: they are trained from the next one on."""
        for parameter, trained in zip(self.parameters, self.trained, strict=True):
            if not trained:
                parameter.grad = None

    def begin_replica(self, replica: int) -> None:
        """Begin with the backwards of a replica."""

    def expect_last(self) -> None:
        """Prepare for this process's last backward in the step."""

    def set_sync(self, last: bool) -> None:
        """Choose whether the next backward sends gradients to other ranks: where it is the `last` one of a step."""

    def complete(self) -> None:
        """Complete the gradients after this process's last backward in the step."""

    def finish(self) -> bool:
        """Add up the gradients of the step's replicas, after the last batch; every rank calls it.

        Returns whether buffers must be aligned now, too.
        """
        return False

    def divide(self, divisor: Tensor) -> None:
        """Divide the gradients of a step, which have met, by a number that is the same on every rank."""
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradient = local_part(parameter.grad).detach()
                kinds.setdefault((gradient.device, gradient.dtype, gradient.layout), []).append(gradient)
        for (device, dtype, _), gradients in kinds.items():
            # in their own type torch divides all at once; half precision would round the divisor
            divide_each(gradients, divisor.to(device).to(dtype if dtype.itemsize >= 4 else divisor.dtype))

    def abandon(self) -> None:
        """Drop the gradients of a step that ends before its last backward."""

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over ranks under manual optimization, just before their use. Twice does no harm."""

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the step's gradient is finite, the same on every rank: here all ranks have the whole of it."""
        return are_finite(parameter.grad for parameter in parameters if parameter.grad is not None)

    def release(self) -> None:
        """Drop what uses the process group, perhaps in the middle of a step, which then counts as not begun."""

    def move(self, layout: Layout, rank: int) -> None:
        """Continue on another layout, in a new process group."""

    def close(self) -> None:
        """Remove what was attached to the parameters."""


class TreeReducer(Reducer):
    """Adds gradients up in one fixed binary tree over replicas, so that the number of processes changes no bit."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        layout: Layout,
        rank: int,
        send_early: bool,
        group: ProcessGroup | None = None,
    ) -> None:
        """`send_early`: send gradients while backward goes on, as no hook looks at those of a single replica.

        `group`: where they travel; None: the default process group.
        """
        super().__init__(parameters)
        self.group = group
        self.sends_early = send_early
        self.replica: int | None = None
        """The replica whose backwards are under way; None between two steps."""
        self.tree: GradientTree
        self.move(layout, rank)

    def move(self, layout: Layout, rank: int) -> None:
        """Make the tree of this layout."""
        self.tree = GradientTree(self.parameters, layout, rank, group=self.group)
        if self.sends_early:
            self.tree.send_early()

    def release(self) -> None:
        """Drop the tree, whose buckets may be on their way."""
        self.close()
        # gloo closes its sockets only when the last reference to the group goes, and buckets hold the group and its
        # works
        self.tree, self.replica = GradientTree((), Layout(1, 1), 0), None

    def begin_replica(self, replica: int) -> None:
        """Take the gradients of the replica before it."""
        self._take()
        self.replica = replica

    def expect_last(self) -> None:
        """Let buckets be sent as soon as the next backward has completed them."""
        if self.replica is not None:
            self.tree.expect_last(self.replica)

    def finish(self) -> bool:
        """Add up the gradients of all ranks."""
        self._take()
        self.tree.finish()
        self.replica = None
        return True

    def _take(self) -> None:
        if self.replica is None:
            self.tree.begin()
        else:
            self.tree.take(self.replica)

    def abandon(self) -> None:
        """Drop the gradients of the replicas so far."""
        if self.replica is not None:
            self.tree.abandon()
        self.replica = None

    def close(self) -> None:
        """Remove the hooks by which gradients are sent early."""
        self.tree.close()


class AveragingReducer(Reducer):
    """Averages gradients just before an optimizer uses them, as manual optimization requires."""

    def __init__(self, parameters: Iterable[nn.Parameter], averaging: FlatAverage | TreeAverage) -> None:
        super().__init__(parameters)
        self.averaging = averaging

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over ranks; a rank without one counts as zero."""
        self.averaging.average(parameters)
