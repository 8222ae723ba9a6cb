"""Legato as a library: two processes, no YAML, no `if __name__ == "__main__"`.

    python examples/plain_script.py [EPOCHS]

A small network learns to tell two interleaved spirals apart. After `fit`, the task in this script has the trained
weights, even though two other processes trained it.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Spirals(lg.Task):
    def __init__(self, hidden: int = 64, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )

    def forward(self, points):
        return self.network(points)

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = F.cross_entropy(self(points), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        points, labels = batch
        right = (self(points).argmax(dim=1) == labels).float().mean()
        self.log("val/acc", right, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def spirals(count, seed):
    """Return points (count, 2) on two spirals with one and a half turns, and each point's spiral (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator) * 0.9 + 0.1
    angle = 3 * math.pi * radius + math.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), labels)


task = Spirals()
epochs = int(sys.argv[1]) if sys.argv[1:] else 20
trainer = lg.Trainer(max_epochs=epochs, strategy="ddp", devices=2, run_name="spirals", log_every_n_steps=10)
trainer.fit(
    task,
    DataLoader(spirals(2000, seed=0), batch_size=32, shuffle=True),
    DataLoader(spirals(1000, seed=1), batch_size=250),
)
print(f"val/acc {trainer.callback_metrics['val/acc']:.3f} after {trainer.global_step} steps")

with torch.no_grad():
    points, labels = spirals(1000, seed=2)[:]
    print(
        f"accuracy of the task in this process on new points: {(task(points).argmax(1) == labels).float().mean():.3f}"
    )
