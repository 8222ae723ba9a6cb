"""Sample order: a uniform bijection in constant memory, distributed alike over any number of processes."""

import copy
import math
import pickle
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from legato.base.errors import ConfigError
from legato.trainer.data.sampling import (
    Deal,
    DealtBatches,
    EpochOrder,
    KeyedIndices,
    Layout,
    SampledOrder,
    epoch_key,
    mix,
    permutation,
)

TRILLION = 10**12


def samples_of(deal, step):
    """The samples of a step over all replicas."""
    return len(range(*deal.step_positions(step)))


def whole(length: int, key: int) -> np.ndarray:
    return permutation(np.arange(length), length, key)


def shuffled(length: int, key: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda positions: permutation(positions, length, key)


def chi_square_z(counts: np.ndarray) -> float:
    """The chi-square statistic against equal counts, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def dealt(deal: Deal, replicas: range, order: Callable[[np.ndarray], object], **begin: int) -> DealtBatches:
    """The batches of some replicas in an epoch of an order."""
    return DealtBatches(deal, replicas, EpochOrder(deal.length, order), **begin)


# --- the permutation ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_permutation_is_a_bijection_for_every_length_to_2000() -> None:
    for length in range(1, 2001):
        order = whole(length, epoch_key(7, length))
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(length)), length


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 300_000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(length: int, seed: int, epoch: int) -> None:
    order = whole(length, epoch_key(seed, epoch))
    assert np.array_equal(np.sort(order), np.arange(length))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(length=st.integers(1025, 2**63 - 1), key=st.integers(0, 2**64 - 1), data=st.data())
def test_any_window_of_a_huge_permutation_is_distinct_and_in_range(length: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1025))
    positions = np.arange(start, start + 1025)
    samples = permutation(positions, length, key)
    assert samples.min() >= 0
    assert samples.max() < length
    assert np.unique(samples).size == 1025
    # one at a time, and in another order, the same samples stand at the same positions
    assert permutation(positions[500:501], length, key)[0] == samples[500]
    assert np.array_equal(permutation(positions[::-1], length, key), samples[::-1])


def test_the_permutation_never_changes() -> None:
    """Resuming a run with a later version depends on it."""
    assert whole(8, epoch_key(0, 0)).tolist() == [5, 1, 3, 0, 4, 6, 7, 2]
    assert permutation(np.arange(4), 5000, epoch_key(0, 0)).tolist() == [966, 4920, 1374, 3391]
    assert permutation(np.arange(4), TRILLION, epoch_key(42, 3)).tolist() == [
        382789626278,
        825549562763,
        732483171608,
        384056104614,
    ]


def test_epochs_and_seeds_have_different_orders() -> None:
    keys = {epoch_key(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(keys) == 10_000
    for length in (500, 50_000):
        first = whole(length, epoch_key(0, 0))
        for unrelated in (whole(length, epoch_key(0, 1)), whole(length, epoch_key(1, 0))):
            # unrelated permutations agree in one place on average (Poisson)
            assert (first == unrelated).sum() < 8
            assert abs(np.corrcoef(first, unrelated)[0, 1]) * math.sqrt(length) < 4


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_permutation_of_few_samples_is_equally_likely(length: int) -> None:
    names = {order: number for number, order in enumerate(permutations(range(length)))}
    drawn = 100 * len(names)
    counts = Counter(names[tuple(whole(length, epoch_key(1, epoch)).tolist())] for epoch in range(drawn))
    assert chi_square_z(np.array([counts[number] for number in range(len(names))])) < 4


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 1025, 1100])
def test_neighbours_land_at_any_distance_from_each_other(length: int) -> None:
    """Too few Feistel rounds fail here first: 3 and 4 do."""
    pairs = np.array([[0, 1], [100, 132], [100, 133], [100, 134], [5, 900]])
    drawn = 3000
    distances = np.empty((drawn, len(pairs)), dtype=np.int64)
    for epoch in range(drawn):
        samples = permutation(pairs.ravel(), length, epoch_key(2, epoch)).reshape(pairs.shape)
        distances[epoch] = (samples[:, 1] - samples[:, 0]) % length
    for column in distances.T:
        assert column.min() > 0
        counts = np.bincount(column * 32 // length, minlength=32).astype(float)
        assert chi_square_z(counts) < 4


@pytest.mark.slow
@pytest.mark.parametrize("length", [1_000, 1_500, 65_536, 1_000_000])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_long_permutation_shows_no_trace_of_the_position(length: int, epoch: int) -> None:
    order = whole(length, epoch_key(3, epoch)).astype(np.float64)
    root = math.sqrt(length)
    assert abs(np.corrcoef(np.arange(length), order)[0, 1]) * root < 4
    for lag in (1, 2, 3, 256, math.isqrt(length), math.isqrt(length) + 1):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) * root < 4, lag
    # ascents of a random permutation: mean (n - 1) / 2, variance (n + 1) / 12
    ascents = (np.diff(order) > 0).sum()
    assert abs(ascents - (length - 1) / 2) / math.sqrt((length + 1) / 12) < 4
    # the first tenth of the positions draws evenly from the whole dataset
    tenth = order[: length // 10]
    assert chi_square_z(np.bincount((tenth * 20 / length).astype(int), minlength=20)) < 4


def test_a_trillion_samples_take_no_memory() -> None:
    permutation(np.arange(2), 10**6, 0)  # what NumPy itself allocates once
    deal = Deal(TRILLION, batch_size=256, replicas=16, accumulate=2)
    tracemalloc.start()
    try:
        batches = dealt(deal, range(16), shuffled(TRILLION, epoch_key(5, 6)), start_step=deal.steps - 3)
        first = next(iter(batches))
        assert len(first) == 256
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_sampling_needs_no_torch() -> None:
    code = "import sys, legato.trainer.data.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- hashing --------------------------------------------------------------------------------------------------------


def test_mix_is_stable() -> None:
    assert mix() == 0
    assert mix(0) == 0x50C47C7F24165538
    assert mix(1, 2, 3) == 0x993E44A9DBBB9808


@pytest.mark.slow
def test_mix_tells_tuples_apart() -> None:
    mixed = {mix(a, b, c) for a in range(-5, 35) for b in range(40) for c in range(40)}
    assert len(mixed) == 64_000
    assert len({mix(*[0] * length) for length in range(20)}) == 20
    assert mix(1, 2) != mix(2, 1)
    assert mix(2**64 + 5) == mix(5)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bit_of_any_number_flips_half_of_the_hash(place: int) -> None:
    for bit in (0, 1, 31, 40, 63):
        flips = np.zeros(64)
        for trial in range(1000):
            numbers = [7, trial, 1000 * trial]
            before = mix(*numbers)
            numbers[place] ^= 1 << bit
            changed = before ^ mix(*numbers)
            flips += [(changed >> place) & 1 for place in range(64)]
        assert np.abs(flips / 1000 - 0.5).max() < 0.08, bit


# --- replicas -> processes ------------------------------------------------------------------------------------------


def test_layout_gives_contiguous_balanced_blocks() -> None:
    assert [Layout(8, 3).owned(process) for process in range(3)] == [range(3), range(3, 6), range(6, 8)]
    for replicas in range(1, 40):
        for processes in range(1, replicas + 1):
            layout = Layout(replicas, processes)
            blocks = [layout.owned(process) for process in range(processes)]
            assert [replica for block in blocks for replica in block] == list(range(replicas))
            assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_layout_refuses_more_processes_than_replicas() -> None:
    with pytest.raises(ConfigError, match=r"but 6 processes\. Start at most 4 processes.*trainer\.replicas=6"):
        Layout(4, 6)


# --- dealing --------------------------------------------------------------------------------------------------------

deals = st.builds(
    Deal,
    length=st.integers(0, 400),
    batch_size=st.integers(1, 9),
    replicas=st.integers(1, 8),
    accumulate=st.integers(1, 5),
    drop_last=st.booleans(),
    limit_rounds=st.none() | st.integers(0, 30),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(deal=deals, data=st.data())
def test_any_number_of_processes_deals_out_the_same_steps(deal: Deal, data: st.DataObject) -> None:
    layout = Layout(deal.replicas, data.draw(st.integers(1, deal.replicas)))
    everyone = range(deal.replicas)
    seen: list[int] = []
    for step in range(deal.steps):
        alone = deal.spans(step, everyone)
        together = [span for process in range(layout.processes) for span in deal.spans(step, layout.owned(process))]
        assert together == alone
        assert alone == sorted(alone, key=lambda span: (span.replica, span.round))
        assert sum(span.stop - span.start for span in alone) == samples_of(deal, step) > 0
        for span in alone:
            assert span.round in deal.rounds_of(step)
            assert range(span.start, span.stop) == deal.span(span.round, span.replica)
            assert span.start == (span.round * deal.replicas + span.replica) * deal.batch_size
            assert 1 <= span.stop - span.start <= deal.batch_size
            seen += range(span.start, span.stop)
    assert sorted(seen) == list(range(deal.samples))
    if deal.limit_rounds is None and not deal.drop_last:
        assert deal.samples == deal.length


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(deal=deals)
def test_rounds_and_steps(deal: Deal) -> None:
    spans = [[deal.span(round, replica) for replica in range(deal.replicas)] for round in range(deal.rounds)]
    assert all(any(row) for row in spans)
    if deal.drop_last:
        assert all(len(span) == deal.batch_size for row in spans for span in row)
    assert [round for step in range(deal.steps) for round in deal.rounds_of(step)] == list(range(deal.rounds))
    assert all(len(deal.rounds_of(step)) == deal.accumulate for step in range(deal.steps - 1))
    # nothing lies beyond the end
    assert not deal.span(deal.rounds, 0)
    assert not deal.rounds_of(deal.steps)
    assert not deal.spans(deal.steps, range(deal.replicas))
    assert samples_of(deal, deal.steps) == 0
    unlimited = Deal(deal.length, deal.batch_size, deal.replicas, deal.accumulate, deal.drop_last)
    left = deal.length - unlimited.rounds * deal.replicas * deal.batch_size
    assert left < deal.replicas * deal.batch_size if deal.drop_last else left <= 0


def test_drop_last_drops_a_round_whole() -> None:
    # 23 samples, 2 replicas of 4: the third round has 4 + 3
    assert Deal(23, 4, 2, 1).rounds == 3
    assert [len(Deal(23, 4, 2, 1).span(2, replica)) for replica in range(2)] == [4, 3]
    dropped = Deal(23, 4, 2, 1, drop_last=True)
    assert (dropped.rounds, dropped.samples) == (2, 16)
    assert Deal(24, 4, 2, 1, drop_last=True).rounds == 3
    assert Deal(7, 4, 2, 1, drop_last=True).steps == 0


def test_the_last_step_is_shorter() -> None:
    deal = Deal(100, 2, 3, 4, limit_rounds=10)
    assert (deal.rounds, deal.steps, deal.samples) == (10, 3, 60)
    assert [samples_of(deal, step) for step in range(3)] == [24, 24, 12]
    assert [list(deal.rounds_of(step)) for step in (0, 2)] == [[0, 1, 2, 3], [8, 9]]


def test_dealing_is_exact_for_huge_runs() -> None:
    deal = Deal(TRILLION + 7, batch_size=13, replicas=16_384, accumulate=5)
    in_step = 13 * 16_384 * 5
    assert deal.steps == -(-(TRILLION + 7) // in_step)
    last = deal.steps - 1
    assert samples_of(deal, 0) == in_step
    assert samples_of(deal, last) == TRILLION + 7 - last * in_step
    spans = deal.spans(last, range(16_384))
    assert sum(span.stop - span.start for span in spans) == samples_of(deal, last)
    assert max(span.stop for span in spans) == TRILLION + 7


# --- batch samplers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(deal=deals, data=st.data())
def test_dealt_batches_follow_the_turns(deal: Deal, data: st.DataObject) -> None:
    owned = Layout(deal.replicas, data.draw(st.integers(1, deal.replicas))).owned(0)
    start_step = data.draw(st.integers(0, deal.steps))
    order = shuffled(max(deal.length, 1), epoch_key(1, 2))
    batches = dealt(deal, owned, order, start_step=start_step, epoch=2)
    spans = [span for step in range(start_step, deal.steps) for span in deal.spans(step, owned)]
    dealt_batches = list(batches)
    assert [(batch.position, batch.epoch, len(batch)) for batch in dealt_batches] == [
        (t.start, 2, t.stop - t.start) for t in spans
    ]
    assert [list(batch) for batch in dealt_batches] == [order(np.arange(t.start, t.stop)).tolist() for t in spans]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_together_read_every_sample_once(processes: int) -> None:
    length = 10_007  # several chunks, and a short last round
    deal = Deal(length, batch_size=24, replicas=8, accumulate=3)
    layout, order = Layout(8, processes), shuffled(length, 9)
    read = [i for p in range(processes) for batch in dealt(deal, layout.owned(p), order) for i in batch]
    assert sorted(read) == list(range(length))
    assert read != list(range(length))


def test_order_is_evaluated_for_several_batches_in_one_call() -> None:
    calls: list[int] = []

    def order(positions: np.ndarray) -> np.ndarray:
        calls.append(positions.size)
        return positions

    assert len(list(dealt(Deal(10_000, 10, 1, 1), range(1), order))) == 1000
    assert calls == [4100, 4100, 1800]
    calls.clear()
    next(iter(dealt(Deal(TRILLION, 10, 1, 1), range(1), order, start_step=10**10)))
    assert calls == [4100]


def test_keyed_indices_survive_pickling_and_copying() -> None:
    batch = KeyedIndices([3, 1, 2], position=TRILLION, epoch=4)
    for copied in (
        *(pickle.loads(pickle.dumps(batch, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(batch),
        copy.deepcopy(batch),
    ):
        assert type(copied) is KeyedIndices
        assert (list(copied), copied.position, copied.epoch) == ([3, 1, 2], TRILLION, 4)
    assert KeyedIndices([], 0).epoch == 0


# --- the user's own samplers ----------------------------------------------------------------------------------------


def test_a_users_sampler_is_dealt_out() -> None:
    generator = torch.Generator().manual_seed(3)
    weighted = WeightedRandomSampler([0.1, 0.9, 2.0], num_samples=50, generator=generator)
    drawn = list(WeightedRandomSampler([0.1, 0.9, 2.0], 50, generator=torch.Generator().manual_seed(3)))
    order = SampledOrder(weighted)
    assert len(order) == 50
    read = [index for batch in dealt(Deal(len(order), 7, 1, 1), range(1), order) for index in batch]
    assert read == drawn
    assert all(type(index) is int for index in read)
    loader = DataLoader(range(3), batch_sampler=dealt(Deal(50, 7, 1, 1), range(1), order))
    assert torch.cat(list(loader)).tolist() == drawn
    assert len(list(loader)) == 8


def test_indices_that_are_no_integers_are_kept() -> None:
    drawn = [4, "a", ("b", 2), 1.5, 2**70]
    order = SampledOrder(iter(drawn))
    assert len(order) == 5
    assert [index for batch in dealt(Deal(5, 2, 1, 1), range(1), order) for index in batch] == drawn


@pytest.mark.slow
def test_integers_of_every_kind_take_eight_bytes() -> None:
    order = SampledOrder([np.int64(3), torch.tensor(2), 1])
    assert np.asarray(order(np.array([2, 0, 1]))).tolist() == [1, 3, 2]
    tracemalloc.start()
    try:
        held = SampledOrder(RandomSampler(range(200_000)))
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
    assert len(held) == 200_000


def test_an_empty_sampler_gives_an_empty_epoch() -> None:
    order = SampledOrder([])
    assert len(order) == 0
    assert list(dealt(Deal(0, 4, 2, 1), range(2), order)) == []
