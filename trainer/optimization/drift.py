"""DriftGuard: comparison of the weights of ranks that must hold the same, so that no run trains several models."""

import time
from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ...base.errors import DisagreementError, first_names
from ...base.tensors import plain_tensors
from ..processes.ranks import Ranks

PAUSE_PER_SECOND = 250
"""Seconds without a comparison at a logging point for each second that comparisons have taken: 0.4 % of the time."""


class DriftGuard:
    """Compares every parameter of the ranks whose weights must be the same, bit for bit (`Strategy.weight_ranks`).

    Parameters alone: ranks' buffers (running statistics of batch norm) differ between two steps, and rank 0's count.
    """

    def __init__(self, task: nn.Module, ranks: Ranks) -> None:
        self.task, self.ranks = task, ranks
        self.restart()

    def restart(self) -> None:
        """Compare again from the next logging point on; every rank calls it, perhaps with other ranks than before."""
        self.compared_at, self.next_time, self.waited = -1, 0.0, 0.0
        """The step and the agreed time of the newest and the next comparison; seconds that the newest one waited."""

    def compare_if_due(self, step: int, elapsed: float) -> None:
        """Compare the weights after `step` where that was not done for long enough. `elapsed`: the agreed seconds."""
        if elapsed >= self.next_time:
            self.compare(step, elapsed)

    def compare(self, step: int, elapsed: float) -> None:
        """Compare the weights after `step`, once; every rank calls it. Raises DisagreementError where they differ."""
        # a save, or the end of training, may come right after the logging point that has compared this step
        if self.ranks.size == 1 or self.compared_at == step:
            return
        began = time.perf_counter()
        sums = {name: sums_of_bits(parameter) for name, parameter in self.task.named_parameters()}
        names = [name for name, parts in sums.items() for _ in parts]
        parts = [part for parts in sums.values() for part in parts]
        numbers = on_host(parts)
        # the ranks must agree on the pause, so the wait in this collective counts in the next one
        total, summed = numbers.sum(), time.perf_counter()
        nanoseconds = torch.tensor(int((summed - began + self.waited) * 1e9))
        # ~x = -x - 1 turns the least into the greatest, so that one maximum has both
        answer = self.ranks.all_reduce(torch.stack([total, ~total, nanoseconds]), "max").tolist()
        self.waited = time.perf_counter() - summed
        # counted from when it was due: comparisons of saves, which do not wait until then, add to the pause
        self.compared_at, self.next_time = step, (self.next_time or elapsed) + PAUSE_PER_SECOND * answer[2] * 1e-9
        if answer[0] != ~answer[1]:
            raise DisagreementError(
                f"The ranks' weights differ after step {step}, where all of {self.ranks.size} must be the same: "
                f"{describe_differing(self.ranks, names, numbers.tolist())}. Something changes weights by random "
                f"numbers or data that only one rank has: an optimizer, a hook, or training_step itself. Draw the same "
                f"numbers on all ranks, and go on from an earlier checkpoint."
            )


def describe_differing(ranks: Ranks, names: list[str], numbers: list[int]) -> str:
    """Describe which of the numbers with these names differ on which ranks; "" if none does. Collective."""
    gathered = ranks.gather_objects(numbers)
    if gathered.count(numbers) == len(gathered):
        return ""
    by_rank = dict(zip(get_process_group_ranks(ranks.group), gathered, strict=True))
    # what most ranks have passes for right; where two values are as frequent, that of the lower rank
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*by_rank.values(), strict=True)]
    others = [rank for rank, column in by_rank.items() if column != usual]
    differing = [
        name for index, name in enumerate(names) if any(by_rank[rank][index] != usual[index] for rank in others)
    ]
    which = f"rank {others[0]}" if len(others) == 1 else f"ranks {first_names([str(rank) for rank in others])}"
    return f"{first_names(list(dict.fromkeys(differing)))} on {which}"


def on_host(parts: list[Tensor]) -> Tensor:
    """Return sums of bits in one tensor on the host."""
    # those of other devices to the first one's, and from there all at once: each copy to the host waits
    return torch.stack([part.to(parts[0].device) for part in parts]).cpu() if parts else torch.zeros(0).long()


def sums_of_bits(tensor: Tensor) -> list[Tensor]:
    """Return the sum of a tensor's memory, read as integers: exact, in whatever order the threads add; by parts.

    torch.hash_tensor reads 5 GB/s on a CPU where this reads 27, and two changes of one bit cancel in its exclusive or.
    """
    if tensor.is_meta:
        return []
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
        return sums_of_bits(tensor.indices()) + sums_of_bits(tensor.values())
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for inner in plain_tensors(tensor) for part in sums_of_bits(inner)]
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element that was expanded, which counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    # bits and not values: a sum of values rounds, and is no longer equal to itself with a NaN among them
    flat = flat.view(torch.uint8)
    if flat.data_ptr() % 8:  # eight bytes are read at a time
        flat = flat.clone()
    rest = flat.numel() % 8
    words = flat[: flat.numel() - rest].view(torch.int64).sum()
    return [words + flat[-rest:].sum()] if rest else [words]
