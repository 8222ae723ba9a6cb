"""Data that do not divide evenly into the batches of several ranks: as in Lightning, each rank has a batch per step.

Compared with a hand-written loop here, and with Lightning on two processes in test_parity.py.
"""

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from tiny import ManualUpdate
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato.compat.lightning.pytorch as pl
from legato.base.errors import ConfigError
from legato.trainer.processes.launch import run_workers

pytestmark = pytest.mark.slow

ROWS = torch.randn(14, 5, generator=torch.Generator().manual_seed(6))
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"logger": False, "enable_checkpointing": False}


class Contrastive(pl.LightningModule):
    """The rows of each rank must find their partners among the rows of all ranks, which must be equally many."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4)
        self.ended = []

    def training_step(self, batch, batch_idx):
        ours, theirs = self.first(batch[0]), self.second(batch[0])
        row_numbers = torch.arange(len(ours)) + self.global_rank * len(ours)
        every = self.all_gather(theirs, sync_grads=True).flatten(0, 1)
        return functional.cross_entropy(ours @ every.T, row_numbers)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append((batch_idx, len(batch[0])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByHand(ManualUpdate, Contrastive):
    pass


class Metered(Contrastive):
    """A metric that communicates with the other ranks in each step."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric(dist_sync_on_step=True)
        self.means = []

    def training_step(self, batch, batch_idx):
        self.means.append(round(float(self.mean(batch[0])), 5))
        return self.first(batch[0]).pow(2).mean() + self.second(batch[0]).pow(2).mean()


class Normalized(Contrastive):
    """Batch norm over all ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch, batch_idx):
        return (self.norm(self.first(batch[0])) * self.second(batch[0])).pow(2).mean()


class Own(Contrastive):
    """Uses no values of other ranks; records the step of each row."""

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self.first(batch[0]), self.second(batch[0]).tanh() + 1)


def fit(module, processes, rows=14, path=None, **options):
    trainer = pl.Trainer(**{**QUIET, "strategy": "ddp_spawn", "devices": processes, "max_epochs": 2, **options})
    trainer.fit(module, DataLoader(TensorDataset(ROWS[:rows]), 2), ckpt_path=path)
    return trainer


def trained(module, processes, rows=14, **options):
    """Return the weights, and the rows that each rank has seen."""
    fit(module, processes, rows, **options)
    every = [None] * processes
    dist.all_gather_object(every, (module.ended, getattr(module, "means", None)))
    return weights(module), [ended for ended, _ in every], every[0][1]


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def by_hand(module, loss, *steps):
    """Train for two epochs in one process on the rows of all ranks at each step."""
    optimizer = module.configure_optimizers()
    for rows in steps * 2:
        optimizer.zero_grad()
        loss(module, ROWS[list(rows)]).backward()
        optimizer.step()
    return weights(module)


def contrast(module, rows):
    return functional.cross_entropy(module.first(rows) @ module.second(rows).T, torch.arange(len(rows)))


def normalized(module, rows):
    return (module.norm(module.first(rows)) * module.second(rows)).pow(2).mean()


class Stream(IterableDataset):
    def __iter__(self):
        return zip(ROWS)


class SplitStream(IterableDataset):
    def __iter__(self):
        return zip(ROWS[dist.get_rank() :: dist.get_world_size()])


def fit_stream(data):
    """Return the rows of a stream that each rank has seen."""
    module = Own()
    trainer = pl.Trainer(**{**QUIET, "strategy": "ddp_spawn", "devices": 2, "max_epochs": 1})
    trainer.fit(module, DataLoader(data, 2))
    every = [None] * 2
    dist.all_gather_object(every, module.ended)
    return every


def three_ranks(folder):
    results = {
        "ddp": trained(Contrastive(), 3),
        "by hand": trained(ByHand(), 3),
        "a window": trained(Contrastive(), 3, accumulate_grad_batches=3),
        "fewer than ranks": trained(Contrastive(), 3, rows=2),
        "a metric": trained(Metered(), 3),
        "batch norm": trained(Normalized(), 3, sync_batchnorm=True),
    }
    full = Own()
    fit(full, 3)
    results["whole"] = weights(full), None, None
    fit(Own(), 3, max_steps=4).save_checkpoint(folder / "within")  # one step into the second epoch
    return results


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return folder, run_workers(lambda: three_ranks(folder), 3)


STEPS = range(6), range(6, 12), (12, 13, 0)
"""The rows of the steps of an epoch: two for each of three ranks, then one each, of which one is repeated."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", lambda: by_hand(Contrastive(), contrast, *STEPS)),
        ("by hand", lambda: by_hand(Contrastive(), contrast, *STEPS)),
        ("fewer than ranks", lambda: by_hand(Contrastive(), contrast, (0, 1, 0))),
        ("batch norm", lambda: by_hand(Normalized(), normalized, *STEPS)),
    ],
)
def test_a_step_that_calls_collectives_trains_as_by_hand(three, name, expected):
    _, results = three
    torch.testing.assert_close(results[name][0], expected(), rtol=1e-5, atol=1e-6)


def test_every_rank_ends_every_batch(three):
    _, results = three
    for name in ("ddp", "by hand", "a window", "a metric", "batch norm"):
        assert results[name][1] == [[(0, 2), (1, 2), (2, 1)] * 2] * 3
    assert results["fewer than ranks"][1] == [[(0, 1)] * 2] * 3
    assert results["a metric"][2] == [round(float(ROWS[list(rows)].mean()), 5) for rows in STEPS * 2]


def test_a_resume_on_fewer_processes_repeats_the_same_samples(three):
    folder, results = three
    module = Own()
    fit(module, 1, strategy="auto", path=folder / "within")
    torch.testing.assert_close(weights(module), results["whole"][0], rtol=1e-5, atol=1e-6)


def test_a_stream_that_does_not_split_itself_is_refused_by_name():
    """In Lightning, each process would train on all of it."""
    reason = r"even'.* but DataLoader over Stream does not support random access\. "
    words = reason + ".* let each process yield its own share, with"
    with pytest.raises(ConfigError, match=words):
        run_workers(lambda: fit_stream(Stream()), 2)


def test_a_stream_that_splits_itself_is_trained_on_as_it_is():
    assert run_workers(lambda: fit_stream(SplitStream()), 2) == [[(0, 2), (1, 2), (2, 2), (3, 1)]] * 2
