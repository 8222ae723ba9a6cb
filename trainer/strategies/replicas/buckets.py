"""Buckets: gradients that travel together while the tree over the replicas is finished across processes.

    backward     the bucket's gradients are complete: this process adds up what lies within its own replicas
    send         every process gets its share of the numbers of all partial nodes (all-to-all)
    hand_out     ... finishes the tree for its share, and gives the sums to all (all-gather)
    write        ... and puts the sums of all shares into its parameters

Where every process owns one whole subtree that moves 2 V (W - 1) / W numbers, as a ring does (Thakur, Rabenseifner,
Gropp 2005, "Optimization of collective communication operations in MPICH").
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...data.sampling import Layout
from ...errors import TaskError
from .nodes import GradientStack, Node, ShareStack, partial_nodes

# torch 2.13 has a new name for it, and warns of the old one
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters of one type and device, and what their gradients need on their way."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, process: int) -> None:
        self.parameters = list(parameters)
        self.layout = layout
        self.owned = layout.owned(process)
        self.stack = GradientStack()
        self.next_replica = self.owned.start
        self.missing: set[int] = set()
        """Indices of the gradients that the backward under way has not brought yet."""
        self.nodes_of = [partial_nodes(layout.owned(rank)) for rank in range(layout.processes)]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        # each partial node is a row of all gradients and, for each of them, how many processes have it
        self.length = sum(self.sizes) + len(self.sizes)
        self.share = -(-self.length // layout.processes)
        self.outgoing = self.incoming = self.row = self.all_present = torch.empty(0)
        self.own: list[Tensor | None] = []
        self.kept: list[Tensor | None] = []
        """Gradients that were there before the step: no optimizer has dropped them, so this step's are added."""
        self.work: dist.Work | None = None

    # --- within this process ----------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Put aside what is left from the step before."""
        self.kept = self._take_gradients()

    def abandon(self) -> None:
        """Drop the gradients of a step that is left, and leave what was there before it."""
        self.stack.waiting, self.next_replica = [], self.owned.start
        for parameter, gradient in zip(self.parameters, self.kept, strict=True):
            parameter.grad = gradient
        self.kept = []

    def take(self, replica: int) -> None:
        """Take the gradients of `replica` from the parameters; replicas before it had no batch."""
        for absent in range(self.next_replica, replica):
            self.stack.push(Node(absent, 0), [None] * len(self.parameters))
        self.stack.push(Node(replica, 0), self._take_gradients())
        self.next_replica = replica + 1

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def close(self) -> list[list[Tensor | None]]:
        """Count the replicas that come no more as absent, and return the partial nodes of this process."""
        for absent in range(self.next_replica, self.owned.stop):
            self.stack.push(Node(absent, 0), [None] * len(self.parameters))
        self.next_replica = self.owned.start
        nodes = [values for _, values in self.stack.waiting]
        self.stack.waiting = []
        return nodes

    def finish_alone(self) -> None:
        """Write the sums where this process has all replicas."""
        self.stack.waiting = [(node, values) for node, values in zip(self.nodes_of[0], self.close(), strict=True)]
        self._give_gradients(self.stack.total())

    def _give_gradients(self, gradients: list[Tensor | None]) -> None:
        gradients, self.kept = self.stack.add(self.kept, gradients), []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    # --- across processes -------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Send each process its share of this process's partial nodes."""
        nodes = self.close()
        self.own = nodes[0]
        self._make_room(len(nodes))
        world, share = self.layout.processes, self.share
        for index, gradients in enumerate(nodes):
            row = self.outgoing if len(nodes) == 1 else self.row
            torch.cat([*self._flat(gradients), self._presence(gradients)], out=row[: self.length])
            if len(nodes) > 1:
                self.outgoing.view(world, len(nodes), share)[:, index].copy_(row.view(world, share))
        counts = [len(own) * share for own in self.nodes_of]
        out = [len(nodes) * share] * world
        self.work = dist.all_to_all_single(self.incoming, self.outgoing, counts, out, async_op=True)

    def hand_out(self) -> None:
        """Add up every process's partial nodes for this process's share, and send the sum to all."""
        self._wait()
        every = [node for own in self.nodes_of for node in own]
        stack = ShareStack()
        for node, value in zip(every, self.incoming.view(len(every), self.share), strict=True):
            stack.push(node, value)
        # what was sent has arrived, so its room is free
        whole = self.outgoing[: self.layout.processes * self.share]
        self.work = _all_gather(whole, stack.total(), async_op=True)

    def write(self) -> None:
        """Give every parameter its sum, in the memory of this process's own gradient."""
        self._wait()
        *parts, presence = self.outgoing[: self.length].split([*self.sizes, len(self.sizes)])
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
        """Make the memory for the journey, once: fresh memory costs a page fault every 4 KiB."""
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


def make_buckets(parameters: Iterable[nn.Parameter], layout: Layout, process: int, elements: int) -> list[Bucket]:
    """Share parameters out to buckets, of `elements` numbers at least, in the order in which backward reaches them."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = open_ones.setdefault(kind, [])
        bucket.append(parameter)
        if sum(other.numel() for other in bucket) >= elements:
            full.append(open_ones.pop(kind))
    return [Bucket(bucket, layout, process) for bucket in [*full, *open_ones.values()]]
