"""Tabular data: numerical and categorical features, with class weights for a rare class.

    legato fit tabular.yaml

The synthetic table contains transactions, 3 % of which are fraudulent. Without class weights, the model classifies none
of them as fraudulent and still has an accuracy of 97 %.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryF1Score, BinaryRecall

import legato as lg

COUNTRIES = 20


class Table(lg.DataModule):
    def __init__(self, rows: int = 8000, batch_size: int = 128):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        random = torch.Generator().manual_seed(0)
        rows = self.hparams.rows
        numbers = torch.randn(rows, 4, generator=random)  # amount, hour, account age, distance
        countries = torch.randint(COUNTRIES, (rows,), generator=random)
        risk = 1.5 * numbers[:, 0] + numbers[:, 3] - numbers[:, 2] + (countries % 7 == 0) * 1.5
        fraud = (risk > risk.quantile(0.97)).long()
        train = int(0.8 * rows)
        self.train = TensorDataset(numbers[:train], countries[:train], fraud[:train])
        self.val = TensorDataset(numbers[train:], countries[train:], fraud[train:])
        self.class_counts = fraud[:train].bincount(minlength=2)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 500)


class Fraud(lg.Task):
    def __init__(self, width: int = 64, weighted: bool = True, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.country = nn.Embedding(COUNTRIES, 8)
        self.net = nn.Sequential(nn.Linear(4 + 8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
        self.register_buffer("weights", torch.ones(2))
        self.f1, self.recall = BinaryF1Score(), BinaryRecall()

    def on_fit_start(self):
        if self.hparams.weighted:  # inversely proportional to the class counts; saved in checkpoints
            counts = self.trainer.datamodule.class_counts.to(self.device)
            self.weights = counts.sum() / (2.0 * counts)

    def forward(self, numbers, countries):
        """Return logits (n, 2) for numbers (n, 4) and countries (n,)."""
        return self.net(torch.cat([numbers, self.country(countries)], dim=1))

    def training_step(self, batch, batch_idx):
        numbers, countries, fraud = batch
        loss = F.cross_entropy(self(numbers, countries), fraud, weight=self.weights)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        numbers, countries, fraud = batch
        called = self(numbers, countries).argmax(dim=1)
        for name, metric in (("f1", self.f1), ("recall", self.recall)):
            metric.update(called, fraud)
            self.log(f"val/{name}", metric, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
