"""Uneven data: evaluation counts every sample once, and training continues until all data are read."""

import warnings
from functools import partial

import pytest
import torch
import torchmetrics
from shared_processes import run_cases
from tiny import ManualUpdate
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import legato as lg
from legato.base.errors import DataError
from legato.callbacks import Checkpoint
from legato.trainer.data.dealing import EvaluationData
from legato.trainer.data.sampling import Layout
from legato.trainer.data.steps import Dealing

pytestmark = pytest.mark.slow


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "max_epochs": 1,
}


class Numbers(Dataset):
    """The numbers from 0 on, as floats."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(self.first + index)], dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __iter__(self):
        return (torch.tensor([float(self.first + index)], dtype=torch.float64) for index in range(self.length))


# --- evaluation ------------------------------------------------------------------------------------------------------


class Evaluated(lg.Task):
    """Logs in every way there is."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.mean, self.highest = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()
        self.auroc = torchmetrics.classification.BinaryAUROC()
        self.count = 0

    def evaluate(self, batch):
        values = batch[:, 0]
        self.count += len(batch)
        self.log("mean", values.mean())
        self.log("sum", values.sum(), reduce_fx="sum")
        self.log("lowest", values.min(), reduce_fx="min", prog_bar=True)
        self.log("of a part", values[0], batch_size=1)
        self.mean.update(values)
        self.highest.update(values)
        self.auroc.update((values * 0.37) % 1, (values % 2).long())
        self.log("metric/mean", self.mean)
        self.log("metric/highest", self.highest)
        self.log("metric/auroc", self.auroc)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("mean", batch.mean())
        self.log("together", batch.mean(), add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log("count", float(self.count), reduce_fx="sum", sync_dist=True)
        self.count = 0

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"values": batch[:, 0].tolist(), "loader": dataloader_idx}


def evaluate(**strategy):
    """Evaluate many layouts of data, and return all that came of it."""
    task, results = Evaluated(), {}
    trainer = lg.Trainer(**QUIET, **strategy)
    for samples, batch_size in ((10, 1), (10, 2), (10, 3), (10, 4), (10, 10), (1, 1), (2, 1), (3, 2)):
        for kind in (Numbers, Stream):
            loader = DataLoader(kind(samples), batch_size)
            name = f"{kind.__name__} {samples} by {batch_size}"
            results[f"validate {name}"] = trainer.validate(task, loader)
            results[f"predict {name}"] = trainer.predict(task, loader)
    several = [DataLoader(Numbers(5), 2), DataLoader(Numbers(1, first=7), 1), DataLoader(Stream(8, first=20), 3)]
    results["test several"] = trainer.test(task, several)
    results["predict several"] = trainer.predict(task, several)
    limited = lg.Trainer(**QUIET, **strategy, limit_val_batches=2, limit_predict_batches=0.5)
    results["validate limited"] = limited.validate(task, DataLoader(Numbers(10), 3))
    results["predict limited"] = limited.predict(task, DataLoader(Numbers(10), 3))
    own_sampler = DataLoader(Numbers(6), 2, sampler=[5, 3, 1])
    results["predict own sampler"] = trainer.predict(task, own_sampler)
    return results


@pytest.mark.filterwarnings("ignore:No (posi|nega)tive samples in targets")
def test_evaluation_on_three_processes_is_that_of_one(three):
    """To the bit, also where processes get no batch at all: numbers are small integers, so that every sum is exact."""
    alone = evaluate(strategy="single")
    assert alone["validate Numbers 10 by 1"][0]["mean"] == 4.5
    assert alone["validate Numbers 10 by 4"][0] | {"metric/auroc": 0} == {
        "mean": 4.5,
        "sum": 45.0,
        "lowest": 0.0,
        "of a part": 4.0,
        "metric/mean": 4.5,
        "metric/highest": 9.0,
        "metric/auroc": 0,
        "count": 10.0,
    }
    assert alone["validate limited"][0]["mean"] == 2.5
    assert [prediction["values"] for prediction in alone["predict own sampler"]] == [[5.0, 3.0], [1.0]]
    assert [prediction["values"] for prediction in alone["predict several"][2]] == [
        [20, 21, 22],
        [23, 24, 25],
        [26, 27],
    ]
    together = three["evaluation"]
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        assert together[name] == expected, name


def validate_within_a_fit(**strategy):
    trainer = lg.Trainer(**{**QUIET, "max_epochs": 2, "val_check_interval": 2}, **strategy)
    task = Trained()
    trainer.fit(task, DataLoader(Numbers(23), 2), DataLoader(Numbers(10), 4))
    return task.validated


def test_validation_within_a_fit_counts_every_sample_once(three):
    expected = validate_within_a_fit(strategy="single", replicas=3)
    assert len(expected) == 4
    assert expected == three["validation"]


# --- training -------------------------------------------------------------------------------------------------------


class Trained(lg.Task):
    """The gradient of the loss is the mean over the samples."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.seen += batch[:, 0].tolist()
        loss = (self.place * batch[:, 0]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", batch.mean())

    def on_validation_end(self):
        self.validated.append((self.global_step, float(self.trainer.callback_metrics["val/mean"])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train_on_shares(shares, kind=Stream, accumulate=1, task=None, loader=DataLoader, resume=None, **arguments):
    """Train on this process's share of (samples, batch size); return the values that are equal on every process."""
    task = task or Trained()
    options = {"strategy": "ddp", "devices": len(shares), "use_distributed_sampler": False}
    trainer = lg.Trainer(**{**QUIET, **options, "accumulate_grad_batches": accumulate, **arguments})

    class Shares(lg.DataModule):
        def train_dataloader(self):
            rank = self.trainer.global_rank
            return loader(kind(shares[rank][0], first=100 * rank), batch_size=shares[rank][1])

        def val_dataloader(self):
            return DataLoader(Numbers(3 + self.trainer.global_rank), 2)

    trainer.fit(task, datamodule=Shares(), resume=resume)
    state = trainer.state
    counts = (state.global_step, state.epoch, state.samples_seen, state.epoch_rounds)
    return trainer.strategy.collectives.gather_objects((task.place.item(), counts, task.seen, task.validated))


def by_hand(shares, accumulate=1, epochs=1):
    """Return the place after steps whose gradient is the mean over the samples of all processes."""
    place, steps = 0.0, 0
    for _ in range(epochs):
        for step in range(max(-(-samples // (size * accumulate)) for samples, size in shares)):
            values = []
            for rank, (samples, size) in enumerate(shares):
                window = range(step * size * accumulate, min(samples, (step + 1) * size * accumulate))
                values += [100 * rank + index for index in window]
            place -= sum(values) / len(values)
            steps += 1
    return place, steps


UNEVEN = ((10, 2), (26, 3))
SHARES = [UNEVEN, ((0, 2), (6, 2)), ((7, 1), (0, 1), (9, 4))]


def train_to_the_end(shares):
    return {
        (kind.__name__, accumulate): train_on_shares(shares, kind, accumulate, max_epochs=2)
        for kind in (Stream, Numbers)
        for accumulate in (1, 4)
        if kind is Stream or all(samples for samples, _ in shares)
    }


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_shares_of_any_length_are_trained_on_to_their_end(two, three, shares):
    """5 and 9 batches, 0 and 3, and three processes: nobody hangs, nothing is lost, all have the same weights."""
    results = {2: two, 3: three}[len(shares)]["shares", shares]
    for (_, accumulate), ranks in results.items():
        place, steps = by_hand(shares, accumulate, epochs=2)
        for rank, (weight, counts, seen, validated) in enumerate(ranks):
            assert weight == pytest.approx(place, rel=1e-12)
            assert counts == (steps, 2, 2 * sum(samples for samples, _ in shares), 0)
            assert seen == 2 * [100.0 * rank + index for index in range(shares[rank][0])]
            assert validated == ranks[0][3]
            assert [step for step, _ in validated] == [steps // 2, steps]


def stop_validate_and_save(folder):
    callbacks = [Checkpoint(every_n_train_steps=1, save_top_k=-1)]
    write = {"enable_checkpointing": True, "callbacks": callbacks, "default_root_dir": folder}
    uninterrupted = train_on_shares(UNEVEN, Numbers, **write, run_name="whole")
    stopped = train_on_shares(UNEVEN, Numbers, **write, run_name="stopped", max_steps=7)
    intervals = train_on_shares(UNEVEN, Numbers, val_check_interval=0.5, max_epochs=2)
    return uninterrupted, stopped, intervals


def test_a_run_on_uneven_shares_stops_validates_and_saves_together(two, folder):
    """Between the ends of the shares, when processes have different epoch lengths."""
    uninterrupted, stopped, intervals = two["stops"]
    assert [rank[1] for rank in uninterrupted] == [(9, 1, 36, 0)] * 2
    assert [rank[1] for rank in stopped] == [(7, 0, 31, 7)] * 2
    assert [[step for step, _ in rank[3]] for rank in intervals] == [[4, 8, 13, 17]] * 2
    names = [path.name for path in sorted((folder / "whole" / "version_0" / "checkpoints").glob("step-*"))]
    assert names == [f"step-{step:08d}" for step in range(1, 10)]


def stop_and_go_on(folder):
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torch, in torchdata's loader
    uninterrupted = train_on_shares(UNEVEN, Numbers, max_epochs=2)
    write = {"enable_checkpointing": True, "default_root_dir": folder / "loaders", "loader": StatefulDataLoader}
    stop = train_on_shares(UNEVEN, Numbers, **write, max_epochs=2, max_steps=3)
    go_on = train_on_shares(UNEVEN, Numbers, **write, max_epochs=2, resume="auto")
    return uninterrupted, stop, go_on


def test_shares_go_on_from_their_own_state(two):
    """Each process's loader has its own place in its own share, and no batch is read again."""
    uninterrupted, stop, go_on = two["goes on"]
    for expected, before, after in zip(uninterrupted, stop, go_on, strict=True):
        assert after[:2] == expected[:2]
        assert before[2] + after[2] == expected[2]


class Manual(ManualUpdate, Trained):
    pass


def optimize_manually():
    with pytest.raises(DataError, match="in step 6 of epoch 0, only 1 of 2 processes had one left"):
        train_on_shares(UNEVEN, task=Manual())
    return train_on_shares(((10, 2), (15, 3)), task=Manual())


def test_manual_optimization_refuses_shares_that_end_unevenly(two):
    ranks = two["manual"]
    assert ranks[0][:2] == ranks[1][:2]
    assert ranks[0][1][0] == 5


def train_on_a_stream(folder, processes):
    strategy = {"strategy": "ddp", "devices": processes} if processes > 1 else {"strategy": "single"}
    task = Trained()
    trainer = lg.Trainer(**{**QUIET, "max_epochs": 2, "enable_checkpointing": True}, **strategy, replicas=3,
                         default_root_dir=folder / f"on {processes}",
                         callbacks=[Checkpoint(every_n_train_steps=1, save_top_k=2)])  # fmt: skip
    trainer.fit(task, DataLoader(Stream(22), 2))
    seen = sorted(value for rank in trainer.strategy.collectives.gather_objects(task.seen) for value in rank)
    return task.place.item(), trainer.global_step, trainer.state.samples_seen, seen


def test_a_stream_that_all_processes_read_is_dealt_out_by_batches(two, three, folder):
    """11 batches for three replicas: the last round has two, and is trained on."""
    expected = train_on_a_stream(folder, 1)
    assert expected[1:3] == (8, 44)
    assert three["stream"] == expected
    assert two["stream"] == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(folder):
    cases = {
        **{("shares", shares): partial(train_to_the_end, shares) for shares in SHARES if len(shares) == 2},
        "stops": partial(stop_validate_and_save, folder),
        "goes on": partial(stop_and_go_on, folder),
        "manual": optimize_manually,
        "stream": partial(train_on_a_stream, folder, 2),
    }
    return run_cases(cases, 2, folder / "two")


@pytest.fixture(scope="module")
def three(folder):
    cases = {
        "evaluation": partial(evaluate, strategy="ddp", devices=3),
        "validation": partial(validate_within_a_fit, strategy="ddp", devices=3),
        **{("shares", shares): partial(train_to_the_end, shares) for shares in SHARES if len(shares) == 3},
        "stream": partial(train_on_a_stream, folder, 3),
    }
    return run_cases(cases, 3, folder / "three")


@pytest.mark.parametrize("process", [0, 1])
def test_a_distributed_sampler_deals_out_an_evaluation_that_brings_its_own_shares(process):
    samples = torch.arange(8)
    sampler = DistributedSampler(samples, num_replicas=2, rank=process, shuffle=False)
    dealing = Dealing(Layout(2, 2), process)
    data = EvaluationData([DataLoader(samples, 2, sampler=sampler)], dealing, shares={0})
    assert [item.batch.tolist() for item in data.batches(0)] == [[process, process + 2], [process + 4, process + 6]]
    assert data.counts == [2]
    dealt = EvaluationData([DataLoader(samples, 2, sampler=sampler)], dealing).batches(0)
    assert [item.batch.tolist() for item in dealt] == [[start, start + 1] for start in (2 * process, 4 + 2 * process)]
