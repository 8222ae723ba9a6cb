"""Padded training data: all replicas have equally many samples in each round, as with torch's sampler."""

from itertools import chain, product

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import legato as lg
from legato.lab.sample_lookup import step_at
from legato.trainer.data.dealing import DealtData
from legato.trainer.data.sampling import Layout
from legato.trainer.data.steps import Dealing


class Pairs(Sampler):
    """Batches of two and then of three, over and over."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        return iter([[5 * n, 5 * n + 1, *[5 * n + 2] * (n % 2)] for n in range(self.batches)])


def steps_of(loader, replicas, processes=None, accumulate=1, start=0, limit=1.0):
    """Return the steps of an epoch on each process."""
    layout = Layout(replicas, processes or replicas)
    dealing = [Dealing(layout, rank, accumulate, seed=3, padded=True) for rank in range(layout.processes)]
    return [list(DealtData(loader, rank_dealing, limit).epoch(1, start)) for rank_dealing in dealing]


def batches(steps):
    """Return the samples of each batch of one process, by round."""
    return [(item.batch_idx, item.replica, item.batch.tolist()) for step in steps for item in step.batches]


def of_torch(length, batch_size, replicas, drop_last):
    """Return the batches of each rank under a DistributedSampler, one after the other."""
    samplers = [DistributedSampler(range(length), replicas, rank, shuffle=False) for rank in range(replicas)]
    loaders = [
        DataLoader(torch.arange(length), batch_size, sampler=sampler, drop_last=drop_last) for sampler in samplers
    ]
    return [[batch.tolist() for batch in loader] for loader in loaders]


SIZES = list(product((1, 2, 3, 5, 8, 13, 17, 24, 31), (1, 2, 4), (1, 2, 3, 5), (False, True)))


def test_each_round_has_the_samples_that_torchs_sampler_gives_its_ranks():
    for length, batch_size, replicas, drop_last in SIZES:
        loader = DataLoader(torch.arange(length), batch_size, drop_last=drop_last)
        ours = [batches(steps) for steps in steps_of(loader, replicas)]
        theirs = of_torch(length, batch_size, replicas, drop_last)
        assert [len(rank_batches) for rank_batches in ours] == [len(rank_batches) for rank_batches in theirs]
        for our_round, their_round in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
            assert [len(batch) for _, _, batch in our_round] == [len(batch) for batch in their_round]
            assert sorted(chain(*(batch for _, _, batch in our_round))) == sorted(chain(*their_round))


def test_weights_add_up_on_any_number_of_processes_and_from_any_step():
    for length, accumulate in product((5, 7, 23), (1, 2, 3)):
        loader = DataLoader(torch.arange(length), 2, shuffle=True)
        alone = steps_of(loader, 4, 1, accumulate)[0]
        for step in alone:
            assert step.is_full
            assert step.samples == sum(item.samples for item in step.batches)
            assert all(item.samples == len(item.batch) for item in step.batches)
            assert all(item.indices == item.batch.tolist() for item in step.batches)
        for processes, start in product((2, 3, 4), range(len(alone))):
            shares = steps_of(loader, 4, processes, accumulate, start)
            assert sorted(chain(*map(batches, shares))) == sorted(batches(alone[start:]))
            assert [step.samples for step in shares[-1]] == [step.samples for step in alone[start:]]


def test_a_repeated_sample_is_found_in_each_of_its_steps():
    data = DealtData(DataLoader(torch.arange(5), 1), Dealing(Layout(4, 1), 0, padded=True))
    seen = [[batch.indices for batch in step_at(data, 0, step).batches] for step in range(2)]
    assert seen == [[[0], [1], [2], [3]], [[4], [0], [1], [2]]]


def test_a_limit_within_the_data_leaves_nothing_to_repeat():
    steps_by_rank = steps_of(DataLoader(torch.arange(17), 2), 3, limit=2)
    assert [[len(batch) for _, _, batch in batches(steps)] for steps in steps_by_rank] == [[2, 2]] * 3


def test_batches_of_ones_own_sampler_are_repeated_whole():
    steps_by_rank = steps_of(DataLoader(torch.arange(25), batch_sampler=Pairs(5)), 3)
    assert [batches(steps)[1] for steps in steps_by_rank] == [(1, 0, [15, 16, 17]), (1, 1, [20, 21]), (1, 2, [0, 1])]
    assert [steps[1].samples for steps in steps_by_rank] == [7] * 3


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_loaders_that_are_combined_are_filled_up_each_by_itself(mode):
    """So that the batches of a round are of one size, and as many as with one torch sampler for each loader."""
    for lengths, replicas in product(((17, 9), (8, 21), (3, 4)), (1, 2, 3)):
        parts = [DataLoader(torch.arange(length), 4) for length in lengths]
        steps_by_rank = steps_of(lg.CombinedLoader(parts, mode), replicas)
        rounds = [len(of_torch(length, 4, replicas, drop_last=False)[0]) for length in lengths]
        total = min(rounds) if mode == "min_size" else max(rounds)
        assert [len(steps) for steps in steps_by_rank] == [total] * replicas
        for steps in zip(*steps_by_rank, strict=True):
            parts_of = [[*step.batches[0].batch] for step in steps]
            shapes = [[tensor.shape for tensor in of_replica] for of_replica in parts_of]
            assert shapes == shapes[:1] * replicas
            sizes = [step.batches[0].samples for step in steps]
            assert sizes == sizes[:1] * replicas
            assert steps[0].samples == sum(sizes)


def test_a_combined_loader_gives_what_torchs_sampler_gives_of_each():
    parts = {"long": DataLoader(torch.arange(17), 4), "short": DataLoader(torch.arange(9), 2)}
    steps_by_rank = steps_of(lg.CombinedLoader(parts, "min_size"), 2)
    for name, length, size in (("long", 17, 4), ("short", 9, 2)):
        theirs = of_torch(length, size, 2, drop_last=False)
        for step, round_steps in enumerate(zip(*steps_by_rank, strict=True)):
            ours = chain(*(rank_step.batches[0].batch[name].tolist() for rank_step in round_steps))
            assert sorted(ours) == sorted(theirs[0][step] + theirs[1][step])
    data = DealtData(lg.CombinedLoader(parts, "min_size"), Dealing(Layout(2, 1), 0, padded=True))
    seen = [batch.indices_by_loader for step in range(3) for batch in step_at(data, 0, step).batches]
    with_first = {number // 2 for number, batch in enumerate(seen) if any(0 in indices for indices in batch.values())}
    assert with_first == {0, 2}  # sample 0 of both loaders is repeated in the last step
