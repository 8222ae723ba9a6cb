"""Reduction of the replicas' gradients in one fixed binary tree, with the same bits on any number of processes."""

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
    """A subtree over the replicas [start, start + 2^level), of which those beyond the last replica do not exist."""

    start: int
    level: int


class CarryStack(Generic[Value]):
    """Subtrees that wait for their right sibling; push them in the order of the replicas."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        """`add`: returns the sum of two values, in the memory of the first."""
        self.add = add
        self.waiting: list[tuple[TreeNode, Value]] = []

    def push(self, node: TreeNode, value: Value) -> None:
        """Take the next subtree, and add up siblings as long as there are some."""
        while self.waiting:
            left, sum_so_far = self.waiting[-1]
            # siblings only: equal size, adjacent, and the left one at a multiple of the parent's size. So the shape of
            # the tree depends on the replicas' numbers alone, not on where a process's block of them begins.
            siblings = left.level == node.level and left.start + (1 << left.level) == node.start
            if not siblings or left.start % (2 << node.level):
                break
            self.waiting.pop()
            node, value = TreeNode(left.start, left.level + 1), self.add(sum_so_far, value)
        self.waiting.append((node, value))

    def total(self) -> Value:
        """Return the root, once every replica is in: nodes without a right sibling move up as they are."""
        _, value = self.waiting.pop()
        while self.waiting:
            value = self.add(self.waiting.pop()[1], value)
        return value


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add each gradient to its partner, where there are both."""
    both = [(ours, theirs) for ours, theirs in zip(left, right, strict=True) if ours is not None and theirs is not None]
    if both:
        add_to_each([ours for ours, _ in both], [theirs for _, theirs in both])
    return [theirs if ours is None else ours for ours, theirs in zip(left, right, strict=True)]


def partial_nodes(replicas: Iterable[int]) -> list[TreeNode]:
    """Return the largest subtrees that lie within a contiguous block of replicas."""
    stack = CarryStack[None](lambda left, right: None)
    for replica in replicas:
        stack.push(TreeNode(replica, 0), None)
    return [node for node, _ in stack.waiting]


def add_up(nodes_of: list[list[TreeNode]], values: Iterable[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum over all replicas of the values of each rank's partial nodes, rank by rank."""
    # by rank, which is the order of the replicas: CarryStack needs them so
    stack = CarryStack(add)
    for node, value in zip((node for nodes in nodes_of for node in nodes), values, strict=True):
        stack.push(node, value)
    return stack.total()


def add_up_shares(rows: Sequence[Tensor], nodes_of: list[list[TreeNode]], group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's share of the sum over all ranks' partial nodes; `rows`: the values of its own.

    A row has equally many numbers for each rank.
    """
    world, share = len(nodes_of), rows[0].numel() // len(nodes_of)
    outgoing = rows[0] if len(rows) == 1 else torch.stack([row.view(world, share) for row in rows], 1).flatten()
    counts = [len(nodes) * share for nodes in nodes_of]
    incoming = outgoing.new_empty(sum(counts))
    dist.all_to_all_single(incoming, outgoing, counts, [len(rows) * share] * world, group=group)
    total: Tensor = add_up(nodes_of, incoming.view(sum(map(len, nodes_of)), share), Tensor.add_)
    return total


class ReplicaStack:
    """The gradients of one process's replicas in a step, added up as far as the tree allows."""

    def __init__(self, owned: range, parameters: int) -> None:
        self.owned, self.parameters = owned, parameters
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.stack, self.next = CarryStack(add_gradients), self.owned.start

    def push(self, replica: int, gradients: Gradients) -> None:
        """Take the gradients of a replica; those before it that have not come had no batch."""
        for absent in range(self.next, replica):
            self.stack.push(TreeNode(absent, 0), [None] * self.parameters)
        self.stack.push(TreeNode(replica, 0), gradients)
        self.next = replica + 1

    def close(self) -> list[Gradients]:
        """Return the values of this process's partial nodes, and begin the next step."""
        if self.next < self.owned.stop:
            self.push(self.owned.stop - 1, [None] * self.parameters)
        nodes = [values for _, values in self.stack.waiting]
        self.reset()
        return nodes


# torch 2.13 has a new name for it, and warns of the old one
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters of one dtype and device whose gradients are sent together, and the buffers for that."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        process: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """They travel in `group`; None: the default one."""
        self.parameters, self.group = list(parameters), group
        self.layout = layout
        self.replicas = ReplicaStack(layout.owned(process), len(self.parameters))
        self.missing: set[int] = set()
        """Indices of the gradients that the backward under way has not brought yet."""
        # A process's replicas need not make whole subtrees (3 + 3 + 2 of 8): it hands over its maximal ones as they
        # are. Every rank knows everybody's from the layout, so their shapes are never sent.
        self.nodes_of = [partial_nodes(layout.owned(rank)) for rank in range(layout.processes)]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        # each partial node is a row of all gradients and, for each of them, how many processes have it
        self.length = sum(self.sizes) + len(self.sizes)
        # rounded up, since all_gather takes equal parts; the rows are as much longer
        self.share = -(-self.length // layout.processes)
        self.outgoing = self.incoming = self.row = self.all_present = torch.empty(0)
        self.own: list[Tensor | None] = []
        self.kept: list[Tensor | None] = []
        """Gradients that were there before the step: no optimizer has dropped them, so this step's are added."""
        self.work: dist.Work | None = None

    # --- within this process ----------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Set aside the gradients left from the step before."""
        self.kept = self._take_gradients()

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step, and restore those from before it."""
        self.replicas.reset()
        for parameter, gradient in zip(self.parameters, self.kept, strict=True):
            parameter.grad = gradient
        self.kept = []

    def take(self, replica: int) -> None:
        """Take the gradients of `replica` from the parameters."""
        self.replicas.push(replica, self._take_gradients())

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def finish_alone(self) -> None:
        """Write the sums where this process has all replicas."""
        self._give_gradients(add_up(self.nodes_of, self.replicas.close(), add_gradients))

    def _give_gradients(self, gradients: list[Tensor | None]) -> None:
        gradients, self.kept = add_gradients(self.kept, gradients), []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    # --- across processes -------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Send each process its share of this process's partial nodes."""
        nodes = self.replicas.close()
        self.own = nodes[0]
        self._make_room(len(nodes))
        world, share = self.layout.processes, self.share
        for index, gradients in enumerate(nodes):
            row = self.outgoing if len(nodes) == 1 else self.row
            torch.cat([*self._flat(gradients), self._presence(gradients)], out=row[: self.length])
            if len(nodes) > 1:
                self.outgoing.view(world, len(nodes), share)[:, index].copy_(row.view(world, share))
        # Each process adds up 1/world of the numbers, of all nodes, then all gather the sums: twice the gradients'
        # bytes, as in a ring's all-reduce, where an all-gather of nodes would cost world times that.
        counts = [len(own) * share for own in self.nodes_of]
        out = [len(nodes) * share] * world
        self.work = dist.all_to_all_single(self.incoming, self.outgoing, counts, out, group=self.group, async_op=True)

    def hand_out(self) -> None:
        """Add up every process's partial nodes for this process's share, and send the sum to all."""
        self._wait()
        total = add_up(self.nodes_of, self.incoming.view(-1, self.share), Tensor.add_)
        # what was sent has arrived, so its room is free
        whole = self.outgoing[: self.layout.processes * self.share]
        self.work = all_gather_single(whole, total, group=self.group, async_op=True)

    def write(self) -> None:
        """Give every parameter its sum, in the memory of this process's own gradient."""
        self._wait()
        *parts, presence = self.outgoing[: self.length].split([*self.sizes, len(self.sizes)])
        # read back from the device (a wait) only where this process lacks some gradient
        if any(gradient is None for gradient in self.own):
            used = presence.tolist()
            own = [
                torch.empty_like(parameter) if gradient is None and number else gradient
                for parameter, gradient, number in zip(self.parameters, self.own, used, strict=True)
            ]
        else:
            own = self.own
        for gradient, part in zip(own, parts, strict=True):
            if gradient is not None:
                gradient.copy_(part.view_as(gradient))
        self.own = []
        self._give_gradients(own)

    def refuse_late_gradients(self) -> None:
        """Raise TaskError where a parameter got more gradient after its own was sent."""
        if any(parameter.grad is not None for parameter in self.parameters):
            shapes = [tuple(parameter.shape) for parameter in self.parameters if parameter.grad is not None]
            raise TaskError(
                f"reproducible: bitwise: one backward gave parameters of shape {shapes[:4]} a gradient twice, once "
                f"after the first was sent. Reentrant checkpointing does so where it shares weights: call "
                f"torch.utils.checkpoint with use_reentrant=False."
            )

    def _flat(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        flat = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                gradient = torch.full_like(parameter, -0.0)  # the number that changes nothing it is added to
            elif gradient.is_sparse:
                raise TaskError(
                    "reproducible: bitwise adds up dense gradients; an Embedding(sparse=True) gives sparse ones."
                )
            flat.append(gradient.reshape(-1))
        return flat

    def _presence(self, gradients: Iterable[Tensor | None]) -> Tensor:
        present = [gradient is not None for gradient in gradients]
        return self.all_present if all(present) else self.all_present.new_tensor(present)

    def _make_room(self, nodes: int) -> None:
        """Allocate the send and receive buffers, once: fresh memory costs a page fault every 4 KiB."""
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
    """Share parameters out to buckets, of `elements` numbers at least, in the order in which backward reaches them."""
    open_ones: dict[tuple[type, torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    # Backward reaches the last layers first. The order must not be that of arrival, which differs from rank to rank.
    for parameter in reversed(list(parameters)):
        # by class, too: torch adds up several DTensors at once, but none beside a plain tensor
        kind = type(parameter), parameter.dtype, parameter.device
        bucket = open_ones.setdefault(kind, [])
        bucket.append(parameter)
        if sum(other.numel() for other in bucket) >= elements:
            full.append(open_ones.pop(kind))
    return [Bucket(bucket, layout, process, group) for bucket in [*full, *open_ones.values()]]


class ReplicaTree(Protocol):
    """What adds up the gradients of a step's replicas in one order."""

    def begin_replica(self, replica: int) -> None:
        """Begin with the backwards of a replica; those of the replica before it are done."""

    def expect_last(self) -> None:
        """Prepare for this process's last backward in the step."""

    def finish(self) -> None:
        """Set gradients to those of the whole step; every rank calls it."""

    def abandon(self) -> None:
        """Drop the gradients of a step that ends before its last backward."""

    def close(self) -> None:
        """Remove what was attached to parameters."""


BUCKET_ELEMENTS = 1 << 22
"""Numbers that travel together: enough to use the wire, few enough to add up one bucket while the next travels."""
TRAVELLING = 2
"""Buckets on their way before the oldest is waited for."""


class GradientTree:
    """Reduces the gradients of all replicas to the gradient of the step, with the same bits on every process."""

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
        """The replica whose backwards are under way; None between two steps."""
        self.is_last = False
        """Whether this process's last backward in the step is under way."""
        self.next_to_send = 0
        self.travelling: deque[Bucket] = deque()

    def send_early(self) -> None:
        """Register hooks that send each bucket as soon as backward has completed it."""
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
        """Take the gradients of the replica before it, or before the first one those left from the step before."""
        self._take()
        self.replica = replica

    def _take(self) -> None:
        for bucket in self.buckets[self.next_to_send :]:
            if self.replica is None:
                bucket.begin()
            else:
                bucket.take(self.replica)

    def expect_last(self) -> None:
        """Let buckets be sent as soon as the next backward, this process's last one in the step, completes them."""
        self.is_last = self.replica is not None
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def abandon(self) -> None:
        """Drop the gradients of a step that ends before the last backward of this process's share."""
        for bucket in self.buckets if self.replica is not None else ():
            bucket.abandon()
        self.replica, self.is_last = None, False

    def finish(self) -> None:
        """Set every parameter's gradient to that of the whole step; every process calls it."""
        self._take()
        self.replica, self.is_last = None, False
        if self.alone:
            for bucket in self.buckets:
                bucket.finish_alone()
            return
        # what was sent early must have been the whole gradient, else the rest of it is lost without a word
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
        """Hook: the gradient of `parameter` is complete; send the buckets that are complete now."""
        if not self.is_last or self.replica is None:
            return
        bucket.missing.discard(index)
        # Only in the order of the buckets, even if a later one is complete: collectives pair by their order, so every
        # rank must call them alike.
        while self.next_to_send < len(self.buckets) and not self.buckets[self.next_to_send].missing:
            self.buckets[self.next_to_send].take(self.replica)
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self.next_to_send]
        self.next_to_send += 1
        bucket.send()
        self.travelling.append(bucket)
        # Waiting for the oldest while newer ones travel overlaps the addition with the network. The number is fixed, as
        # hand_out is a collective, too.
        if len(self.travelling) > TRAVELLING:
            self.travelling.popleft().hand_out()


def average_in_tree(
    parameters: Sequence[nn.Parameter], layout: Layout, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Replace gradients by their means over ranks, each of which has one replica; every rank calls it."""
    for bucket in make_buckets(parameters, layout, rank, BUCKET_ELEMENTS, group):
        # not `begin`: it would set aside the very gradients that are averaged here
        bucket.kept = [None] * len(bucket.parameters)
        bucket.take(rank)
        bucket.send()
        bucket.hand_out()
        bucket.write()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        divide_each(gradients, float(layout.processes))
