"""`Task.all_gather`: gather tensors of every rank, after a check of their shapes: gloo aborts the process where they
differ.

Only the first dimension may differ: evaluation counts every sample once, so shares may be uneven. Any other difference
raises on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import DisagreementError, TaskError
from ..data.transfer import map_tensors
from .ranks import Ranks, serves_host

if TYPE_CHECKING:
    from ..strategies.strategy import Strategy

MESSAGE_ALIGNMENT = 16
"""Bytes to which each row of a message is padded, so that every dtype is aligned."""


class UnevenTensors(list[Tensor]):
    """List of every rank's tensor, by rank, returned if their first dimensions differ and they cannot be stacked."""

    def __getattr__(self, name: str) -> NoReturn:
        rows = [len(tensor) for tensor in self]
        raise AttributeError(
            f"all_gather returned a list of {len(rows)} tensors and no stacked one, since the ranks gave {rows} rows; "
            f"a list has no {name!r}. torch.cat(list(...)) joins both a list and a stacked tensor."
        )


class _Description(NamedTuple):
    """Properties of a tensor that must be equal on all ranks."""

    name: str
    kind: str
    shape: tuple[int, ...]
    with_gradient: bool

    def __str__(self) -> str:
        gradient = " with a gradient" if self.with_gradient else ""
        return f"{self.name} ({self.kind}, shape {self.shape}{gradient})"

    @property
    def without_rows(self) -> tuple[Any, ...]:
        """What must be the same on every rank."""
        return self.name, self.kind, len(self.shape), self.shape[1:], self.with_gradient


def gather(
    strategy: "Strategy", data: Any, group: Any, sync_grads: bool, refuse_in_step: Callable[[int, bool], object] | None
) -> Any:
    """Return `data` with every tensor gathered; see `Task.all_gather`.

    `refuse_in_step`: raises TaskError where not all of so many ranks run the step at the same time.
    """
    ranks = _ranks_of(strategy, group)
    size = ranks.size
    if refuse_in_step is not None:
        refuse_in_step(size, sync_grads)
    data = map_tensors(data, lambda tensor: tensor, number=lambda value: torch.as_tensor(value, device=strategy.device))
    tensors: list[Tensor] = []
    map_tensors(data, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    if size == 1:
        whole = iter([(tensor if sync_grads else tensor.detach()).unsqueeze(0) for tensor in tensors])
        return map_tensors(data, lambda _: next(whole))
    own = [
        _Description(
            name, f"{tensor.dtype} on {tensor.device.type}", tuple(tensor.shape), _has_gradient(tensor, sync_grads)
        )
        for name, tensor in zip(_names_in(data, "data"), tensors, strict=True)
    ]
    every: list[list[_Description]] = ranks.gather_objects(own)
    _require_same(every)
    shapes = [[described[index].shape for described in every] for index in range(len(own))]
    gathered = _exchange([tensor.detach() for tensor in tensors], shapes, ranks)
    if any(one.with_gradient for one in own):
        # made on every rank, before any backward: a new group is collective, too
        channel = _channel(strategy, group)
        for index, (tensor, one) in enumerate(zip(tensors, own, strict=True)):
            if one.with_gradient:
                parts: Any = _WithGradient.apply(tensor, channel, gathered[index])  # type: ignore[no-untyped-call]
                gathered[index] = list(parts)
    found = iter([_joined(parts) for parts in gathered])
    return map_tensors(data, lambda _: next(found))


def _has_gradient(tensor: Tensor, sync_grads: bool) -> bool:
    return sync_grads and tensor.requires_grad and torch.is_grad_enabled()


def _joined(parts: list[Tensor]) -> Any:
    even = all(part.shape == parts[0].shape for part in parts)
    return torch.stack(parts) if even else UnevenTensors(parts)


# --- who takes part ---------------------------------------------------------------------------------------------------
def _ranks_of(strategy: "Strategy", group: Any) -> Ranks:
    if group is None or strategy.place.world_size == 1:
        ranks = strategy.data_ranks
        if strategy.leaves_default_group and serves_host():  # among the script's own, which are counted
            return Ranks(ranks.rank, ranks.size)
        return ranks
    size = dist.get_world_size(group)
    if size < 1:
        raise TaskError(
            f"all_gather(group=...) was called on rank {strategy.place.rank}, which is not in that group: call it on "
            f"the ranks that torch.distributed.new_group was given."
        )
    return Ranks(dist.get_rank(group), size, group)


# --- what must agree --------------------------------------------------------------------------------------------------
def _names_in(data: Any, name: str) -> Iterator[str]:
    """Yield a name for each tensor, in the order of `map_tensors`."""
    if isinstance(data, Tensor):
        yield name
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        for field in data._fields:
            yield from _names_in(getattr(data, field), f"{name}.{field}")
    elif isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from _names_in(item, f"{name}[{index}]")
    elif isinstance(data, dict):
        for key, item in data.items():
            yield from _names_in(item, f"{name}[{key!r}]")
    elif is_dataclass(data) and not isinstance(data, type):
        for own in (field for field in fields(data) if field.init):
            yield from _names_in(getattr(data, own.name), f"{name}.{own.name}")


def _require_same(every: Sequence[Sequence[_Description]]) -> None:
    """Raise DisagreementError, on every rank, if the descriptions differ by more than the first dimension."""
    for rank, described in enumerate(every):
        for first, other in zip_longest(every[0], described):
            if first is None or other is None or first.without_rows != other.without_rows:
                raise DisagreementError(
                    f"all_gather takes {first or 'no further tensor'} on rank 0, and {other or 'no further tensor'} on "
                    f"rank {rank}. All ranks must give the same tensors, of one dtype and one kind of device, that "
                    f"differ in their first dimension only; with sync_grads=True all or none need a gradient. Join "
                    f"what each rank has collected by torch.cat(outputs)."
                )


# --- how they travel --------------------------------------------------------------------------------------------------
def _exchange(tensors: list[Tensor], shapes: list[list[tuple[int, ...]]], ranks: Ranks) -> list[list[Tensor]]:
    """Return each tensor of every rank, given their shapes, in one collective for each kind of device, as bytes."""
    found: list[list[Tensor]] = [[] for _ in tensors]
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        # widest dtype first keeps all aligned
        some = sorted(
            (i for i, t in enumerate(tensors) if t.device == device), key=lambda i: -tensors[i].element_size()
        )
        sizes = [
            [torch.Size(shapes[i][rank]).numel() * tensors[i].element_size() for i in some]
            for rank in range(len(shapes[0]))
        ]
        # padded to the longest: all_gather takes equal sizes, and gloo aborts the process (SIGABRT) where they differ
        row = torch.zeros(
            -(-max(map(sum, sizes)) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT, dtype=torch.uint8, device=device
        )
        flat = torch.cat([tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in some])
        row[: len(flat)].copy_(flat)
        for rank, theirs in enumerate(ranks.all_gather(row)):
            parts = theirs[: sum(sizes[rank])].split(sizes[rank])
            for index, part in zip(some, parts, strict=True):
                found[index].append(part.view(tensors[index].dtype).view(shapes[index][rank]).clone())
    return found


_channels: dict[Any, Any] = {}
"""Process groups for gradients of gathers, so that they do not mix with the collectives of DDP's backward."""


def _channel(strategy: "Strategy", group: Any) -> Any:
    """Return the process group for gradients of gathers; every rank calls it."""
    if group is not None:
        return group
    if not strategy.leaves_default_group and strategy.data_ranks.group is not None:
        return strategy.data_ranks.group
    world = dist.group.WORLD
    if world not in _channels:
        _channels.clear()
        _channels[world] = dist.new_group()
    return _channels[world]


class _WithGradient(torch.autograd.Function):
    """All-gather with a backward pass: the gradients of all ranks are summed in the order of ranks."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, channel: Any, parts: list[Tensor]) -> tuple[Tensor, ...]:
        context.channel, context.shape, context.sizes = channel, tensor.shape, [part.numel() for part in parts]
        return tuple(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sent = torch.cat([gradient.reshape(-1) for gradient in gradients])
        own, world = context.shape.numel(), len(gradients)
        received = sent.new_empty(world * own)
        dist.all_to_all_single(received, sent, [own] * world, context.sizes, group=context.channel)
        total, *others = received.view(world, own).unbind()
        for other in others:
            total = total + other
        return total.view(context.shape), None, None
