"""A script for Lightning that prints each step. Words: `slow` steps, `two` processes."""

import sys
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return (batch[0] * self.slope - 2 * batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_train_start(self):
        print("begins at", self.global_step, flush=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.1 if "slow" in sys.argv else 0)
        print("step", self.global_step, flush=True)


if __name__ == "__main__":
    ranks = {"devices": 2, "strategy": "ddp"} if "two" in sys.argv else {}
    quiet = {"logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=4, default_root_dir="here", **ranks, **quiet)
    module = Line()
    trainer.fit(module, DataLoader(TensorDataset(torch.linspace(0, 1, 24)), 2))
    print("slope", module.slope.item(), "after", trainer.global_step, flush=True)
