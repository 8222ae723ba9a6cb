"""A task for runs that are started by the command line, with its data; it may be told to fail, or to be preempted."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Line(lg.Task):
    """Learns a slope. At step `at` rank `rank` does what `then` says, once: it is noted in the file `noted`."""

    def __init__(self, at: int = -1, then: str = "", noted: str = "noted", rank: int = 0) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))
        self.at, self.then, self.noted, self.rank = at, then, noted, rank

    def training_step(self, batch):
        (inputs,) = batch
        return (inputs * self.slope - 2 * inputs).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.linspace(0, 1, 24)), 2)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == self.at and self.trainer.global_rank == self.rank and not Path(self.noted).exists():
            Path(self.noted).write_text(self.then)
            if self.then == "fail":
                raise RuntimeError(f"rank {self.rank} does as it was told")
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_end(self):
        line = f"slope {self.slope.item():.6f} after {self.global_step} steps"
        sys.stdout.write(line + "\n")  # at once: the ranks share the pipe
        sys.stdout.flush()
