"""The fixed binary tree over replicas: in which order sums are made, whatever the number of processes.

Floating point addition is not associative: whoever adds in another order gets other last bits. Here node (k, i) is node
(k-1, 2i) + node (k-1, 2i+1), the leaves are the replicas, and a node without a right child is its left one.

    replica       0   1   2   3   4   5
    level 1        01      23      45         each process adds up what lies within its own replicas (a carry stack:
    level 2            0123        45         log2 R gradients at most), and hands over the rest as partial nodes
    level 3                012345

tree.py adds up gradients with it, and buckets.py finishes it across processes. What has no gradient (a replica without
a batch, a parameter that a loss does not use) is None and stays out of the sums: +0.0 would turn a -0.0 into +0.0.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from ...torch_private import add_to_each

Value = TypeVar("Value")


@dataclass(frozen=True)
class Node:
    """A subtree over the replicas [start, start + 2^level), of which those beyond the last replica do not exist."""

    start: int
    level: int


@dataclass
class CarryStack(Generic[Value]):
    """Subtrees that wait for their right sibling. What is pushed must come in the order of the replicas."""

    waiting: list[tuple[Node, Value]] = field(default_factory=list)

    def push(self, node: Node, value: Value) -> None:
        """Take the next subtree, and add up siblings as long as there are some."""
        while self.waiting:
            left, sum_so_far = self.waiting[-1]
            if (
                left.level != node.level
                or left.start % (2 << node.level)
                or left.start + (1 << left.level) != node.start
            ):
                break
            self.waiting.pop()
            node, value = Node(left.start, left.level + 1), self.add(sum_so_far, value)
        self.waiting.append((node, value))

    def total(self) -> Value:
        """Return the root, once every replica is in: nodes without a right sibling move up as they are."""
        _, value = self.waiting.pop()
        while self.waiting:
            _, left = self.waiting.pop()
            value = self.add(left, value)
        return value

    def add(self, left: Value, right: Value) -> Value:
        """Return the sum, in the memory of `left`."""
        raise NotImplementedError


class GradientStack(CarryStack[list[Tensor | None]]):
    """Adds up lists of gradients."""

    def add(self, left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
        """Add each gradient to its partner, where there are both."""
        pairs = [(ours, theirs) for ours, theirs in zip(left, right, strict=True) if theirs is not None]
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None]
        if both:
            add_to_each([ours for ours, _ in both], [theirs for _, theirs in both])
        return [theirs if ours is None else ours for ours, theirs in zip(left, right, strict=True)]


class ShareStack(CarryStack[Tensor]):
    """Adds up one process's share of the numbers."""

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Add the shares."""
        return left.add_(right)


def partial_nodes(replicas: Iterable[int]) -> list[Node]:
    """Return the largest subtrees that lie within a contiguous block of replicas."""
    stack = _CountingStack()
    for replica in replicas:
        stack.push(Node(replica, 0), None)
    return [node for node, _ in stack.waiting]


class _CountingStack(CarryStack[None]):
    def add(self, left: None, right: None) -> None:
        return None
