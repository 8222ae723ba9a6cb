"""`Task.all_gather`: gather tensors of every rank, after a check of their shapes: gloo aborts the process where they
differ.

Only the first dimension may differ: evaluation counts every sample once, so shares may be uneven. Any other difference
raises on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import DisagreementError, TaskError
from ...base.tensors import map_tensors
from .ranks import Ranks


def gather(strategy: Any, run: Any, data: Any, group: Any, sync_grads: bool) -> Any:
    """Return `data` with every tensor gathered; see `Task.all_gather`. `run`: the newest run, or None."""
    ranks = _ranks_of(strategy, group)
    if run is not None:
        _refuse_in_step(run, ranks.size, sync_grads)
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    data = map_tensors(data, note, number=lambda value: note(torch.as_tensor(value, device=strategy.device)))
    if ranks.size == 1:  # a dimension of one rank, so that a task reads alike on any number of processes
        results = iter([(tensor if sync_grads else tensor.detach()).unsqueeze(0) for tensor in tensors])
        return map_tensors(data, lambda _: next(results))
    with_gradient = [sync_grads and tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors]
    shapes = _gather_shapes(tensors, with_gradient, ranks)
    gathered = [
        _exchange(tensor.detach(), [row[index] for row in shapes], ranks) for index, tensor in enumerate(tensors)
    ]
    if any(with_gradient):
        # made on every rank, before any backward: a new group is collective, too
        channel = _channel(strategy, group)
        for index, tensor in enumerate(tensors):
            if with_gradient[index]:
                parts: Any = _WithGradient.apply(tensor, channel, gathered[index])  # type: ignore[no-untyped-call]
                gathered[index] = list(parts)
    # shares with unlike numbers of rows cannot be stacked
    joined = iter([torch.stack(parts) if len({part.shape for part in parts}) == 1 else parts for parts in gathered])
    return map_tensors(data, lambda _: next(joined))


def _ranks_of(strategy: Any, group: Any) -> Ranks:
    ranks: Ranks = strategy.data_ranks
    if group is None or strategy.place.world_size == 1:
        return ranks
    size = dist.get_world_size(group)
    if size < 1:
        raise TaskError(
            f"all_gather(group=...) was called on rank {strategy.place.rank}, which is not in that group: call it on "
            f"the ranks that torch.distributed.new_group was given."
        )
    return Ranks(dist.get_rank(group), size, group)


def _refuse_in_step(run: Any, size: int, sync_grads: bool) -> None:
    """Raise TaskError for a gather over `size` ranks in a step that not all of them run at the same time."""
    if not run.loop.open or not (run.metrics.in_step and run.metrics.in_batch):
        return
    doing, strategy, how = run.loop.doing, run.strategy, "with sync_grads=True " if sync_grads else ""
    replicas, processes = run.state.replicas, f"{strategy.data_ranks.size} processes"
    if doing == "train" and strategy.cuts_batches:
        raise TaskError(
            f"training_step calls all_gather {how}on a part of its batch: strategy {strategy.name!r} cuts batches. "
            f"Use strategy ddp, whose processes have whole batches."
        )
    if doing == "train" and (run.local_replicas > 1 or run.members_change):
        raise TaskError(
            f"training_step calls all_gather {how}over {replicas} replicas, which run on {processes}"
            f"{' that may die' if run.members_change else ''}, one after the other: what a later one computes is "
            f"not there yet. Start {replicas} processes (strategy ddp) that stay, or set trainer.replicas to their "
            f"number."
        )
    if size > 1 and not _all_take_part(run):
        stage = {"train": "training", "sanity_check": "validation"}.get(doing, doing)
        instead = f"gathering in on_{stage}_epoch_end"
        if doing == "train":
            instead = "trainer.use_distributed_sampler=even, which repeats samples, or drop_last=True"
        raise TaskError(
            f"{stage}_step calls all_gather, which every rank must call equally often, but the batches do not go "
            f"evenly into {replicas} replicas on {processes}: some rank has fewer. What helps: {instead}."
        )


def _all_take_part(run: Any) -> bool:
    """Return whether all ranks take this batch, and will take each later one, as far as its length is known."""
    if run.loop.doing == "train":
        return run.training_data.is_even and run.loop.step is not None and run.loop.step.is_full
    data = run.data.evaluations["validation" if run.loop.doing == "sanity_check" else run.loop.doing]
    evenly = run.state.replicas % run.strategy.data_ranks.size == 0
    return evenly and bool(data.is_even and data.is_full)


def _gather_shapes(tensors: list[Tensor], with_gradient: list[bool], ranks: Ranks) -> list[list[tuple[int, ...]]]:
    """Return the shapes of every rank's tensors, by rank.

    Raises DisagreementError, on every rank, if the tensors differ by more than their rows.
    """
    kinds = list(map(_describe, tensors, with_gradient))
    every: list[tuple[list[str], list[tuple[int, ...]]]] = ranks.gather_objects(
        (kinds, [tuple(tensor.shape) for tensor in tensors])
    )
    other = next((rank for rank, (kinds_there, _) in enumerate(every) if kinds_there != every[0][0]), None)
    if other is not None:
        words = [f"[{', '.join(every[rank][0])}]" for rank in (0, other)]
        raise DisagreementError(
            f"all_gather takes {words[0]} on rank 0, and {words[1]} on rank {other}. All ranks must give the same "
            f"tensors, of one dtype and one kind of device, that differ in their first dimension only; with "
            f"sync_grads=True all or none need a gradient. Join what each rank has collected by torch.cat(outputs)."
        )
    return [shapes for _, shapes in every]


def _describe(tensor: Tensor, with_gradient: bool) -> str:
    """Return what must be the same on all ranks: not the number of rows."""
    shape = " x ".join(["rows", *map(str, tensor.shape[1:])]) if tensor.dim() else "scalar"
    return f"{tensor.dtype} {shape} on {tensor.device.type}{' with a gradient' * with_gradient}"


# --- how they travel --------------------------------------------------------------------------------------------------
def _exchange(tensor: Tensor, shapes: list[tuple[int, ...]], ranks: Ranks) -> list[Tensor]:
    """Return the tensor of every rank, given their shapes."""
    sizes = [torch.Size(shape).numel() * tensor.element_size() for shape in shapes]
    # as bytes, since gloo lacks some dtypes, and padded to the longest: it aborts the process where sizes differ
    row = torch.zeros(max(sizes), dtype=torch.uint8, device=tensor.device)
    row[: sizes[ranks.rank]] = tensor.contiguous().reshape(-1).view(torch.uint8)
    received = zip(ranks.all_gather(row), sizes, shapes, strict=True)
    # copies: an empty row of the whole lies at an offset at which torch refuses other dtypes
    return [part[:size].clone().view(tensor.dtype).view(shape) for part, size, shape in received]


_channels: dict[Any, Any] = {}
"""Process groups for gradients of gathers, so that they do not mix with the collectives of DDP's backward."""


def _channel(strategy: Any, group: Any) -> Any:
    """Return the process group for gradients of gathers; every rank calls it."""
    if group is not None:
        return group
    if strategy.data_ranks is not strategy.collectives:  # of a mesh, whose data axis is a part of the world
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
        size, world = context.shape.numel(), len(gradients)
        received = sent.new_empty(world * size)
        dist.all_to_all_single(received, sent, [size] * world, context.sizes, group=context.channel)
        total, *others = received.view(world, size).unbind()
        # one after the other, not by sum(0), whose order torch chooses: each rank has the same bits
        for other in others:
            total = total + other
        return total.view(context.shape), None, None
