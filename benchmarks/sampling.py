"""Cost of the sample order and of keyed random numbers: starting an epoch, computing an index, and seeding.

Run: python benchmarks/sampling.py
"""

import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from legato.trainer.data.randomness import KeyedDataset, mix, seed_generators
from legato.trainer.data.sampling import Deal, DealtBatches, EpochOrder, epoch_key, permutation

TRILLION, MILLION = 10**12, 10**6
BATCH = 256


class Numbers:
    """An empty map-style dataset of a given length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def best_seconds(call: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Return the duration of a call in seconds: the minimum over rounds, since other load only adds time."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)


def peak_bytes(call: Callable[[], object]) -> int:
    call()
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def first_batch(length: int, start_step: int = 0) -> list[int]:
    """Start an epoch with a key that is not in any cache."""
    key = epoch_key(time.perf_counter_ns(), 0)
    deal = Deal(length, BATCH, replicas=8, accumulate=1)
    order = partial(permutation, length=length, key=key)
    return next(iter(DealtBatches(deal, range(1), EpochOrder(length, order), start_step)))


def distributed_first_batch(length: int) -> list[int]:
    sampler = DistributedSampler(Numbers(length), num_replicas=8, rank=0, seed=time.perf_counter_ns() % 2**32)
    indices = iter(sampler)
    return [next(indices) for _ in range(BATCH)]


def report_start() -> None:
    print(f"{'start of an epoch: to the first batch of 256':<58}{'seconds':>12}{'MiB':>12}")
    start, middle = partial(first_batch, TRILLION), partial(first_batch, TRILLION, 10**8)
    seconds, peak = best_seconds(start, 20), peak_bytes(start)
    print_start("legato, 10^12 samples", seconds, peak)
    print_start("legato, 10^12 samples, resumed at step 10^8", best_seconds(middle, 20), peak_bytes(middle))
    peer = partial(distributed_first_batch, MILLION)
    # The peak covers the lists of Python integers. tracemalloc does not see the tensor that they were created from.
    peer_seconds, peer_peak = best_seconds(peer, 1, rounds=3), peak_bytes(peer)
    print_start("DistributedSampler, 10^6 samples, 1 of 8 ranks", peer_seconds, peer_peak)
    peer_seconds, peer_peak = peer_seconds * MILLION, peer_peak * MILLION
    print_start("DistributedSampler, 10^12 samples (10^6 times that)", peer_seconds, peer_peak)
    print(f"  ratio at 10^12 samples: {peer_seconds / seconds:.2g} in time, {peer_peak / peak:.2g} in memory")


def print_start(label: str, seconds: float, peak: int) -> None:
    print(f"  {label:<56}{seconds:>12.4g}{peak / 2**20:>12.4g}")


def report_indices() -> None:
    print("an index, in us                                          alone by 256   in a loader's batches of 256")
    for length in (1000, MILLION, 10**9, TRILLION, 2**62):
        key = epoch_key(1, 2)
        positions = np.arange(BATCH) + (length - BATCH) // 2
        alone = best_seconds(partial(permutation, positions, length, key), 300) / BATCH
        deal = Deal(length, BATCH, replicas=1, accumulate=1, limit_rounds=min(256, length // BATCH))
        batches = DealtBatches(deal, range(1), EpochOrder(length, partial(permutation, length=length, key=key)))
        dealt = best_seconds(lambda batches=batches: sum(map(len, batches)), 1) / deal.samples
        print(f"  length {length:<46.3g}{alone * 1e6:>15.3f}{dealt * 1e6:>33.3f}")
    sampler = DistributedSampler(Numbers(MILLION), num_replicas=1, rank=0)
    peer = best_seconds(lambda: sum(1 for _ in sampler), 1, rounds=3) / MILLION
    print(f"  DistributedSampler at 10^6, its start shared out{peer * 1e6:>47.3f}")


def report_seeding() -> None:
    key = mix(1, 2, 3)
    ours = best_seconds(partial(seed_generators, key), 10_000)
    print("seeding Python's, NumPy's and torch's generators             us        ratio")
    print(f"  {'seed_generators':<50}{ours * 1e6:>13.2f}{1:>13.2f}")

    def by_the_book() -> None:
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        torch.manual_seed(key)

    plain = best_seconds(by_the_book, 1000)
    print(f"  {'random.seed, np.random.seed, torch.manual_seed':<50}{plain * 1e6:>13.2f}{plain / ours:>13.2f}")
    print(f"  {'mix of three numbers':<50}{best_seconds(partial(mix, 1, 2, 10**9), 10_000) * 1e6:>13.2f}")
    batches = DealtBatches(Deal(BATCH, BATCH, 1, 1), range(1), EpochOrder(BATCH, lambda positions: positions))
    numbers, (indices,) = Numbers(BATCH), batches
    keyed = KeyedDataset(numbers, 0)
    bare = best_seconds(lambda: [numbers[index] for index in indices], 300)
    fetched = best_seconds(lambda: keyed.__getitems__(indices), 300)
    over = "KeyedDataset, a batch of 256, over the bare fetch"
    print(f"  {over:<50}{(fetched - bare) * 1e6:>13.2f}{fetched / bare:>13.2f}")


def main() -> None:
    report_start()
    print()
    report_indices()
    print()
    report_seeding()


if __name__ == "__main__":
    main()
