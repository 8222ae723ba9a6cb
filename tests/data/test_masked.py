"""Lockstep: every process takes as many turns as the one with most; what it takes besides its own counts for none."""

from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader

from legato.trainer.data.dealing import DealtData, EvaluationData
from legato.trainer.data.sampling import Layout
from legato.trainer.data.steps import Dealing
from legato.trainer.data.streams import StreamData

SIZES = list(product((1, 2, 5, 13, 24), (1, 2, 3), ((1, 1), (4, 4), (5, 2), (5, 3), (6, 4)), (1, 2, 3)))


def steps_of(kind, length, size, processes, replicas, accumulate, lockstep):
    """Return each process's steps of an epoch."""
    samples = torch.arange(length)
    found = []
    for process in range(processes):
        dealing = Dealing(Layout(replicas, processes), process, accumulate, lockstep=lockstep)
        loader = DataLoader(samples, size) if kind is DealtData else list(samples.split(size))
        found.append(list(kind(loader, dealing).epoch(0)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DealtData, StreamData])
def test_all_take_as_many_turns_and_none_of_their_own_changes(kind):
    for length, size, (replicas, processes), accumulate in SIZES:
        arguments = (kind, length, size, processes, replicas, accumulate)
        plain, together = steps_of(*arguments, lockstep=False), steps_of(*arguments, lockstep=True)
        for step, turns in enumerate(zip(*together, strict=True)):
            most = len(turns[0].turns)
            assert not turns[0].masked
            assert most == max(len(one.turns) for one in turns)
            first = [turn.batch.tolist() for turn in turns[0].turns]
            for process, one in enumerate(turns):
                alone = plain[process][step]
                assert [(turn.replica, turn.batch.tolist()) for turn in one.turns] == [
                    (turn.replica, turn.batch.tolist()) for turn in alone.turns
                ]
                assert (one.samples, one.rounds) == (alone.samples, alone.rounds)
                assert len(one.turns) + len(one.masked) == most
                assert all(turn.masked and turn.batch.tolist() in first for turn in one.masked)
                assert not any(turn.masked for turn in (*one.turns, *alone.turns, *alone.masked))


def test_workers_load_masked_batches_too():
    dealing = Dealing(Layout(2, 2), 1, lockstep=True)
    data = EvaluationData([DataLoader(torch.arange(5), 2, num_workers=1)], dealing)
    turns = [(turn.batch.tolist(), turn.masked) for turn in data.batches(0)]
    assert turns == [([2, 3], False), ([4], True)]
