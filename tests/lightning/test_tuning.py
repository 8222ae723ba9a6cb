"""Searches for a learning rate and a batch size: real runs that leave no trace."""

import random

import numpy as np
import pytest
import torch
from tiny import Tiny, Two, assert_same_bits, make_data, make_loader, make_trainer
from torch.utils.data import DataLoader

import legato as lg
from legato.base.errors import ConfigError
from legato.compat.lightning.tuner import LearningRateSweep, Tuner


def sweep_learning_rates(trainer, task, *data, **options):
    return Tuner(trainer).lr_find(task, *data, update_attr=False, **options)


def find_batch_size(trainer, task, **options):
    return Tuner(trainer).scale_batch_size(task, **options)


class Data(lg.DataModule):
    def __init__(self, batch_size=2, samples=40, **options):
        super().__init__()
        self.save_hyperparameters()
        self.options = options

    def train_dataloader(self):
        return DataLoader(make_data(self.hparams.samples), batch_size=self.hparams.batch_size, **self.options)


class NoSize(lg.DataModule):
    def train_dataloader(self):
        return make_loader()


class Limited(Tiny):
    """Has memory for batches of up to `most` samples."""

    def __init__(self, most):
        super().__init__()
        self.most, self.tried = most, []

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.loss(batch)

    def configure_callbacks(self):
        return lg.callbacks.Checkpoint(dirpath="not-in-a-trial")


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_sweep_raises_the_rate_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, task = make_trainer(tmp_path, logger=True, enable_checkpointing=True, max_epochs=20), Tiny()
    before, generators, arguments = Tiny(), states(), dict(vars(trainer))
    callbacks = list(trainer.callbacks)
    sweep = sweep_learning_rates(trainer, task, make_loader(shuffle=True), min_lr=1e-4, max_lr=100.0, num_training=60)
    rates, losses = sweep.results["lr"], sweep.results["loss"]
    assert rates[0] == 1e-4
    assert rates == sorted(rates)
    assert len(rates) == len(losses) <= 60
    assert losses[-1] > 4 * min(losses)
    assert 1e-4 < sweep.suggestion() < rates[-1]
    assert_same_bits(task, before)
    assert task.seen == []
    assert states() == generators
    assert {name: vars(trainer)[name] for name in arguments} == arguments
    assert trainer.callbacks == callbacks
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="not attached"):
        _ = task.trainer
    trainer.fit(task, make_loader())
    assert (trainer.global_step, trainer.current_epoch) == (100, 20)


def test_a_sweep_steps_over_the_end_of_epochs_and_schedulers(tmp_path):
    class Scheduled(Tiny):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = make_trainer(tmp_path, accumulate_grad_batches=2, max_epochs=9)
    options = {"min_lr": 0.01, "max_lr": 0.1, "num_training": 9, "early_stop_threshold": None}
    sweep = sweep_learning_rates(trainer, Scheduled(), train_dataloaders=make_loader(), mode="linear", **options)
    assert sweep.results["lr"] == pytest.approx([0.01, *(0.01 + 0.09 * (step + 1) / 9 for step in range(1, 9))])


def test_the_loss_that_a_sweep_records_is_that_of_the_step(tmp_path):
    task, loader = Tiny(), make_loader()
    sweep = sweep_learning_rates(make_trainer(tmp_path), task, loader, num_training=5, min_lr=0.01, max_lr=0.2)
    optimizer, average = torch.optim.SGD(task.parameters()), 0.0
    for step, batch in enumerate(loader):
        optimizer.param_groups[0]["lr"] = sweep.rate(step)
        loss = task.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.98 * average + 0.02 * loss.item()
        assert sweep.results["loss"][step] == pytest.approx(average / (1 - 0.98 ** (step + 2)))


def test_a_plot_of_a_sweep(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    sweep = LearningRateSweep("exponential", 1e-4, 1.0, 20)
    sweep.results = {"lr": [sweep.rate(step) for step in range(20)], "loss": [1.0 - step / 40 for step in range(20)]}
    figure = sweep.plot(suggest=True)
    assert figure.axes[0].get_xscale() == "log"
    assert len(figure.axes[0].lines) == 2
    assert sweep.plot(ax=figure.axes[0]) is figure
    matplotlib.pyplot.close("all")


def test_a_sweep_ends_with_its_epochs(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=2)
    sweep = sweep_learning_rates(trainer, Tiny(), make_loader(), num_training=50, min_lr=1e-3)
    assert len(sweep.results["lr"]) == 10


def test_too_few_points_and_wrong_wishes(tmp_path, caplog):
    sweep = LearningRateSweep("linear", 0.1, 1.0, 5)
    assert sweep.suggestion() is None
    assert "too few steps" in caplog.text
    for wrong in (("cosine", 0.1, 1.0, 5), ("linear", 1.0, 0.1, 5), ("linear", 0.1, 1.0, 1)):
        with pytest.raises(ConfigError):
            LearningRateSweep(*wrong)
    with pytest.raises(ConfigError, match="one optimizer"):
        sweep_learning_rates(make_trainer(tmp_path), Two(), make_loader(), num_training=2)


@pytest.mark.slow
def test_a_sweep_on_two_processes_is_that_of_two_replicas(tmp_path):
    options = {"min_lr": 0.01, "max_lr": 0.5, "num_training": 6}
    trainers = (
        make_trainer(tmp_path, max_epochs=9, **options)
        for options in ({"strategy": "ddp", "devices": 2}, {"replicas": 2})
    )
    first, second = (sweep_learning_rates(trainer, Tiny(), make_loader(), **options).results for trainer in trainers)
    assert len(first["loss"]) == 6
    assert first["lr"] == second["lr"]
    assert first["loss"] == pytest.approx(second["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "most", "size"),
    [("power", 1000, 64), ("power", 17, 16), ("binsearch", 17, 17), ("binsearch", 1, 1), ("power", 1, 1)],
)
def test_the_largest_batch_that_fits(tmp_path, monkeypatch, mode, most, size):
    monkeypatch.chdir(tmp_path)
    task, data, trainer = Limited(most), Data(), make_trainer(tmp_path)
    assert find_batch_size(trainer, task, datamodule=data, mode=mode, margin=0.0, init_val=2) == size
    assert data.hparams.batch_size == size
    assert_same_bits(task, Tiny())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_limits_of_the_search(tmp_path):
    task, trainer = Limited(100), make_trainer(tmp_path)
    assert find_batch_size(trainer, task, datamodule=Data(samples=400), max_trials=3) == 8
    assert find_batch_size(trainer, task, datamodule=Data(samples=400), max_val=30) == 30
    assert find_batch_size(trainer, task, datamodule=Data(samples=400), mode="binsearch", margin=0.1) == 90
    assert find_batch_size(trainer, task, datamodule=Data(drop_last=True)) == 32
    with pytest.raises(ConfigError, match="does not fit in memory"):
        find_batch_size(trainer, Limited(0), datamodule=Data())
    with pytest.raises(ConfigError, match="'batch_size'"):
        find_batch_size(trainer, Tiny(), datamodule=NoSize())
    with pytest.raises(ConfigError, match="'power' or 'binsearch'"):
        find_batch_size(trainer, Tiny(), datamodule=Data(), mode="both")


def test_an_error_that_is_not_of_memory_is_raised(tmp_path):
    class Broken(Tiny):
        batch_size = 2

        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        find_batch_size(make_trainer(tmp_path), Broken(), datamodule=Data())


@pytest.mark.slow
def test_a_batch_size_on_two_processes(tmp_path):
    data = Data()
    trainer = make_trainer(tmp_path, strategy="ddp", devices=2)
    assert find_batch_size(trainer, Limited(5), datamodule=data, mode="binsearch", margin=0.0) == 5
    assert data.hparams.batch_size == 5
