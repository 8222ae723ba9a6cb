"""Any number of processes makes the same steps: samples, random numbers, learning rates and weights."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import legato as lg
from legato.base.errors import LegatoError
from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.slow


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
    "seed": 5,
}


def draw():
    """Draw from each generator that a user might use."""
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


class Augmented(Dataset):
    """Samples that know their number and what was drawn when they were loaded."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, *draw()], dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return (torch.tensor([index, *draw()], dtype=torch.float64) for index in range(self.length))


class Backwards(Sampler):
    """Counts down from a start that depends on the epoch set by set_epoch."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return ((index + self.epoch) % self.length for index in reversed(range(self.length)))


class UnevenBatches(Sampler):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples in a random order."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        order, size = torch.randperm(self.length).tolist(), 0
        while order:
            size = size % 3 + 1
            yield order[:size]
            order = order[size:]


def make_loader(kind, length, batch_size, drop_last, workers=0):
    dataset = Augmented(length)
    options = {"batch_size": batch_size, "drop_last": drop_last, "num_workers": workers}
    if kind == "stream":
        return DataLoader(Stream(length), **options)
    if kind == "batches":
        return DataLoader(dataset, batch_sampler=UnevenBatches(length), num_workers=workers)
    samplers = {
        "subset": lambda: SubsetRandomSampler(range(0, length, 2)),
        "weighted": lambda: WeightedRandomSampler([1.0 + index for index in range(length)], length + 1),
        "replaced": lambda: RandomSampler(dataset, replacement=True, num_samples=length),
        "backwards": lambda: Backwards(length),
    }
    if kind in samplers:
        return DataLoader(dataset, sampler=samplers[kind](), **options)
    return DataLoader(dataset, shuffle=kind == "shuffle", **options)


class Recorder(lg.Task):
    """Records the samples and random numbers of each step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
        self.seen = []

    def on_train_epoch_start(self):
        self.of_epoch = draw()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return torch.cat([batch, torch.rand(len(batch), 1, dtype=torch.float64)], 1)

    def training_step(self, batch, batch_idx):
        place = self.global_step, self.trainer.metrics.replica, batch_idx
        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.seen.append((*place, batch.tolist(), draw(), self.of_epoch, rates))
        scale = torch.tensor([0.1, 1, 1, 1], dtype=torch.float64)
        loss = (self.model(batch[:, :4] * scale) - batch[:, 4:]).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(case, processes):
    """Train, and return all processes' records on every process; or the error."""
    task = Recorder()
    strategy = {"strategy": "ddp", "devices": processes} if processes > 1 else {"strategy": "single"}
    trainer = lg.Trainer(**{**QUIET, **strategy}, replicas=case["replicas"], accumulate_grad_batches=case["accumulate"])
    names = ("kind", "length", "batch_size", "drop_last")
    try:
        trainer.fit(task, make_loader(*(case[name] for name in names), case.get("workers", 0)))
    except LegatoError as error:
        return str(error)
    state = trainer.state
    return {
        "seen": sorted(entry for rank in trainer.strategy.collectives.gather_objects(task.seen) for entry in rank),
        "counts": (state.global_step, state.epoch, state.samples_seen, state.rounds),
        "weights": torch.cat([parameter.flatten() for parameter in task.parameters()]).detach(),
        "loss": float(trainer.callback_metrics["loss"]),
    }


def same(ours, theirs):
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours == theirs
    return (
        ours["seen"] == theirs["seen"]
        and ours["counts"] == theirs["counts"]
        and torch.allclose(ours["weights"], theirs["weights"], rtol=0, atol=1e-5)
        and ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    )


def compare(cases):
    """Run every case on every number of processes that it allows, and in one."""
    expected = [run(case, 1) for case in cases]
    for processes in range(2, 1 + max(case["replicas"] for case in cases)):
        chosen = [index for index, case in enumerate(cases) if case["replicas"] >= processes]
        results = run_workers(
            lambda indices=chosen, count=processes: [run(cases[i], count) for i in indices], processes
        )
        for index, result in zip(chosen, results, strict=True):
            assert same(result, expected[index]), (processes, cases[index])
    return expected


KINDS = ("order", "shuffle", "subset", "weighted", "replaced", "backwards", "batches", "stream")
CASES = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 4),
        "kind": st.sampled_from(KINDS),
        "length": st.integers(1, 33),
        "batch_size": st.integers(1, 5),
        "drop_last": st.booleans(),
        "accumulate": st.integers(1, 3),
    }
)


@settings(
    max_examples=2,  # the simplest one, which starts no processes, and a random one
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # an example takes seconds: a failure is not made smaller
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(CASES, min_size=12, max_size=12))
def test_the_steps_do_not_depend_on_the_number_of_processes(cases):
    compare(cases)


def test_every_kind_of_order_is_the_same_on_one_to_four_processes():
    """With a last round in which not every replica has a batch, let alone a full one."""
    shared = {"length": 29, "batch_size": 3, "drop_last": False, "accumulate": 2, "replicas": 4}
    results = compare([{**shared, "kind": kind} for kind in KINDS])
    for kind, result in zip(KINDS, results, strict=True):
        assert result["counts"][1] == 2
        wanted = {"subset": 15, "weighted": 30}.get(kind, 29)
        assert result["counts"][2] == 2 * wanted, kind
        epochs = [
            [int(row[0]) for entry in result["seen"] for row in entry[3] if (entry[0] >= 2) == late] for late in (0, 1)
        ]
        if kind not in ("subset", "weighted", "replaced"):
            assert [sorted(epoch) for epoch in epochs] == [list(range(29))] * 2, kind
        if kind not in ("order", "stream"):
            assert epochs[0] != epochs[1], kind


def test_the_steps_do_not_depend_on_workers_that_load():
    shared = {"length": 14, "batch_size": 3, "drop_last": False, "accumulate": 1, "replicas": 3, "kind": "shuffle"}
    without, with_two = compare([shared, {**shared, "workers": 2}])
    assert same(without, with_two)


class MovingAverage(lg.Task):
    """Uses a buffer in its step that each step changes, as codebooks and centred losses do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(1, dtype=torch.float64))
        self.used = []

    def training_step(self, batch, batch_idx):
        self.used.append((self.global_step, self.trainer.metrics.replica, batch_idx, self.centre.item()))
        loss = (self.weight * batch[:, 0] / 10 - self.centre).pow(2).mean()
        self.centre += 0.1 * (batch[:, 0].mean() / 10 - self.centre)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_every_replica_begins_a_step_with_the_buffers_of_the_first():
    def train(processes):
        task = MovingAverage()
        strategy = {"strategy": "ddp", "devices": processes} if processes > 1 else {"strategy": "single"}
        trainer = lg.Trainer(**{**QUIET, **strategy}, replicas=5, accumulate_grad_batches=2)
        trainer.fit(task, DataLoader(Augmented(47), 3, shuffle=True))
        used = sorted(entry for rank in trainer.strategy.collectives.gather_objects(task.used) for entry in rank)
        return used, task.centre.item(), task.weight.item()

    used, centre, weight = train(1)
    starts = {}
    for step, _, batch_idx, value in used:
        if batch_idx % 2 == 0:
            starts.setdefault(step, set()).add(value)
    assert all(len(values) == 1 for values in starts.values())
    assert len(set.union(*starts.values())) == len(starts) == 4
    for processes in (2, 3):
        theirs = run_workers(lambda count=processes: train(count), processes)
        assert theirs[0] == used
        assert theirs[1] == centre
        assert theirs[2] == pytest.approx(weight, abs=1e-9)


class Centred(lg.Task):
    """The loss is a mean, so that batches of different sizes must be weighted by their samples."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return (self.place - batch[:, 0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_short_last_step_is_a_mean_over_its_samples(accumulate):
    """Whoever divides a last window of one batch by four gets a gradient of 0.25 instead of 1."""
    for processes in (1, 2):

        def train(processes=processes):
            task = Centred()
            strategy = {"strategy": "ddp", "devices": processes} if processes > 1 else {"strategy": "single"}
            arguments = {**QUIET, **strategy, "max_epochs": 1, "replicas": 2}
            trainer = lg.Trainer(**arguments, accumulate_grad_batches=accumulate)
            trainer.fit(task, DataLoader(Augmented(17), 2))
            return task.place.item(), trainer.global_step

        place, steps = run_workers(train, 2) if processes > 1 else train()
        assert place == pytest.approx(-steps)
        assert steps == -(-9 // (2 * accumulate))
