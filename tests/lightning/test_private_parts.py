"""Private attributes of trainers, loops and modules that public programs use, compared with Lightning."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import legato.compat.lightning.pytorch as room

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as real

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's warnings
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def module(package, **methods):
    """Return a module of a package with additional methods."""

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.layer(batch).square().mean())

        test_step = predict_step = validation_step

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return type("Own", (Net,), methods)()


def loader():
    return DataLoader(torch.arange(16.0).reshape(8, 2) / 16, batch_size=2)


class Counted(room.Callback):
    state_key = "counted"

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def test_connectors_of_callbacks_and_values(tmp_path):
    results = []
    for package in (room, real):
        seen = []

        trainer = package.Trainer(**QUIET, accelerator="cpu", max_epochs=1, default_root_dir=tmp_path)
        trainer.validate(module(package), loader(), verbose=False)
        assert trainer.callback_metrics.keys() == {"val_loss"}
        trainer._logger_connector.reset_metrics()
        assert trainer.callback_metrics == {}
        saves, plain = package.callbacks.ModelCheckpoint(tmp_path), package.Callback()
        connector = trainer._callback_connector
        seen.append([type(callback).__name__ for callback in connector._reorder_callbacks([saves, plain])])
        results.append(seen)
    assert results[0] == results[1]


@pytest.mark.parametrize("package", [room, real])
@pytest.mark.parametrize("validates", [False, True])
def test_a_loop_tells_whether_anything_gives_its_loaders(package, validates):
    seen = []

    def setup(self, stage):
        seen.append(self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())

    methods = {"val_dataloader": lambda self: loader()} if validates else {}
    package.Trainer(**QUIET, accelerator="cpu", max_steps=1).fit(module(package, setup=setup, **methods), loader())
    assert seen == [validates]
