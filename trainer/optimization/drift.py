"""DriftGuard: detects differences between the weights of ranks that must have identical weights."""

import time
from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ...base.errors import DisagreementError, first_names
from ...base.tensors import plain_tensors
from ..processes.ranks import Ranks

PAUSE_PER_SECOND = 250
"""Ratio of the time between comparisons to the time that a comparison takes. It limits the cost to 0.4%."""


class DriftGuard:
    """Bitwise comparison of all parameters between ranks that must have identical weights (`Strategy.weight_ranks`).

    Buffers are not compared, because batch norm's running statistics differ between ranks within an epoch, and only
    rank 0's buffers are used.
    """

    def __init__(self, task: nn.Module, ranks: Ranks) -> None:
        self.task, self.ranks = task, ranks
        self.restart()

    def restart(self) -> None:
        """Schedule a weight comparison for the next logging point, even among new ranks. All ranks must call this."""
        self.compared_at, self.next_time, self.waited = -1, 0.0, 0.0
        """Step of the latest comparison, agreed time of the next one, and seconds spent waiting in the latest one."""

    def compare_if_due(self, step: int, elapsed: float) -> None:
        """Compare the weights after `step` if enough time has passed since the last comparison.

        Args:
            elapsed: the elapsed time of the run in seconds, which must be the same on all ranks.
        """
        if elapsed >= self.next_time:
            self.compare(step, elapsed)

    def compare(self, step: int, elapsed: float) -> None:
        """Compare the weights, at most once per step. All ranks must call this.

        Raises DisagreementError if the weights differ.
        """
        # a save or the end of training may follow a logging point that has already compared this step
        if self.ranks.size == 1 or self.compared_at == step:
            return
        began = time.perf_counter()
        sums = {name: sums_of_bits(parameter) for name, parameter in self.task.named_parameters()}
        names = [name for name, parts in sums.items() for _ in parts]
        parts = [part for parts in sums.values() for part in parts]
        numbers = on_host(parts)
        # the ranks must agree on the pause, so the wait in this collective is added in the next comparison
        total, summed = numbers.sum(), time.perf_counter()
        nanoseconds = torch.tensor(int((summed - began + self.waited) * 1e9))
        # ~x = -x - 1 reverses the order, so that one maximum yields both the smallest and the largest total
        answer = self.ranks.all_reduce(torch.stack([total, ~total, nanoseconds]), "max").tolist()
        self.waited = time.perf_counter() - summed
        # counted from the due time, so that comparisons before it, at saves, add to the pause
        self.compared_at, self.next_time = step, (self.next_time or elapsed) + PAUSE_PER_SECOND * answer[2] * 1e-9
        if answer[0] != ~answer[1]:
            raise DisagreementError(
                f"The weights differ after step {step}, but must be equal on all {self.ranks.size} ranks: "
                f"{describe_differing(self.ranks, names, numbers.tolist())}. An optimizer, a hook or training_step "
                f"changes weights using random numbers or data that differ between ranks. Draw the same numbers on all "
                f"ranks, and resume from an earlier checkpoint."
            )


def describe_differing(ranks: Ranks, names: list[str], numbers: list[int]) -> str:
    """Describe the named numbers that differ between ranks, or return "" if none differ. All ranks must call this."""
    gathered = ranks.gather_objects(numbers)
    if gathered.count(numbers) == len(gathered):
        return ""
    by_rank = dict(zip(get_process_group_ranks(ranks.group), gathered, strict=True))
    # the most frequent value is assumed to be correct; of equally frequent ones, the lowest rank's
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*by_rank.values(), strict=True)]
    strays = [rank for rank, column in by_rank.items() if column != usual]
    differing = [
        name for index, name in enumerate(names) if any(by_rank[rank][index] != usual[index] for rank in strays)
    ]
    label = f"rank {strays[0]}" if len(strays) == 1 else f"ranks {first_names([str(rank) for rank in strays])}"
    return f"{first_names(list(dict.fromkeys(differing)))} on {label}"


def on_host(parts: list[Tensor]) -> Tensor:
    """Return the sums of bits as a single tensor on the host."""
    # first to one device, then to the host in a single copy, since each copy to the host synchronizes
    return torch.stack([part.to(parts[0].device) for part in parts]).cpu() if parts else torch.zeros(0).long()


def sums_of_bits(tensor: Tensor) -> list[Tensor]:
    """Return the sums of the bits, read as integers, of the plain tensors that make up `tensor`.

    The sums are exact in any order. On a CPU, torch.hash_tensor reads 5 GB/s, while this function reads 27 GB/s.
    torch.hash_tensor also combines values by exclusive or, so two changes to the same bit cancel out.
    """
    if tensor.is_meta:
        return []
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
        return sums_of_bits(tensor.indices()) + sums_of_bits(tensor.values())
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for inner in plain_tensors(tensor) for part in sums_of_bits(inner)]
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single expanded element counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    # bits rather than values: a sum of values rounds, and with a NaN it is not equal to itself
    flat = flat.view(torch.uint8)
    if flat.data_ptr() % 8:  # the sum reads eight bytes at a time
        flat = flat.clone()
    rest = flat.numel() % 8
    words = flat[: flat.numel() - rest].view(torch.int64).sum()
    return [words + flat[-rest:].sum()] if rest else [words]
