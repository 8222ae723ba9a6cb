"""Sums of replicas' gradients in a fixed binary tree. The sums are bitwise identical for any number of processes."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...base.errors import TaskError
from ...base.torch_private import add_to_each, divide_each
from ..data.sampling import Layout

Value = TypeVar("Value")
Gradients = list[Tensor | None]


class TreeNode(NamedTuple):
    """A subtree over the replicas [start, start + 2^level), clipped at the last replica of the run."""

    start: int
    level: int


class CarryStack(Generic[Value]):
    """Stack of subtrees that are waiting for their right siblings. Push subtrees in replica order."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        """Create an empty stack.

        Args:
            add: function that returns the sum of two values. It may overwrite the first value.
        """
        self.add = add
        self.waiting: list[tuple[TreeNode, Value]] = []

    def push(self, node: TreeNode, value: Value) -> None:
        """Push the next subtree. If its left sibling is on the stack, add the two and push their parent instead."""
        while self.waiting:
            left, sum_so_far = self.waiting[-1]
            # Siblings are adjacent and of equal size; the left one starts at a multiple of the parent's size. So the
            # tree depends only on the indices of the replicas, not on the processes that run them.
            siblings = left.level == node.level and left.start + (1 << left.level) == node.start
            if not siblings or left.start % (2 << node.level):
                break
            self.waiting.pop()
            node, value = TreeNode(left.start, left.level + 1), self.add(sum_so_far, value)
        self.waiting.append((node, value))

    def total(self) -> Value:
        """Return the root's value once all replicas have been pushed. Nodes without a right sibling move up a level."""
        _, value = self.waiting.pop()
        while self.waiting:
            value = self.add(self.waiting.pop()[1], value)
        return value


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients element by element. None is treated as zero."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        add_to_each([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def partial_nodes(replicas: Iterable[int]) -> list[TreeNode]:
    """Return the maximal subtrees within a contiguous block of replicas."""
    stack = CarryStack[None](lambda left, right: None)
    for replica in replicas:
        stack.push(TreeNode(replica, 0), None)
    return [node for node, _ in stack.waiting]


def add_up(nodes_of: list[list[TreeNode]], values: Iterable[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum over all replicas. `values` contains the values of all partial nodes, ordered by rank."""
    # ranks are in the order of their replicas, as CarryStack requires
    stack = CarryStack(add)
    for node, value in zip((node for nodes in nodes_of for node in nodes), values, strict=True):
        stack.push(node, value)
    return stack.total()


def add_up_shares(rows: Sequence[Tensor], nodes_of: list[list[TreeNode]], group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's share of the sum over all ranks' partial nodes.

    Args:
        rows: the values of this rank's partial nodes; the length of each is a multiple of the number of ranks.
    """
    world, share = len(nodes_of), rows[0].numel() // len(nodes_of)
    outgoing = rows[0] if len(rows) == 1 else torch.stack([row.view(world, share) for row in rows], 1).flatten()
    counts = [len(nodes) * share for nodes in nodes_of]
    incoming = outgoing.new_empty(sum(counts))
    dist.all_to_all_single(incoming, outgoing, counts, [len(rows) * share] * world, group=group)
    total: Tensor = add_up(nodes_of, incoming.view(sum(map(len, nodes_of)), share), Tensor.add_)
    return total


class ReplicaStack:
    """Gradients of a process's replicas in a step, summed as far as the tree's order allows."""

    def __init__(self, owned: range, parameters: int) -> None:
        self.owned, self.parameters = owned, parameters
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.stack, self.next = CarryStack(add_gradients), self.owned.start

    def push(self, replica: int, gradients: Gradients) -> None:
        """Push a replica's gradients. Replicas without a batch are skipped."""
        for absent in range(self.next, replica):
            self.stack.push(TreeNode(absent, 0), [None] * self.parameters)
        self.stack.push(TreeNode(replica, 0), gradients)
        self.next = replica + 1

    def close(self) -> list[Gradients]:
        """Return the values of this process's partial nodes and start the next step."""
        # the last replicas may have had no batch
        if self.next < self.owned.stop:
            self.push(self.owned.stop - 1, [None] * self.parameters)
        nodes = [values for _, values in self.stack.waiting]
        self.reset()
        return nodes


# torch 2.13 renamed all_gather_into_tensor and deprecates the old name
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters with the same dtype and device, whose gradients are communicated together."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        process: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create a bucket. Its buffers are allocated when it is first sent.

        Args:
            group: process group for the collectives; None selects the default group.
        """
        self.parameters, self.group = list(parameters), group
        self.layout = layout
        self.replicas = ReplicaStack(layout.owned(process), len(self.parameters))
        self.missing: set[int] = set()
        """Indices of the gradients that the current backward pass has not computed yet."""
        # A process's replicas may not form a single subtree (3 + 3 + 2 of 8), so it sends its maximal subtrees. Every
        # rank derives them all from the layout, so shapes are never sent.
        self.nodes_of = [partial_nodes(layout.owned(rank)) for rank in range(layout.processes)]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        # one row per partial node: all gradients, and for each gradient the number of processes that have it
        self.length = sum(self.sizes) + len(self.sizes)
        # rounded up with padded rows, because all_gather needs equal shares
        self.share = -(-self.length // layout.processes)
        self.outgoing = self.incoming = self.row = self.all_present = torch.empty(0)
        self.local: list[Tensor | None] = []
        """Gradients of this process's first partial node; the sums are written to the same memory."""
        self.kept: list[Tensor | None] = []
        """Gradients from before the step, to which the step's gradients are added."""
        self.work: dist.Work | None = None

    # --- within this process ----------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Set aside the gradients from earlier steps."""
        self.kept = self._take_gradients()

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step and restore the gradients from before the step."""
        self.replicas.reset()
        for parameter, gradient in zip(self.parameters, self.kept, strict=True):
            parameter.grad = gradient
        self.kept = []

    def take(self, replica: int) -> None:
        """Move the gradients of `replica` from the parameters to the stack."""
        self.replicas.push(replica, self._take_gradients())

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def finish_alone(self) -> None:
        """Write the sums to the parameters' gradients if this process runs all replicas."""
        self._give_gradients(add_up(self.nodes_of, self.replicas.close(), add_gradients))

    def _give_gradients(self, gradients: list[Tensor | None]) -> None:
        gradients, self.kept = add_gradients(self.kept, gradients), []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    # --- across processes -------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Send each process its share of this process's partial nodes."""
        nodes = self.replicas.close()
        self.local = nodes[0]
        self._allocate(len(nodes))
        world, share = self.layout.processes, self.share
        for index, gradients in enumerate(nodes):
            row = self.outgoing if len(nodes) == 1 else self.row
            torch.cat([*self._flat(gradients), self._presence(gradients)], out=row[: self.length])
            if len(nodes) > 1:
                self.outgoing.view(world, len(nodes), share)[:, index].copy_(row.view(world, share))
        # Each process sums 1/world of the elements over all nodes, then all processes gather the sums. This costs twice
        # the gradients' bytes, as a ring all-reduce does; an all-gather of nodes would cost world times as much.
        counts = [len(partial) * share for partial in self.nodes_of]
        out = [len(nodes) * share] * world
        self.work = dist.all_to_all_single(self.incoming, self.outgoing, counts, out, group=self.group, async_op=True)

    def gather(self) -> None:
        """Sum this process's share of all partial nodes and gather the shares of all processes."""
        self._wait()
        total = add_up(self.nodes_of, self.incoming.view(-1, self.share), Tensor.add_)
        # the send buffer is free again
        shares = self.outgoing[: self.layout.processes * self.share]
        self.work = all_gather_single(shares, total, group=self.group, async_op=True)

    def write(self) -> None:
        """Write the sums to the parameters' gradients, reusing the memory of this process's gradients."""
        self._wait()
        *sums, presence = self.outgoing[: self.length].split([*self.sizes, len(self.sizes)])
        # only if this process lacks a gradient, because reading from the device synchronizes with it
        if any(gradient is None for gradient in self.local):
            used = presence.tolist()
            gradients = [
                torch.empty_like(parameter) if gradient is None and number else gradient
                for parameter, gradient, number in zip(self.parameters, self.local, used, strict=True)
            ]
        else:
            gradients = self.local
        for gradient, total in zip(gradients, sums, strict=True):
            if gradient is not None:
                gradient.copy_(total.view_as(gradient))
        self.local = []
        self._give_gradients(gradients)

    def refuse_late_gradients(self) -> None:
        """Raise TaskError if the backward pass accumulated into a gradient that had already been sent."""
        if any(parameter.grad is not None for parameter in self.parameters):
            shapes = [tuple(parameter.shape) for parameter in self.parameters if parameter.grad is not None]
            raise TaskError(
                f"reproducible=bitwise: the backward pass recomputed gradients for parameters of shape {shapes[:4]} "
                f"after the first ones had been sent. Reentrant checkpointing of shared weights causes this. "
                f"Call torch.utils.checkpoint with use_reentrant=False."
            )

    def _flat(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        flat = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                gradient = torch.full_like(parameter, -0.0)  # -0.0 leaves any sum unchanged, including -0.0
            elif gradient.is_sparse:
                raise TaskError("reproducible=bitwise does not support sparse gradients. Use Embedding(sparse=False).")
            flat.append(gradient.reshape(-1))
        return flat

    def _presence(self, gradients: Iterable[Tensor | None]) -> Tensor:
        present = [gradient is not None for gradient in gradients]
        # the usual case needs no copy from the host to the device
        return self.all_present if all(present) else self.all_present.new_tensor(present)

    def _allocate(self, nodes: int) -> None:
        """Allocate the send and receive buffers if there are none yet.

        They are reused in later steps, because new memory would cost a page fault per 4 KiB.
        """
        if self.outgoing.numel() == 0:
            world, share = self.layout.processes, self.share
            like = self.parameters[0].detach()
            self.outgoing = like.new_zeros(world * nodes * share)
            self.incoming = like.new_zeros(sum(map(len, self.nodes_of)) * share)
            self.row = like.new_zeros(world * share if nodes > 1 else 0)
            self.all_present = like.new_ones(len(self.sizes))

    def _wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None


def make_buckets(
    parameters: Iterable[nn.Parameter],
    layout: Layout,
    process: int,
    elements: int,
    group: dist.ProcessGroup | None = None,
) -> list[Bucket]:
    """Divide parameters into buckets of at least `elements` elements, in the order of the backward pass."""
    unfinished: dict[tuple[type, torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    # The backward pass reaches the last layers first. Its actual order may differ between ranks.
    for parameter in reversed(list(parameters)):
        # also by class: torch can add several DTensors in one call, but not mixed with plain tensors
        kind = type(parameter), parameter.dtype, parameter.device
        bucket = unfinished.setdefault(kind, [])
        bucket.append(parameter)
        if sum(member.numel() for member in bucket) >= elements:
            full.append(unfinished.pop(kind))
    return [Bucket(bucket, layout, process, group) for bucket in [*full, *unfinished.values()]]


class ReplicaTree(Protocol):
    """Sums the gradients of a step's replicas in a fixed order."""

    def begin_replica(self, replica: int) -> None:
        """Start a replica's batches after all of the previous replica's batches."""

    def expect_last(self) -> None:
        """Prepare for the last backward pass of the step on this process."""

    def finish(self) -> None:
        """Set each parameter's gradient to the gradient of the step. All ranks must call this."""

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step."""

    def close(self) -> None:
        """Remove the hooks from the parameters."""


BUCKET_ELEMENTS = 1 << 22
"""Elements per bucket: enough to use the bandwidth, but few enough to sum one bucket while the next is in flight."""
IN_FLIGHT = 2
"""Maximum number of buckets in flight. If there are more, the oldest bucket is completed first."""


class GradientTree:
    """Sums the gradients of all replicas in a fixed order. The sums are bitwise identical on every process."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        layout: Layout,
        process: int,
        bucket_elements: int = BUCKET_ELEMENTS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = make_buckets(trained, layout, process, bucket_elements, group)
        self.alone = layout.processes == 1
        self.hooks: list[RemovableHandle] = []
        self.replica: int | None = None
        """The replica whose batches are being processed; None between steps."""
        self.is_last = False
        """True during this process's last backward pass in the step."""
        self.next_to_send = 0
        self.in_flight: deque[Bucket] = deque()

    def send_early(self) -> None:
        """Register hooks that send each bucket as soon as the backward pass has computed its gradients."""
        for bucket in [] if self.alone else self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._arrived, bucket, index)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def begin_replica(self, replica: int) -> None:
        """Collect the previous replica's gradients. Before the first replica, set aside older gradients."""
        self._take()
        self.replica = replica

    def _take(self) -> None:
        for bucket in self.buckets[self.next_to_send :]:
            if self.replica is None:
                bucket.begin()
            else:
                bucket.take(self.replica)

    def expect_last(self) -> None:
        """Send buckets during the next backward pass, which is the last of the step on this process."""
        self.is_last = self.replica is not None
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step."""
        for bucket in self.buckets if self.replica is not None else ():
            bucket.abandon()
        self.replica, self.is_last = None, False

    def finish(self) -> None:
        """Set each parameter's gradient to the gradient of the step. All processes must call this."""
        self._take()
        self.replica, self.is_last = None, False
        if self.alone:
            for bucket in self.buckets:
                bucket.finish_alone()
            return
        # a gradient that was sent early must have been complete; otherwise the rest would be lost silently
        for bucket in self.buckets[: self.next_to_send]:
            bucket.refuse_late_gradients()
        while self.next_to_send < len(self.buckets):
            self._send_next()
        while self.in_flight:
            self.in_flight.popleft().gather()
        for bucket in self.buckets:
            bucket.write()
        self.next_to_send = 0

    def _arrived(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Send the buckets that are ready. This hook runs when the gradient of `parameter` is complete."""
        if not self.is_last or self.replica is None:
            return
        bucket.missing.discard(index)
        # in bucket order, even if a later bucket is complete first: all ranks must issue collectives in the
        # same order
        while self.next_to_send < len(self.buckets) and not self.buckets[self.next_to_send].missing:
            self.buckets[self.next_to_send].take(self.replica)
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self.next_to_send]
        self.next_to_send += 1
        bucket.send()
        self.in_flight.append(bucket)
        # Summing the oldest bucket while newer ones are in flight overlaps computation with communication. The number
        # is fixed, because gather() is a collective, too.
        if len(self.in_flight) > IN_FLIGHT:
            self.in_flight.popleft().gather()


def average_in_tree(
    parameters: Sequence[nn.Parameter], layout: Layout, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Replace gradients with their means over ranks that run one replica each. All ranks must call this."""
    for bucket in make_buckets(parameters, layout, rank, BUCKET_ELEMENTS, group):
        # not `begin`, which would set aside the gradients to be averaged
        bucket.kept = [None] * len(bucket.parameters)
        bucket.take(rank)
        bucket.send()
        bucket.gather()
        bucket.write()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        divide_each(gradients, float(layout.processes))
