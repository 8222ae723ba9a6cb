"""Gathers the tensors of all ranks for `Task.all_gather`, after checking their shapes.

Without the check, gloo would abort the process if the shapes differed. Only the first dimension may differ: an
evaluation uses each sample exactly once, so ranks may have batches of different sizes. Any other difference raises an
error on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import DisagreementError, TaskError
from ...base.quantities import counted
from ...base.tensors import map_tensors
from .ranks import Ranks


def gather(strategy: Any, run: Any, data: Any, group: Any, sync_grads: bool) -> Any:
    """Return `data` with every tensor gathered; see `Task.all_gather`.

    Args:
        run: the most recent run, or None if there is none.
    """
    ranks = _ranks_of(strategy, group)
    if run is not None:
        _refuse_in_step(run, ranks.size, sync_grads)
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    data = map_tensors(data, note, number=lambda value: note(torch.as_tensor(value, device=strategy.device)))
    if ranks.size == 1:  # add a dimension for the rank, so that a task's code works on any number of processes
        results = iter([(tensor if sync_grads else tensor.detach()).unsqueeze(0) for tensor in tensors])
        return map_tensors(data, lambda _: next(results))
    with_gradient = [sync_grads and tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors]
    shapes = _gather_shapes(tensors, with_gradient, ranks)
    gathered = [
        _exchange(tensor.detach(), [row[index] for row in shapes], ranks) for index, tensor in enumerate(tensors)
    ]
    if any(with_gradient):
        # every rank creates the channel before any backward pass, because creating a group is a collective call
        channel = _channel(strategy, group)
        for index, tensor in enumerate(tensors):
            if with_gradient[index]:
                shares: Any = _WithGradient.apply(tensor, channel, gathered[index])  # type: ignore[no-untyped-call]
                gathered[index] = list(shares)
    # shares with different numbers of rows cannot be stacked
    stacked = iter([torch.stack(rows) if len({row.shape for row in rows}) == 1 else rows for rows in gathered])
    return map_tensors(data, lambda _: next(stacked))


def _ranks_of(strategy: Any, group: Any) -> Ranks:
    ranks: Ranks = strategy.data_ranks
    if group is None or strategy.place.world_size == 1:
        return ranks
    size = dist.get_world_size(group)
    if size < 1:
        raise TaskError(
            f"all_gather(group=...) was called on rank {strategy.place.rank}, which is not in that group. Call it only "
            f"on the ranks you passed to torch.distributed.new_group."
        )
    return Ranks(dist.get_rank(group), size, group)


def _refuse_in_step(run: Any, size: int, sync_grads: bool) -> None:
    """Raise TaskError if a step calls all_gather while some of the `size` ranks are not running that step."""
    if not run.loop.open or not (run.metrics.in_step and run.metrics.in_batch):
        return
    doing, strategy, option = run.loop.doing, run.strategy, "with sync_grads=True " if sync_grads else ""
    replicas, processes = run.state.replicas, counted(strategy.data_ranks.size, "process")
    if doing == "train" and strategy.cuts_batches:
        raise TaskError(
            f"training_step calls all_gather {option}on part of its batch, because strategy={strategy.name} splits "
            f"batches. Use strategy=ddp, which gives each process complete batches."
        )
    if doing == "train" and (run.local_replicas > 1 or run.members_change):
        raise TaskError(
            f"training_step calls all_gather {option}over {replicas} replicas, which take turns on {processes}"
            f"{' that may die' if run.members_change else ''}. The results of later replicas do not exist yet. Start "
            f"{replicas} processes (strategy=ddp, not elastic), or set trainer.replicas to the number of processes."
        )
    if size > 1 and not _all_take_part(run):
        stage = {"train": "training", "sanity_check": "validation"}.get(doing, doing)
        remedy = f"Gather in on_{stage}_epoch_end"
        if doing == "train":
            remedy = "Set trainer.use_distributed_sampler=even, which repeats samples, or drop_last=True"
        raise TaskError(
            f"{stage}_step calls all_gather, which every rank must call the same number of times, but the batches do "
            f"not divide evenly among {replicas} replicas on {processes}, so some ranks have fewer batches. {remedy}."
        )


def _all_take_part(run: Any) -> bool:
    """Return whether all ranks have a batch for this step and, as far as is known, for all later steps."""
    if run.loop.doing == "train":
        return run.training_data.is_even and run.loop.step is not None and run.loop.step.is_full
    data = run.data.evaluations["validation" if run.loop.doing == "sanity_check" else run.loop.doing]
    evenly = run.state.replicas % run.strategy.data_ranks.size == 0
    return evenly and bool(data.is_even and data.is_full)


def _gather_shapes(tensors: list[Tensor], with_gradient: list[bool], ranks: Ranks) -> list[list[tuple[int, ...]]]:
    """Return the shapes of every rank's tensors, in rank order.

    Raises DisagreementError, on every rank, if the tensors differ in anything other than their number of rows.
    """
    kinds = list(map(_describe, tensors, with_gradient))
    by_rank: list[tuple[list[str], list[tuple[int, ...]]]] = ranks.gather_objects(
        (kinds, [tuple(tensor.shape) for tensor in tensors])
    )
    differing = next((rank for rank, (rank_kinds, _) in enumerate(by_rank) if rank_kinds != by_rank[0][0]), None)
    if differing is not None:
        first, second = (f"[{', '.join(by_rank[rank][0])}]" for rank in (0, differing))
        raise DisagreementError(
            f"all_gather received {first} on rank 0, but {second} on rank {differing}. All ranks must pass the same "
            f"tensors, with the same dtypes and device types. Only dimension 0 may differ. With sync_grads=True, "
            f"all or none must require a gradient. Concatenate each rank's tensors first: torch.cat(outputs)."
        )
    return [shapes for _, shapes in by_rank]


def _describe(tensor: Tensor, with_gradient: bool) -> str:
    """Describe the properties that must be equal on all ranks: everything except the number of rows."""
    shape = " x ".join(["rows", *map(str, tensor.shape[1:])]) if tensor.dim() else "scalar"
    return f"{tensor.dtype} {shape} on {tensor.device.type}{' with a gradient' * with_gradient}"


# --- exchange ---------------------------------------------------------------------------------------------------------
def _exchange(tensor: Tensor, shapes: list[tuple[int, ...]], ranks: Ranks) -> list[Tensor]:
    """Return the tensors of all ranks, given their shapes."""
    sizes = [torch.Size(shape).numel() * tensor.element_size() for shape in shapes]
    # as bytes, because gloo lacks some dtypes, and padded to the longest, because gloo aborts if sizes differ
    row = torch.zeros(max(sizes), dtype=torch.uint8, device=tensor.device)
    row[: sizes[ranks.rank]] = tensor.contiguous().reshape(-1).view(torch.uint8)
    received = zip(ranks.all_gather(row), sizes, shapes, strict=True)
    # copies, because an empty row may have an offset at which torch cannot view other dtypes
    return [data[:size].clone().view(tensor.dtype).view(shape) for data, size, shape in received]


_channels: dict[Any, Any] = {}
"""Process groups for the backward pass of all_gather, separate from the collectives of DDP's backward pass."""


def _channel(strategy: Any, group: Any) -> Any:
    """Return the process group for all_gather's backward pass. All ranks must call this."""
    if group is not None:
        return group
    if strategy.data_ranks is not strategy.collectives:  # a mesh, whose data axis is a subgroup of the world
        return strategy.data_ranks.group
    world = dist.group.WORLD
    if world not in _channels:
        _channels.clear()
        _channels[world] = dist.new_group()
    return _channels[world]


class _WithGradient(torch.autograd.Function):
    """All-gather with a backward pass, which sums the gradients of all ranks in rank order."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, channel: Any, shares: list[Tensor]) -> tuple[Tensor, ...]:
        context.channel, context.shape, context.sizes = channel, tensor.shape, [share.numel() for share in shares]
        return tuple(shares)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sent = torch.cat([gradient.reshape(-1) for gradient in gradients])
        size, world = context.shape.numel(), len(gradients)
        received = sent.new_empty(world * size)
        dist.all_to_all_single(received, sent, [size] * world, context.sizes, group=context.channel)
        total, *terms = received.view(world, size).unbind()
        # added one by one, so that all ranks get bitwise identical results: torch chooses the order of sum(0)
        for term in terms:
            total = total + term
        return total.view(context.shape), None, None
