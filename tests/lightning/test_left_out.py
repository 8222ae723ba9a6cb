"""Values from hooks that a checkpoint cannot hold stay in the process, as programs for Lightning expect."""

import io
import pickle

import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import DataLoader

import legato.compat.lightning as L
from legato.base.errors import CheckpointError
from legato.compat.lightning import checkpoint
from legato.compat.lightning.checkpoint import read as load

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Scale:
    """An object that is code for a checkpoint."""

    def __init__(self, factor):
        self.factor = factor


class Model(L.LightningModule):
    def __init__(self, width=2, loss=None):
        super().__init__()
        self.save_hyperparameters(ignore=["loss"])
        self.loss, self.scale = loss, Scale(3)
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return self.loss(self.layer(batch), torch.zeros(len(batch), 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["scale"] = self.scale
        checkpoint["note"] = "text"
        checkpoint["hyper_parameters"].update({"loss": self.loss})

    def on_load_checkpoint(self, checkpoint):
        self.scale, self.note = checkpoint["scale"], checkpoint["note"]


def loader():
    return DataLoader(torch.ones(8, 2), batch_size=2)


def fit(tmp_path, model, **options):
    trainer = L.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(model, loader(), **options)
    return trainer


def test_it_comes_back_in_the_process(tmp_path, caplog):
    model = Model(loss=torch.nn.MSELoss())
    best = fit(tmp_path, model).checkpoint_callback.best_model_path
    again = Model.load_from_checkpoint(best)
    assert again.note == "text"
    assert (again.scale.factor, again.scale is model.scale) == (3, False)
    assert isinstance(again.loss, torch.nn.MSELoss)
    assert torch.equal(again.layer.weight, model.layer.weight)
    buffer = io.BytesIO()
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {"width": 2}, "scale": 1, "note": "x"}, buffer)
    buffer.seek(0)
    assert torch.equal(Model.load_from_checkpoint(buffer, loss=None).layer.weight, model.layer.weight)


def test_torch_reads_code_in_its_place_where_the_program_trusts_the_file(tmp_path):
    best = fit(tmp_path, Model(loss=torch.nn.MSELoss())).checkpoint_callback.best_model_path
    saved = torch.load(best, weights_only=False)
    assert isinstance(saved["hyper_parameters"]["loss"], torch.nn.MSELoss)
    assert saved["scale"].factor == 3
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(best)  # as in a file of Lightning


def test_elsewhere_it_is_handed_over_or_named(tmp_path):
    model = Model(loss=torch.nn.MSELoss())
    best = fit(tmp_path, model).checkpoint_callback.best_model_path
    checkpoint.written.clear()  # as in a different process
    with pytest.raises(CheckpointError, match=r"Checkpoints cannot store these hyperparameters of Model.*loss"):
        Model.load_from_checkpoint(best)
    with pytest.raises(KeyError, match="scale"):
        Model.load_from_checkpoint(best, loss=torch.nn.MSELoss())
    assert Model.load_from_checkpoint(best, weights_only=False).scale.factor == 3


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_goes_on_takes_it_from_its_own_module(tmp_path):
    best = fit(tmp_path, Model(loss=torch.nn.MSELoss())).checkpoint_callback.best_model_path
    model = Model(loss=torch.nn.MSELoss())
    fit(tmp_path / "second", model, ckpt_path=best)
    assert model.note == "text"


class TakesConfig(Model):
    def __init__(self, config, width=3):
        super(Model, self).__init__()
        self.save_hyperparameters(config)
        self.loss, self.scale = torch.nn.MSELoss(), None
        self.layer = torch.nn.Linear(2, config.width)

    on_save_checkpoint = on_load_checkpoint = L.LightningModule.on_save_checkpoint


def test_the_first_hyperparameters_stay_as_they_were():
    module = L.LightningModule()
    module.save_hyperparameters({"sizes": [1, 2], "deep": {"rates": (0.1,)}})
    module.hparams_initial.copy()["sizes"].reverse()
    module.hparams["deep"]["rates"] = ()
    assert module.hparams["sizes"] == [1, 2]
    assert module.hparams_initial["deep"]["rates"] == (0.1,)


def test_a_config_that_is_all_the_hyperparameters_is_them(tmp_path):
    config = OmegaConf.create({"width": 2, "deep": {"rates": [0.1], "width": "${width}"}})
    module = TakesConfig(config)
    assert module.hparams is config
    assert isinstance(module.hparams_initial, DictConfig)
    best = fit(tmp_path, module).checkpoint_callback.best_model_path
    checkpoint.written.clear()
    for hparams in (TakesConfig.load_from_checkpoint(best).hparams, load(best, weights_only=True)["hyper_parameters"]):
        assert (type(hparams), hparams) == (DictConfig, config)
    module.save_hyperparameters({"other": 1})
    assert module.hparams == {"other": 1}


class Configured(Model):
    def __init__(self, config, layers=()):
        super(Model, self).__init__()
        self.save_hyperparameters()
        self.loss, self.scale = torch.nn.MSELoss(), None
        self.layer = torch.nn.Linear(2, config.model.width)

    on_save_checkpoint = on_load_checkpoint = L.LightningModule.on_save_checkpoint


def test_configs_of_omegaconf_come_back_as_such(tmp_path):
    configs = OmegaConf.create({"model": {"width": 2}, "rates": [0.1]}), OmegaConf.create([1, 2])
    best = fit(tmp_path, Configured(*configs)).checkpoint_callback.best_model_path
    checkpoint.written.clear()
    again = Configured.load_from_checkpoint(best)
    assert (again.hparams.config, again.hparams.layers) == configs
    assert [type(item) for item in again.hparams.values()] == [DictConfig, ListConfig]
    assert again.hparams.config.model.width == again.hparams.config.rates[0] * 20
    assert Configured.load_from_checkpoint(best, layers=[3]).hparams.layers == [3]
