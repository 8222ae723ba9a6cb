"""Task.all_gather: uneven shares, groups, disagreements of ranks, and gradients for all ranks."""

import re
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_cases import QUIET
from tiny import ManualUpdate
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato as lg
from legato.base.errors import ConfigError, DisagreementError, TaskError
from legato.trainer.processes.launch import run_workers

ROWS = torch.randn(18, 5, generator=torch.Generator().manual_seed(6))


@dataclass
class Box:
    value: torch.Tensor
    note: str


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


class Asks(lg.Task):
    """Calls `ask` in a hook or step of an evaluation and keeps the result."""

    def __init__(self, ask, at="on_validation_epoch_end"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.ask, self.at, self.seen, self.answer = ask, at, [], None

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(batch)
        if self.at == "validation_step":
            self.answer = self.ask(self, batch)

    def on_validation_epoch_end(self):
        if self.at == "on_validation_epoch_end":
            self.answer = self.ask(self, self.global_rank)


def asked(ask, samples=10, batch_size=2, processes=2, at="on_validation_epoch_end", loader=None, **options):
    """Return the result of `ask` on every rank, or the error's type and text."""
    task = Asks(ask, at)
    trainer = lg.Trainer(**{**QUIET, "strategy": "ddp", "devices": processes, **options})
    numbers = TensorDataset(torch.arange(samples, dtype=torch.float32))
    try:
        trainer.validate(task, loader or DataLoader(numbers, batch_size), verbose=False)
    except (DisagreementError, TaskError) as error:
        return type(error).__name__, str(error)
    return task.answer


def everything(task, rank):
    return {
        "tensor": torch.full((2, 3), float(rank)),
        "numbers": [rank, rank + 0.5, rank > 0, np.arange(2) + rank],
        "box": Box(torch.tensor(rank, dtype=torch.int16), "text"),
        "pair": Pair(torch.tensor([1 + 2j * rank]), rank),
        "odd": (torch.ones(1, dtype=torch.bfloat16) * rank, torch.zeros(0, 4), torch.tensor([rank == 0])),
        "other": None,
    }


def of_a_group(task, rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[rank == 2]
    results = task.all_gather(torch.tensor([rank]), group=mine), task.all_gather(rank, group=dist.group.WORLD)
    try:
        task.all_gather(torch.ones(1), group=groups[rank != 2])
    except TaskError as error:
        return *results, str(error)
    return results


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5.0))


ASKED = {
    "everything": lambda task, rank: task.all_gather(everything(task, rank)),
    "uneven": lambda task, rank: task.all_gather(torch.cat([batch[0] for batch in task.seen])),
    "strided": lambda task, rank: task.all_gather(torch.arange(6.0).view(2, 3).t()[rank:] + rank),
    "dtype": lambda task, rank: task.all_gather({"a": torch.ones(2, dtype=torch.int64 if rank else torch.float32)}),
    "columns": lambda task, rank: task.all_gather([torch.ones(1, 3), torch.ones(2, 4 + rank)]),
    "dimensions": lambda task, rank: task.all_gather(torch.ones((2,) * (1 + rank))),
    "numbers of tensors": lambda task, rank: task.all_gather([torch.ones(1)] * (2 + rank)),
}


def two_ranks():
    results = {name: asked(ask, 10 if name != "uneven" else 7) for name, ask in ASKED.items()}
    results["in steps"] = asked(lambda task, batch: task.all_gather(batch[0]), 8, at="validation_step")
    results["in uneven steps"] = asked(lambda task, batch: task.all_gather(batch[0]), 10, at="validation_step")
    return results


def every_rank(function):
    """Return the results of `function` on all ranks."""

    def work():
        indices = function()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, indices)
        return every

    return work


@pytest.fixture(scope="module")
def two():
    return run_workers(every_rank(two_ranks), 2)


@pytest.mark.slow
def test_everything_in_a_collection_comes_back_in_its_place(two):
    for rank in two:
        results = rank["everything"]
        assert results["tensor"].tolist() == [[[0.0] * 3] * 2, [[1.0] * 3] * 2]
        assert [item.tolist() for item in results["numbers"]] == [[0, 1], [0.5, 1.5], [False, True], [[0, 1], [1, 2]]]
        assert results["box"].value.tolist() == [0, 1]
        assert (results["box"].value.dtype, results["box"].note) == (torch.int16, "text")
        assert isinstance(results["pair"], Pair)
        assert results["pair"].left.tolist() == [[1], [1 + 2j]]
        assert results["pair"].right.tolist() == [0, 1]
        assert [tuple(item.shape) for item in results["odd"]] == [(2, 1), (2, 0, 4), (2, 1)]
        assert results["odd"][2].tolist() == [[True], [False]]
        assert results["other"] is None


@pytest.mark.slow
def test_uneven_shares_come_as_a_list(two):
    for rank in two:
        results = rank["uneven"]
        assert sorted(torch.cat(list(results)).tolist()) == list(range(7))
        assert [len(item) for item in results] == [4, 3]
        assert [tuple(item.shape) for item in rank["strided"]] == [(3, 2), (2, 2)]
        assert torch.equal(rank["strided"][1], torch.arange(6.0).view(2, 3).t()[1:] + 1)
        assert torch.cat(list(rank["in steps"])).tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "dtype",
            r"\[torch.float32 rows on cpu.*\] on rank 0, but \[torch.int64 rows on cpu.*\] on rank 1",
        ),
        ("columns", r"rows x 4 on cpu\] on rank 0, but \[.*rows x 5 on cpu\] on rank 1"),
        ("dimensions", r"rows on cpu\] on rank 0, but \[torch.float32 rows x 2 on cpu\] on rank 1"),
        ("numbers of tensors", r"\[torch.float32 rows on cpu, .*\] on rank 0, but \[.*, .*, .*\] on rank 1"),
    ],
)
def test_what_differs_is_named_on_every_rank(two, name, words):
    for rank in two:
        kind, message = rank[name]
        assert kind == "DisagreementError"
        assert re.search(words, message), message


@pytest.mark.slow
def test_in_steps_all_ranks_must_take_part(two):
    for kind, message in (rank["in uneven steps"] for rank in two):
        assert kind == "TaskError"
        assert "validation_step calls all_gather, which every rank must call the same number of times" in message
        assert "on_validation_epoch_end" in message


@pytest.mark.slow
def test_a_group_is_asked_and_no_other():
    for rank, results in enumerate(run_workers(every_rank(lambda: {"group": asked(of_a_group, processes=3)}), 3)):
        indices, world, refused = results["group"]
        assert indices.tolist() == ([[2]] if rank == 2 else [[0], [1]])
        assert world.tolist() == [0, 1, 2]
        assert f"rank {rank}, which is not in that group" in refused


@pytest.mark.slow
def test_an_unsized_stream_that_ends_unevenly_is_refused_when_it_does():
    """Rank 1 has no batch in the last round, and must not wait for the others silently."""
    stream = DataLoader(Unsized(), batch_size=1)
    trainer = lg.Trainer(**QUIET, strategy="ddp", devices=2)
    with pytest.raises(TaskError, match="the same number of times"):
        trainer.validate(Asks(lambda task, batch: task.all_gather(batch), "validation_step"), stream)


def test_one_process_has_one_rank():
    results = asked(lambda task, rank: task.all_gather({"x": torch.ones(2), "n": 3}), strategy="single", devices=1)
    assert results["x"].tolist() == [[1.0, 1.0]]
    assert results["n"].tolist() == [3]


# --- with a gradient --------------------------------------------------------------------------------------------------
class Contrastive(lg.Task):
    """Each rank's rows must find their partners among the rows of all ranks."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(5, 4), nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.options = {"sync_grads": True, **options}
        self.first_gradient = None

    def training_step(self, batch, batch_idx):
        ours, theirs = self.first(batch[0]), self.second(batch[0])
        every = list(self.all_gather(theirs, **self.options))
        indices = torch.arange(len(ours)) + sum(map(len, every[: self.global_rank]))
        loss = functional.cross_entropy(ours @ torch.cat(every).T, indices)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.first_gradient is None:
            self.first_gradient = [parameter.grad.clone() for parameter in self.parameters()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(ManualUpdate, Contrastive):
    pass


def train(task, rows=16, **options):
    trainer = lg.Trainer(**{**QUIET, "max_epochs": 1, "strategy": "ddp", "devices": 2, **options})
    trainer.fit(task, DataLoader(TensorDataset(ROWS[:rows]), 4))
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()]), task.first_gradient


def by_hand(sizes=((4, 4), (4, 4)), length=16):
    """Train on the batches of all ranks in one process: the mean over all rows, each against all columns.

    After `length` the rows repeat from the first.
    """
    task, start = Contrastive(), 0
    optimizer = task.configure_optimizers()
    for of_step in sizes:
        rows = ROWS[torch.arange(start, start + sum(of_step)) % length]
        start += sum(of_step)
        optimizer.zero_grad()
        functional.cross_entropy(task.first(rows) @ task.second(rows).T, torch.arange(len(rows))).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()])


class Frozen(Contrastive):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            with torch.no_grad():
                return self.all_gather(self.second(batch[0]), sync_grads=True)[0].sum()
        return super().training_step(batch, batch_idx)


def gradient_cases():
    return {
        "ddp": train(Contrastive())[0],
        "bitwise": train(Contrastive(), reproducible="bitwise")[0],
        "manual": train(Manual())[0],
        "short last batch": train(Contrastive(), rows=14)[0],
        "fsdp": train(Contrastive(), strategy="fsdp")[0],
        "of a group": train(Contrastive(group=dist.group.WORLD))[0],
        "accumulated": train(Contrastive(), accumulate_grad_batches=2, limit_train_batches=1)[0],
    }


@pytest.mark.slow
def test_a_contrastive_loss_over_two_processes_is_that_of_all_rows():
    results = run_workers(gradient_cases, 2)
    for name in ("ddp", "bitwise", "manual", "fsdp", "of a group"):
        torch.testing.assert_close(results[name], by_hand(), rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(results["short last batch"], by_hand(((4, 4), (4, 2))), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results["accumulated"], by_hand(((4, 4),)), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(results["ddp"], torch.cat([p.detach().flatten() for p in Contrastive().parameters()]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"strategy": "single", "devices": 1, "replicas": 2},
            r"over 2 replicas, which take turns on 1 process\.",
        ),
        ({"strategy": "data_parallel", "devices": 2}, r"strategy=data_parallel splits batches"),
        ({"rows": 18, "replicas": 2}, r"do not divide evenly among 2 replicas on 2 processes.*drop_last"),
        ({"strategy": {"name": "ddp", "elastic": True}}, "2 processes that may die"),
    ],
)
@pytest.mark.parametrize("with_gradient", [True, False])
def test_what_cannot_mean_the_same_is_refused_by_name(options, words, with_gradient):
    rows = options.get("rows", 16)
    options = {name: value for name, value in options.items() if name != "rows"}
    with pytest.raises(TaskError, match=words):
        train(Contrastive(sync_grads=with_gradient), rows, **options)


class ByTorch(Contrastive):
    """Gathers with torch's function, which needs equally many rows from each rank."""

    def training_step(self, batch, batch_idx):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.distributed.nn is deprecated
            import torch.distributed.nn as differentiable

            every = torch.cat(differentiable.all_gather(self.second(batch[0])))
        indices = torch.arange(len(batch[0])) + len(batch[0]) * self.global_rank
        return functional.cross_entropy(self.first(batch[0]) @ every.T, indices)


@pytest.mark.slow
def test_a_replica_of_each_process_may_call_torchs_collectives():
    torch.testing.assert_close(train(ByTorch())[0], by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Contrastive, ByTorch])
@pytest.mark.parametrize(("rows", "last"), [(13, (3, 3)), (14, (3, 3)), (9, (1, 1))])
def test_even_shares_let_a_contrastive_step_gather_as_many_rows_of_each_rank(kind, rows, last):
    results = train(kind(), rows, use_distributed_sampler="even")[0]
    sizes = ((4, 4), last)
    torch.testing.assert_close(results, by_hand(sizes, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_stream_cannot_be_made_even():
    trainer = lg.Trainer(**QUIET, strategy="ddp", devices=2, use_distributed_sampler="even")
    message = r"use_distributed_sampler='even' .* DataLoader over Unsized does not support random access"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Contrastive(), DataLoader(Unsized(), 1))


@pytest.mark.slow
def test_ranks_must_agree_on_whether_there_is_a_gradient():
    words = r"with a gradient\] on rank 0, but \[torch.float32 rows x 4 on cpu\] on rank 1"
    with pytest.raises(DisagreementError, match=words):
        train(Frozen())
