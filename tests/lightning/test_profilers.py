"""Profilers in Lightning compatibility mode: Lightning's arguments and names, and custom profilers."""

import importlib
import inspect
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from legato.compat.lightning.pytorch import LightningModule, Trainer
from legato.compat.lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler
from legato.compat.lightning.pytorch.utilities.exceptions import MisconfigurationException

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("mine"):
            return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(Profiler):
    """A typical custom profiler: no call of `super().__init__`."""

    def __init__(self):
        self.actions = []

    def start(self, action_name):
        self.actions.append(action_name)

    def stop(self, action_name):
        pass


def fit(folder, profiler):
    trainer = Trainer(accelerator="cpu", max_epochs=1, profiler=profiler, default_root_dir=folder, **QUIET)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
    return trainer


def test_a_profiler_that_a_user_wrote(tmp_path):
    profiler = Counting()
    trainer = fit(tmp_path, profiler)
    assert trainer.profiler is profiler
    assert profiler.actions.count("mine") == 4
    assert len([action for action in profiler.actions if action.endswith(".training_step")]) == 4
    with pytest.raises(TypeError, match="abstract"):
        Profiler()


def test_words_and_none(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="legato")
    assert isinstance(fit(tmp_path, None).profiler, PassThroughProfiler)
    assert "Profiler Report" not in caplog.text
    trainer = fit(tmp_path, "simple")
    assert isinstance(trainer.profiler, SimpleProfiler)
    assert isinstance(trainer.profiler, Profiler)
    assert len(trainer.profiler.recorded_durations["mine"]) == 4
    assert "FIT Profiler Report" in caplog.text
    with pytest.raises(MisconfigurationException, match="simple"):
        fit(tmp_path, "simpel")


@pytest.mark.parametrize("name", ["SimpleProfiler", "PyTorchProfiler", "PassThroughProfiler"])
def test_arguments_are_lightnings(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = getattr(importlib.import_module("lightning.pytorch.profilers"), name)
    ours = getattr(importlib.import_module("legato.compat.lightning.pytorch.profilers"), name)
    first, second = (inspect.signature(kind.__init__).parameters for kind in (ours, theirs))
    assert list(first) == list(second)
    assert [parameter.default for parameter in first.values()] == [parameter.default for parameter in second.values()]
    for method, value in vars(theirs).items():
        assert method.startswith("_") or method.isupper() or hasattr(ours, method) or not inspect.isfunction(value)
