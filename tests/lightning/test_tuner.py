"""Tuner: the same search as in Lightning on the same data."""

import warnings

import lightning.pytorch as real
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from legato.compat.lightning.pytorch import LightningDataModule, LightningModule, Trainer
from legato.compat.lightning.pytorch.callbacks import BatchSizeFinder
from legato.compat.lightning.pytorch.tuner import Tuner
from legato.compat.lightning.pytorch.utilities.exceptions import MisconfigurationException


def make_model(base, learning_rate=0.1):
    class Model(base):
        def __init__(self, learning_rate):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(3)
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.layer(batch[0]), batch[0].sum(1, keepdim=True))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)

    return Model(learning_rate)


def make_loader(batch_size=4):
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=batch_size)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_lr_find_is_lightnings(tmp_path):
    options = {"min_lr": 1e-4, "max_lr": 5.0, "num_training": 40}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = make_model(real.LightningModule)
        trainer = real.Trainer(max_epochs=9, accelerator="cpu", default_root_dir=tmp_path, **QUIET)
        expected = real.tuner.Tuner(trainer).lr_find(theirs, make_loader(), **options)
    ours = make_model(LightningModule)
    suggestion = Tuner(Trainer(max_epochs=9, accelerator="cpu", default_root_dir=tmp_path, **QUIET)).lr_find(
        ours, make_loader(), **options
    )
    count = min(len(suggestion.results["lr"]), len(expected.results["lr"]))
    assert count >= 30
    assert suggestion.results["lr"][:count] == pytest.approx(expected.results["lr"][:count])
    assert suggestion.results["loss"][:12] == pytest.approx(expected.results["loss"][:12], rel=1e-4)
    assert ours.hparams.learning_rate == suggestion.suggestion()
    assert torch.equal(ours.layer.weight, make_model(LightningModule).layer.weight)


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self):
        return make_loader(self.batch_size)


def test_wishes_that_cannot_be_met(tmp_path):
    tuner = Tuner(Trainer(accelerator="cpu", default_root_dir=tmp_path, **QUIET))
    model = make_model(LightningModule)
    with pytest.raises(MisconfigurationException, match="only valid"):
        tuner.lr_find(model, method="test")
    with pytest.raises(AttributeError, match="step_size"):
        tuner.lr_find(model, make_loader(), attr_name="step_size")
    with pytest.raises(ValueError, match="invalid"):
        tuner.scale_batch_size(model, datamodule=Data(), method="fit_all")
    with pytest.raises(MisconfigurationException, match="dataloaders"):
        tuner.scale_batch_size(model, dataloaders=make_loader())
    with pytest.raises(MisconfigurationException, match="batch size of existing loaders"):
        tuner.scale_batch_size(model, make_loader())


@pytest.mark.slow
def test_scale_batch_size(tmp_path):
    tuner, data = Tuner(Trainer(accelerator="cpu", default_root_dir=tmp_path, **QUIET)), Data()
    assert tuner.scale_batch_size(make_model(LightningModule), datamodule=data, max_trials=4) == 16
    assert data.batch_size == 16


def full_above(limit, base=LightningModule):
    """Return a module that reports full memory for a batch of more than `limit` samples."""

    class Full(base):
        def __init__(self):
            super().__init__()
            self.layer, self.lr = nn.Linear(4, 1), 0.1

        def training_step(self, batch, batch_idx):
            if len(batch[0]) > limit:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch, batch_idx):
            self.training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    return Full()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "size"), [("power", 8), ("binsearch", 10)])
def test_every_size_is_tried_from_the_first_step_on(tmp_path, mode, size):
    trainer, data = Trainer(accelerator="cpu", default_root_dir=tmp_path, max_epochs=1, **QUIET), Data()
    module = full_above(11)
    trainer.fit(module, make_loader())
    assert Tuner(trainer).scale_batch_size(module, datamodule=data, mode=mode) == size == data.batch_size
    assert trainer.global_step == 12
    assert len(Tuner(trainer).lr_find(module, make_loader(), num_training=12).results["lr"]) == 12


@pytest.mark.slow
def test_a_batch_size_finder_searches_before_an_evaluation_too(tmp_path):
    class OnlyTests(BatchSizeFinder):
        def on_fit_start(self, trainer, pl_module):
            """Do not search before a fit."""

    data, module = Data(), full_above(11)
    data.val_dataloader = data.train_dataloader
    finder = OnlyTests()
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, max_epochs=1, callbacks=[finder], **QUIET)
    trainer.fit(module, datamodule=data)
    assert (finder.optimal_batch_size, data.batch_size) == (2, 4)
    trainer.validate(module, datamodule=data)
    assert (finder.optimal_batch_size, data.batch_size) == (8, 8)
