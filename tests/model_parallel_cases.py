"""Tasks of two parts, their data, and runs in one process and in several."""

import torch
from ddp_cases import DATA, QUIET, close, flat
from tiny import unchanged
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import legato as lg
from examples.characters import ALPHABET, CharacterGPT
from legato.tasks.digits import Digits

generator = torch.Generator().manual_seed(5)
IMAGES = TensorDataset(torch.randn(22, 1, 8, 8, generator=generator), torch.randint(0, 10, (22,), generator=generator))
tokens = torch.randint(len(ALPHABET), (22, 9), generator=generator)
TEXT = TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Chain(lg.Task):
    """One nn.Sequential has all parameters, so that it needs no configure_blocks."""

    def __init__(self, norm=False, dropout=0.0, width=8):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(4, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, 3),
        )

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        right = (logits.argmax(dim=1) == batch[1]).float().mean()
        self.log_dict({"val/loss": cross_entropy(logits, batch[1]), "val/acc": right})

    def test_step(self, batch, batch_idx):
        self.log("test/loss", cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Placed(Chain):
    """Places its parts on devices and moves its activations itself."""

    def configure_model(self):
        self.net[:3].to(self.devices[0])
        self.net[3:].to(self.devices[-1])

    def forward(self, inputs):
        halfway = self.net[:3](inputs.to(self.devices[0]))
        return self.net[3:](halfway.to(self.devices[-1]))


def digits():
    torch.manual_seed(2)
    return Digits(channels=8, dropout=0.0)


def text():
    torch.manual_seed(2)
    return CharacterGPT(n_layer=2, n_head=2, n_embd=16, block_size=8, warmup_steps=2, sample_length=2)


def data_of(task):
    return IMAGES if isinstance(task, Digits) else TEXT if isinstance(task, CharacterGPT) else DATA


def parts(**options):
    return {"name": "ddp_model_parallel", **options}


def run(task, samples=22, resume=None, **arguments):
    """Fit on `samples` samples in batches of 4."""
    trainer = lg.Trainer(**{**QUIET, **arguments})
    data = Subset(data_of(task), range(samples))
    held_out = DataLoader(Subset(data, range(min(samples, 10))), 4)
    with unchanged():
        trainer.fit(task, DataLoader(data, 4, shuffle=True), held_out, resume=resume)
    return trainer


def differs(task, reference, tolerance=1e-6):
    """Return the differences between two tasks that exceed the tolerance."""
    if close(flat(task), flat(reference), tolerance):
        return ""
    return f"{type(task).__name__} differs by {(flat(task) - flat(reference)).abs().max():.2e}"
