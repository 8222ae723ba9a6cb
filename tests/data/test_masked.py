"""Lockstep: every process runs as many batches as the one with the most; masked batches have no effect."""

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
    steps = []
    for process in range(processes):
        dealing = Dealing(Layout(replicas, processes), process, accumulate, lockstep=lockstep)
        loader = DataLoader(samples, size) if kind is DealtData else list(samples.split(size))
        steps.append(list(kind(loader, dealing).epoch(0)))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DealtData, StreamData])
def test_all_run_as_many_batches_and_none_of_their_own_changes(kind):
    for length, size, (replicas, processes), accumulate in SIZES:
        arguments = (kind, length, size, processes, replicas, accumulate)
        plain, together = steps_of(*arguments, lockstep=False), steps_of(*arguments, lockstep=True)
        for step, inputs in enumerate(zip(*together, strict=True)):
            most = len(inputs[0].batches)
            assert not inputs[0].masked
            assert most == max(len(share.batches) for share in inputs)
            first = [item.batch.tolist() for item in inputs[0].batches]
            for process, share in enumerate(inputs):
                alone = plain[process][step]
                assert [(item.replica, item.batch.tolist()) for item in share.batches] == [
                    (item.replica, item.batch.tolist()) for item in alone.batches
                ]
                assert (share.samples, share.rounds) == (alone.samples, alone.rounds)
                assert len(share.batches) + len(share.masked) == most
                assert all(item.masked and item.batch.tolist() in first for item in share.masked)
                assert not any(item.masked for item in (*share.batches, *alone.batches, *alone.masked))


def test_workers_load_masked_batches_too():
    dealing = Dealing(Layout(2, 2), 1, lockstep=True)
    data = EvaluationData([DataLoader(torch.arange(5), 2, num_workers=1)], dealing)
    batches = [(item.batch.tolist(), item.masked) for item in data.batches(0)]
    assert batches == [([2, 3], False), ([4], True)]
