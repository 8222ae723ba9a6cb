"""Gradients under manual optimization are averaged over ranks, in one collective per dtype or in the tree."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from collectives import count_collectives
from ddp_cases import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.base.errors import TaskError
from legato.base.place import find_place
from legato.trainer.processes import ranks
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.rendezvous import join_process_group, leave_process_group

pytestmark = pytest.mark.slow


COLLECTIVES = ("all_reduce", "all_gather", "all_to_all_single", "broadcast")
ROWS = torch.randn(24, 7, generator=torch.Generator().manual_seed(4))


class Hundred(lg.Task):
    """A hundred parameters of one dtype, and others: in float64, used only by rank 1, unused."""

    automatic_optimization = False

    def __init__(self, odd=True, sparse=True):
        super().__init__()
        torch.manual_seed(3)
        self.many = nn.ParameterList(nn.Parameter(torch.randn(7)) for _ in range(100))
        self.odd = odd
        if odd:
            self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.seldom, self.never = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.table = nn.Embedding(9, 4, sparse=sparse)
            self.rare_table = nn.Embedding(9, 4, sparse=sparse)
        self.counts, self.gradients = [], []

    def loss(self, rows, rank):
        loss = sum((rows @ weight).square().mean() * (index % 7 - 3) for index, weight in enumerate(self.many))
        if self.odd:
            loss = loss + (self.wide * rows.mean()).sum().float() + self.table(torch.arange(rank, rank + 3)).sum()
            if rank == 1:
                loss = loss + self.seldom.sum() * 3 + self.rare_table(torch.tensor([5])).sum()
        return loss

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0], self.global_rank))
        _, counts = count_collectives(COLLECTIVES, optimizer.step)
        self.counts.append(counts)
        grads = {name: parameter.grad for name, parameter in self.named_parameters()}
        self.gradients.append({name: None if g is None else g.to_dense().clone() for name, g in grads.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(task, processes, **options):
    loader = DataLoader(TensorDataset(ROWS), 4)
    trainer = lg.Trainer(
        **{**QUIET, "max_epochs": 1, "nan": "ignore", "strategy": "ddp", "devices": processes, **options}
    )
    trainer.fit(task, loader)
    return task.counts, task.gradients


def by_hand(task, start, processes):
    """Return the mean of the ranks' gradients of the batches from `start` on, in the tree's order for 2 and 3 ranks."""
    every = []
    for rank in range(processes):
        task.zero_grad()
        task.loss(ROWS[start + 4 * rank : start + 4 * rank + 4], rank).backward()
        every.append([None if weight.grad is None else weight.grad.to_dense().clone() for weight in task.parameters()])
    results = []
    for gradients in zip(*every, strict=True):
        there = [gradient for gradient in gradients if gradient is not None]
        results.append(sum(there[1:], there[0]) / processes if there else None)
    return results


class Undeclared(Hundred):
    """Has a sparse gradient without an Embedding(sparse=True)."""

    def __init__(self):
        super().__init__(odd=False)
        self.rows = nn.Parameter(torch.ones(5, 2))

    def loss(self, rows, rank):
        return super().loss(rows, rank) + nn.functional.embedding(torch.tensor([1]), self.rows, sparse=True).sum()


def cases():
    results = {name: train(Hundred(odd=False), 2, reproducible=name) for name in ("order", "bitwise")}
    results["odd"] = train(Hundred(), 2)
    results["odd in the tree"] = train(Hundred(sparse=False), 2, reproducible="bitwise")
    return results


@pytest.fixture(scope="module")
def two():
    return run_workers(cases, 2)


def test_a_hundred_parameters_take_one_collective(two):
    counts, gradients = two["order"]
    assert counts == [{"all_reduce": 1}] * 3
    assert two["bitwise"][0] == [{"all_to_all_single": 1}] * 3  # and an all-gather
    for name in ("order", "bitwise"):
        for actual, expected in zip(two[name][1][0].values(), by_hand(Hundred(odd=False), 0, 2), strict=True):
            assert torch.equal(actual, expected), name
    last = zip(gradients[2].values(), two["bitwise"][1][2].values(), strict=True)
    assert all(torch.equal(gradient, target) for gradient, target in last)


@pytest.mark.parametrize("name", ["odd", "odd in the tree"])
def test_other_types_sparse_and_unused_parameters_are_averaged_too(two, name):
    counts, gradients = two[name]
    if name == "odd":
        assert counts == [{"all_reduce": 4}] * 3  # for float32, for float64 and for two sparse gradients
    for actual, expected in zip(gradients[0].values(), by_hand(Hundred(), 0, 2), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or torch.equal(actual, expected)
    assert gradients[0]["never"] is None
    assert gradients[0]["seldom"].tolist() == [1.5, 1.5]


def test_three_ranks_sum_in_the_tree():
    _, gradients = run_workers(lambda: train(Hundred(odd=False), 3, reproducible="bitwise"), 3)
    for actual, expected in zip(gradients[0].values(), by_hand(Hundred(odd=False), 0, 3), strict=True):
        assert torch.equal(actual, expected)


def test_a_sparse_gradient_without_an_embedding_is_named():
    with pytest.raises(
        TaskError, match=r"shape \(5, 2\) has a sparse gradient\. .* only the weight of an Embedding\(sparse=True\) may"
    ):
        train(Undeclared(), 2)


def shared_in_pieces():
    """Return every rank's tensors after a broadcast, and the bytes of each piece that was sent."""
    place = find_place()
    join_process_group(place, "gloo", timedelta(seconds=60))
    pair, broadcast, sent = ranks.Ranks(place.rank, 2), torch.distributed.broadcast, []
    torch.manual_seed(place.rank)
    tensors = [torch.randn(30, 50).T, *(torch.randn(7, dtype=kind) for kind in (torch.float64, torch.bfloat16) * 20)]
    tensors += [torch.tensor(place.rank), torch.ones(3, dtype=torch.int16) * place.rank, torch.empty(0)]

    def noting(flat, **options):
        sent.append(flat.nbytes)
        broadcast(flat, **options)

    with patch.object(torch.distributed, "broadcast", noting), patch.object(ranks, "PIECE", 500):
        pair.broadcast_tensors(tensors)
    every = pair.gather_objects(tensors)
    leave_process_group()
    return every, sent


def test_weights_are_broadcast_in_pieces_of_bounded_size():
    (first, second), sent = run_workers(shared_in_pieces, 2)
    assert all(map(torch.equal, first, second))
    assert first[-3] == 0
    assert [size for size in sent if size > 500] == [30 * 50 * 4]  # alone, without a copy
    assert sum(sent) == sum(tensor.nbytes for tensor in first)
    assert len(sent) > 3
