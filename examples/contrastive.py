"""Contrastive learning (SimCLR): pulls two views of an image together and pushes all other images away.

    legato fit contrastive.yaml

`all_gather(..., sync_grads=True)` gathers the views of all processes and propagates their gradients, so two processes
with 64 images each have as many negatives as one process with 128 images.
"""

import torch
import torch.nn.functional as F
from torch import nn

import legato as lg


class Contrastive(lg.Task):
    def __init__(self, width: int = 128, features: int = 32, temperature: float = 0.2, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, features)

    def forward(self, images):
        """Return the features (n, width) that a classifier would be trained on later."""
        return self.encoder(images)

    def view(self, images):
        """Return the normalized features (n, features) of a random view of each image."""
        shown = torch.rand(len(images), 1, 8, 8, device=images.device) > 0.25
        noisy = (images + 0.2 * torch.randn_like(images)) * shown
        return F.normalize(self.head(self.encoder(noisy)), dim=1)

    def training_step(self, batch, batch_idx):
        images, _ = batch
        first, second = self.view(images), self.view(images)
        everyone = self.all_gather(torch.stack([first, second]), sync_grads=True)  # (ranks, 2, n, features)
        firsts, seconds = everyone.transpose(0, 1).flatten(1, 2)
        positives = torch.arange(len(images), device=self.device) + self.global_rank * len(images)
        logits = torch.cat([first @ seconds.T, second @ firsts.T]) / self.hparams.temperature
        loss = F.cross_entropy(logits, positives.repeat(2))
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/negatives", float(len(firsts) - 1))
        return loss

    def validation_step(self, batch, batch_idx):
        """Log how often an image's nearest neighbor in the batch shows the same digit."""
        images, labels = batch
        features = F.normalize(self(images), dim=1)
        nearest = (features @ features.T).fill_diagonal_(-1).argmax(dim=1)
        self.log("val/neighbors", (labels[nearest] == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Pairs(lg.tasks.DigitsData):
    """Digits in full batches only, because `all_gather` stacks batches of the same size."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.parts["train"], self.hparams.batch_size, shuffle=True, drop_last=True)
