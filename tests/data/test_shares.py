"""Data of which each process reads its own share, from a sampler, a stream or a dataset: recognized by comparison."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from shared_processes import run_cases
from torch import distributed, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

import legato as lg
from legato.base.errors import ConfigError, DataError, LegatoError
from legato.trainer.data.shares import are_shares, differ, hashes_of
from legato.trainer.processes.ranks import Ranks

pytestmark = pytest.mark.slow


def place():
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


class Numbers(Dataset):
    """Numbers of a range, with noise from its own generator or the global one."""

    def __init__(self, numbers, noise=None):
        self.numbers, self.noise = numbers, noise
        self.generator = np.random.default_rng()

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        drawn = {"own": self.generator.random, "global": lambda: torch.rand(()).item()}.get(self.noise, lambda: 0.0)()
        return torch.tensor([float(self.numbers[index]), drawn])


class Stream(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return (torch.tensor([float(number), 0.0]) for number in self.numbers)


class StripedSampler(Sampler):
    """The share of this rank, by a sampler of no class that is known."""

    def __init__(self, length):
        self.indices = range(length)[place()[0] :: place()[1]]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class OtherSampler(DistributedSampler):
    """A DistributedSampler of one's own."""


class OtherBatches(BatchSampler):
    """A batch sampler of one's own."""


class Sum(lg.Task):
    """A weight that a step lowers by the mean of its samples; records the samples."""

    def __init__(self, train, validate=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.train_on, self.validate_on = train, validate
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        if isinstance(batch, list):  # of combined loaders
            batch = torch.cat([piece for piece in batch if piece is not None])
        self.trained += batch[:, 0].tolist()
        return (self.weight * batch[:, 0]).mean()

    def validation_step(self, batch, batch_idx):
        if isinstance(batch, list):
            batch = torch.cat([piece for piece in batch if piece is not None])
        self.validated += batch[:, 0].tolist()

    def train_dataloader(self):
        return self.train_on()

    def val_dataloader(self):
        return self.validate_on() if self.validate_on else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"max_epochs": 1, "num_sanity_val_steps": 0, "accelerator": "cpu", "save_code": False}


def train(train, validate=None, **options):
    """Return all ranks' training and validation samples, the weight and the steps; or the error's text."""
    layout = {"strategy": "ddp", "devices": place()[1]}
    task, trainer = Sum(train, validate), lg.Trainer(**{**QUIET, **layout, **options})
    try:
        trainer.fit(task)
    except LegatoError as error:
        return f"{type(error).__name__}: {error}", trainer.global_step
    every = trainer.strategy.collectives.gather_objects((task.trained, task.validated))
    trained, validated = (sorted(value for rank in ranks for value in rank) for ranks in zip(*every, strict=True))
    return trained, validated, task.weight.item(), trainer.global_step


def share(numbers):
    return numbers[place()[0] :: place()[1]]


SHARES = {
    "a sampler": lambda: DataLoader(Numbers(range(61)), 4, sampler=OtherSampler(range(61), shuffle=False)),
    "a shuffled sampler": lambda: DataLoader(Numbers(range(61)), 4, sampler=OtherSampler(range(61))),
    "a sampler of batches": lambda: DataLoader(
        Numbers(range(61)), batch_sampler=OtherBatches(DistributedSampler(range(61)), 4, False)
    ),
    "a dataset": lambda: DataLoader(Numbers(share(range(61))), 4, shuffle=True),
    "a dataset with noise": lambda: DataLoader(Numbers(share(range(61)), "global"), 4, num_workers=1),
    "a weighted dataset": lambda: DataLoader(
        Numbers(share(range(61))), 4, sampler=WeightedRandomSampler([1.0] * len(share(range(61))), 30, False)
    ),
    "a stream": lambda: DataLoader(Stream(share(range(61))), 4),
    "a generator": lambda: (batch for batch in DataLoader(Stream(share(range(61))), 4)),
    "combined": lambda: lg.CombinedLoader(
        [DataLoader(Numbers(share(range(30))), 2), DataLoader(Stream(share(range(30, 61))), 2)], "max_size"
    ),
}
SAME = {
    "noise of its own": lambda: DataLoader(Numbers(range(61), "own"), 4),
    "noise of its own, in a worker": lambda: DataLoader(Numbers(range(61), "own"), 4, shuffle=True, num_workers=1),
    "other samplers": lambda: DataLoader(Numbers(range(61)), batch_sampler=OtherBatches(range(61), 4, False)),
    "a DistributedSampler": lambda: DataLoader(Numbers(range(61)), 4, sampler=DistributedSampler(range(61))),
    "a stream": lambda: DataLoader(Stream(range(61)), 4),
    "few samples": lambda: DataLoader(Numbers(range(2)), 1),
    "equal samples": lambda: DataLoader(Numbers([7] * 61), 4),
}


def saved(folder):
    return {"default_root_dir": folder, "enable_checkpointing": True, "max_epochs": 2}


def stop(make, folder):
    """Return the samples of a whole run, and those of one that stops; a copy of the folder is for another resume."""
    undisturbed, stopped = train(make, max_epochs=2), train(make, max_steps=11, **saved(folder))
    if place()[0] == 0:
        shutil.copytree(folder, f"{folder} again")
    return undisturbed[0], stopped[0]


def resume(make, folder, **options):
    trainer, task = lg.Trainer(**{**QUIET, **saved(folder), **options}), Sum(make)
    trainer.fit(task, resume="auto")
    return [value for rank in trainer.strategy.collectives.gather_objects(task.trained) for value in rank]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what each case has trained and validated on, or its error's text; all from one start."""
    folder = tmp_path_factory.mktemp("shares")
    # only streams of one epoch can be read from a generator
    cases = {("shares", name): partial(train, make, make) for name, make in SHARES.items()}
    cases |= {("same", name): partial(train, make, make, max_epochs=2) for name, make in SAME.items()}
    cases |= {("refused", name): partial(train, make, **options) for name, (make, options, _) in REFUSED.items()}
    cases["evaluation"] = lambda: train(
        SHARES["a stream"], lambda: DataLoader(Numbers(range(61)), 4), use_distributed_sampler=False
    )
    for name in RESUMED:
        cases["stopped", name] = partial(stop, SHARES[name], folder / name)
        cases["resumed", name] = partial(resume, SHARES[name], folder / name, strategy="ddp", devices=2)
    results = run_cases(cases, 2, folder / "cases", threads=1)
    results["folder"] = folder
    return results


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_61_samples_are_trained_on_and_validated_once(results, name):
    trained, validated, _, steps = results["shares", name]
    expected = list(range(61))
    if name == "a weighted dataset":  # which draws 30 of the 31 samples of rank 0
        expected.remove(next(iter(set(expected) - set(trained))))
    assert trained == expected
    assert steps == 8
    if name != "a weighted dataset":
        assert validated == expected


@pytest.mark.parametrize("name", SAME)
def test_the_same_data_are_dealt_out(results, name):
    trained, validated, _, steps = results["same", name]
    samples, size = (2, 1) if name == "few samples" else (61, 4)
    expected = [7] * 61 if name == "equal samples" else list(range(samples))
    assert trained == validated == sorted(2 * expected)
    assert steps == 2 * -(-samples // (2 * size))


REFUSED = {
    "a sampler by rank": (
        lambda: DataLoader(Numbers(range(60)), 4, sampler=StripedSampler(60)),
        {},
        "DataError: The processes read different data in the order that a sampler drew for epoch 0",
    ),
    "a sampler of another rank": (
        lambda: DataLoader(Numbers(range(61)), 4, sampler=OtherSampler(range(61), 3, place()[0] + 1)),
        {},
        "DataError: A OtherSampler has num_replicas=3",
    ),
    "no shares": (
        lambda: DataLoader(Numbers(range(61)), 4),
        {"use_distributed_sampler": False},
        "DataError: All 2 processes read the same data in epoch 0 of DataLoader",
    ),
    "shares of some loaders": (
        lambda: [DataLoader(Stream(share(range(30))), 2), DataLoader(Stream(range(30)), 2)],
        {},
        "DataError: The processes read different data from the combined loaders 0, but the same data from 1",
    ),
    "bitwise": (
        lambda: DataLoader(Stream(share(range(61))), 4),
        {"reproducible": "bitwise"},
        "loader yields its own share of the training data (they read different samples). Under reproducible='bitwise'",
    ),
    "more replicas": (
        lambda: DataLoader(Stream(share(range(61))), 4),
        {"replicas": 3},
        "there are 3 replicas on 2 processes. Set trainer.replicas=2",
    ),
    "fsdp": (
        lambda: DataLoader(Numbers(range(61)), 4, sampler=OtherSampler(range(61))),
        {"strategy": "fsdp"},
        "under this strategy all processes must run the same number of batches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_before_the_first_step(results, name):
    error, steps = results["refused", name]
    assert REFUSED[name][-1] in error
    assert steps == 0


def test_an_evaluation_of_the_same_data_is_dealt_out_though_shares_are_expected(results):
    trained, validated, _, _ = results["evaluation"]
    assert trained == validated == list(range(61))


RESUMED = ("a stream", "a dataset")


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_on_shares_resumes_on_as_many_processes_alone(results, name):
    undisturbed, stopped = results["stopped", name]
    with pytest.raises(
        ConfigError,
        match=r"own share .* \(as when the run started\).* Start 2 processes, as many as when the run started",
    ):
        resume(SHARES[name], f"{results['folder'] / name} again", strategy="single")
    assert sorted(stopped + results["resumed", name]) == undisturbed


class Told(Ranks):
    """Two ranks, the other of which has read different samples."""

    size = 2

    def gather_objects(self, value):
        data_rank, samples = value
        return [value, (data_rank, {name: [tuple(index + 1 for index in read)] for name, (read,) in samples.items()})]


def test_ranks_that_work_on_the_same_batches_must_read_the_same():
    with pytest.raises(DataError, match="Ranks 0, 1 work on the same batches but read different data"):
        are_shares({"": [(1, 2)]}, Told(), 0)


def test_hashes_are_of_what_a_batch_holds():
    batch = {"x": torch.ones(2, dtype=torch.bfloat16), "more": [np.arange(3), "text", 1, None], "of": Numbers([1])}
    again = {"x": torch.ones(2, dtype=torch.bfloat16), "more": [np.arange(3), "text", 1, None], "of": Numbers([1])}
    del batch["of"].generator, again["of"].generator
    assert hashes_of(batch) == hashes_of(again)
    assert hashes_of(batch) != hashes_of({**again, "x": torch.ones(2)})
    batch["more"].append(batch)  # a cycle ends
    assert len(hashes_of(batch)) == len(hashes_of(again))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([[(1, 2)], [(1, 2)]], False),
        ([[(1, 2)], [(1, 3)]], True),
        ([[(1, None)], [(1, 3)]], False),  # noise
        ([[(1,), (2,), (3,)], [(1,), (4,), (5,)]], True),
        ([[(1,), (2,), (3,)], [(1,), (2,), (5,)]], False),
        ([[(1,)], [()]], True),  # one rank has no batch
        ([[], [(1,)]], False),
        ([[None], [(1,)]], False),
    ],
)
def test_most_samples_must_differ(ranks, expected):
    assert differ(ranks) == expected
