"""A task that logs what it is told, for tests of callbacks that watch a value."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import legato as lg

STEPS = 4
"""Steps of an epoch."""


class Scripted(lg.Task):
    """Logs given values, one per epoch of validation and one per training step, and can be slow."""

    def __init__(self, values=(), train_values=(), seconds=0.0, validation_seconds=0.0, sleep=time.sleep):
        super().__init__()
        self.sleep = sleep
        self.net = torch.nn.Linear(4, 1)
        self.values, self.train_values = list(values), list(train_values)
        self.seconds, self.validation_seconds = seconds, validation_seconds

    def training_step(self, batch):
        if self.seconds:
            self.sleep(self.seconds)
        if self.train_values:
            self.log("train/score", self.train_values[self.global_step], on_step=True, on_epoch=False, prog_bar=True)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch):
        if self.validation_seconds:
            self.sleep(self.validation_seconds)
        if self.values:
            self.log("val/score", self.values[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batches=STEPS, size=2):
    return DataLoader(TensorDataset(torch.ones(batches * size, 4)), batch_size=size)


def make_trainer(tmp_path, *callbacks, **options):
    chosen = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    chosen |= {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "save_code": False} | options
    return lg.Trainer(callbacks=list(callbacks), **chosen)


def fit(tmp_path, *callbacks, values=(), task=None, resume=None, **options):
    trainer = make_trainer(tmp_path, *callbacks, **{"max_epochs": len(values) or 3, **options})
    trainer.fit(task or Scripted(values), loader(), loader(1), resume=resume)
    return trainer
