"""A small task, its data and its trainer, for runs in one process and in several."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import legato as lg

generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(40, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator))
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "save_code": False,  # by git, in three processes a run
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "max_epochs": 2,
}
TWO = {"devices": 2, "strategy": "ddp"}


class Net(lg.Task):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(4, 8, bias=not norm), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(8, 3)

    def loss(self, batch):
        image, label = batch
        return nn.functional.cross_entropy(self.head(self.body(image)), label)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # its step depends on the size of the gradient


def loader(samples, batch_size=4, **options):
    return DataLoader(Subset(DATA, range(samples)), batch_size, **options)


def fit(task, samples=22, batch_size=4, **arguments):
    trainer = lg.Trainer(**{**QUIET, **arguments})
    trainer.fit(task, loader(samples, batch_size, shuffle=True), loader(10))
    return trainer


def flat(task):
    return torch.cat([value.flatten().double() for value in task.state_dict().values()])


def trained(task, **arguments):
    fit(task, **arguments)
    return flat(task)


def in_one(task, **arguments):
    return trained(task, strategy="single", replicas=2, **arguments)


def close(actual, expected, tolerance=1e-6):
    return torch.allclose(actual, expected, rtol=0, atol=tolerance)


class Spare(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
