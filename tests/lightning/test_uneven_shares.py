"""Data that do not go evenly into the batches of several ranks: as under Lightning each has a batch in every step.

Beside a loop by hand; beside the real package on two processes in test_parity.py.
"""

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato.compat.lightning.pytorch as pl
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.script_collectives import gathers

pytestmark = pytest.mark.slow

ROWS = torch.randn(14, 5, generator=torch.Generator().manual_seed(6))
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"logger": False, "enable_checkpointing": False}


class Contrastive(pl.LightningModule):
    """Each rank's rows must find their partners among the rows of all ranks, of which each must have as many."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4)
        self.ended = []

    def training_step(self, batch, batch_idx):
        ours, theirs = self.first(batch[0]), self.second(batch[0])
        own = torch.arange(len(ours)) + self.global_rank * len(ours)
        every = self.all_gather(theirs, sync_grads=True).flatten(0, 1)
        return functional.cross_entropy(ours @ every.T, own)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append((batch_idx, len(batch[0])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByHand(Contrastive):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Metered(Contrastive):
    """A metric that meets the other ranks in each step."""

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
    """Nothing of other ranks; also noted, at which step."""

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self.first(batch[0]), self.second(batch[0]).tanh() + 1)


class Evaluated(Contrastive):
    """Calls a collective of some kind, or none, in the steps of its evaluations."""

    def __init__(self, call):
        super().__init__()
        self.call, self.running, self.sizes = call, torchmetrics.MeanMetric(), []

    def validation_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        if self.call == "all_gather":
            self.all_gather(batch[0]).view(-1, 5)
        elif self.call == "torch's":
            dist.all_gather([torch.empty_like(batch[0]) for _ in range(3)], batch[0])
        elif self.call == "compute":
            self.running.update(batch[0])
            self.running.compute()
        self.log("mean", batch[0].mean(), batch_size=len(batch[0]))

    test_step = validation_step


def fit(module, processes, rows=14, path=None, **options):
    trainer = pl.Trainer(**{**QUIET, "strategy": "ddp_spawn", "devices": processes, "max_epochs": 2, **options})
    trainer.fit(module, DataLoader(TensorDataset(ROWS[:rows]), 2), ckpt_path=path)
    return trainer


def trained(module, processes, rows=14, **options):
    """Return the weights, and what each rank has seen."""
    fit(module, processes, rows, **options)
    every = [None] * processes
    dist.all_gather_object(every, (module.ended, getattr(module, "means", None)))
    return weights(module), [ended for ended, _ in every], every[0][1]


def evaluated(call, stages, rows=14):
    """Return the mean of the rows, and how many each rank had at a time."""
    module = Evaluated(call)
    trainer = pl.Trainer(**{**QUIET, "strategy": "ddp_spawn", "devices": 3, "max_epochs": 1})
    data = DataLoader(TensorDataset(ROWS[:rows]), 2)
    for stage in stages:
        if stage == "fit":
            trainer.fit(module, data, data)
        else:
            getattr(trainer, stage)(module, data, verbose=False)
    every = [None] * 3
    dist.all_gather_object(every, module.sizes)
    return float(trainer.callback_metrics["mean"]), every


def weights(module):
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def by_hand(module, loss, *steps):
    """Train in one process on the rows of all ranks at each step, two epochs."""
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
        return iter(ROWS[:, None])


def streamed(**options):
    """Return the samples that rank 0 had of a stream."""
    module = Contrastive()
    trainer = pl.Trainer(**{**QUIET, "strategy": "ddp_spawn", "devices": 3, "max_epochs": 1, **options})
    trainer.fit(module, DataLoader(Stream(), 2))
    return len(module.ended)


def three_ranks(folder):
    found = {
        "ddp": trained(Contrastive(), 3),
        "by hand": trained(ByHand(), 3),
        "a window": trained(Contrastive(), 3, accumulate_grad_batches=3),
        "fewer than ranks": trained(Contrastive(), 3, rows=2),
        "a metric": trained(Metered(), 3),
        "batch norm": trained(Normalized(), 3, sync_batchnorm=True),
    }
    for call in ("none", "all_gather", "torch's", "compute"):
        for stages in (("fit",), ("validate", "test")):
            found[call, stages] = evaluated(call, stages)
    found["a stream"] = streamed()
    found["its own share"] = streamed(use_distributed_sampler=False)
    found["few"] = evaluated("torch's", ("fit",), rows=2)
    whole = Own()
    fit(whole, 3)
    found["whole"] = weights(whole), None, None
    fit(Own(), 3, max_steps=4).save_checkpoint(folder / "within")  # one step into the second epoch
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return folder, run_workers(lambda: three_ranks(folder), 3)


STEPS = range(6), range(6, 12), (12, 13, 0)
"""The rows of the steps of an epoch: two for each of three ranks, at last one, of which one is repeated."""


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
    _, found = three
    torch.testing.assert_close(found[name][0], expected(), rtol=1e-5, atol=1e-6)


def test_every_rank_ends_every_batch(three):
    _, found = three
    for name in ("ddp", "by hand", "a window", "a metric", "batch norm"):
        assert found[name][1] == [[(0, 2), (1, 2), (2, 1)] * 2] * 3
    assert found["fewer than ranks"][1] == [[(0, 1)] * 2] * 3
    assert found["a metric"][2] == [round(float(ROWS[list(rows)].mean()), 5) for rows in STEPS * 2]


def test_a_resume_on_fewer_processes_repeats_the_same_samples(three):
    folder, found = three
    module = Own()
    fit(module, 1, strategy="auto", path=folder / "within")
    torch.testing.assert_close(weights(module), found["whole"][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ["none", "all_gather", "torch's", "compute"])
def test_an_evaluation_repeats_samples_where_its_steps_call_collectives(three, call):
    """Else it counts each once; but for the sanity check, of which nothing is kept, and which shows what steps call."""
    _, found = three
    rows = [*range(14)] if call == "none" else [*range(14), 0]
    for stages in (("fit",), ("validate", "test")):
        mean, sizes = found[call, stages]
        assert mean == pytest.approx(float(ROWS[rows].mean()), abs=1e-6)
        each = [[2, 2, 2], [2, 2], [2, 2]] if call == "none" else [[2, 2, 1]] * 3
        assert sizes == [[2, *one] if stages == ("fit",) else one * 2 for one in each]
    mean, sizes = found["few"]
    assert mean == pytest.approx(float(ROWS[[0, 1, 0]].mean()), abs=1e-6)
    assert sizes == [[1, 1]] * 3


def test_a_stream_is_read_whole_by_each_process(three):
    """As under Lightning: one that takes the share of its process itself would lose most of it otherwise."""
    _, found = three
    assert found["a stream"] == found["its own share"] == 7


class Keeps(pl.LightningModule):
    """Gathers at an epoch's end what its steps have kept, as one tensor of all ranks."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def test_step(self, batch, batch_idx):
        self.kept.append(batch[0][:, 0])

    @torch.no_grad()
    def on_test_epoch_end(self):
        self.log("rows", float(self.gathered().numel()))

    def gathered(self):
        return self.all_gather(torch.cat(self.kept)).view(-1)


def gather_at_the_end(rows):
    trainer = pl.Trainer(**QUIET, strategy="ddp_spawn", devices=2)
    return trainer.test(Keeps(), DataLoader(TensorDataset(ROWS[:rows]), batch_size=2), verbose=False)


@pytest.mark.parametrize(("rows", "gathered"), [(8, 8), (9, 10), (5, 6)])
def test_what_a_hook_gathers_when_an_evaluation_ends_is_as_much_of_each_rank(rows, gathered):
    assert run_workers(lambda: gather_at_the_end(rows), 2) == [{"rows": float(gathered)}]


def test_a_hook_that_gathers_is_recognized_by_the_names_in_its_code():
    assert gathers(Keeps(), ["on_test_epoch_end"])
    assert not gathers(Keeps(), ["on_validation_epoch_end"])
    assert not gathers(Contrastive(), ["on_train_batch_end", "missing"])
