"""Streams of unknown and unequal length: each process reads its own stream until all streams are exhausted.

    python examples/iterable_stream.py

One of the two processes has 3,000 measurements, and the other has 1,100. Each measurement is used once and has the same
weight: the gradient of a step is the mean over its samples, no matter which process read them, even if one process has
none left.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import legato as lg

LENGTHS = (3000, 1100)


class Measurements(IterableDataset):
    """A sensor's log: x (4,) and y = x @ (1, 2, 3, 4) plus noise. The log's length is unknown until it ends."""

    def __init__(self, sensor):
        self.sensor = sensor

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.sensor)
        for _ in range(LENGTHS[self.sensor]):
            x = torch.randn(4, generator=generator)
            yield x, x @ torch.tensor([1.0, 2.0, 3.0, 4.0]) + 0.1 * torch.randn((), generator=generator)


class Sensors(lg.DataModule):
    def train_dataloader(self):
        return DataLoader(Measurements(self.trainer.global_rank), batch_size=10)


class Regression(lg.Task):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1, bias=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.line(x).squeeze(1) - y).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


task = Regression()
trainer = lg.Trainer(
    max_epochs=1,
    strategy="ddp",
    devices=2,
    use_distributed_sampler=False,  # each process's loader already yields its share
    run_name="stream",
    enable_progress_bar=False,
)
trainer.fit(task, datamodule=Sensors())

print(f"{trainer.state.samples_seen} samples seen in {trainer.global_step} steps; expected: {sum(LENGTHS)}")
print(f"weights {[round(weight, 2) for weight in task.line.weight[0].tolist()]}, expected: [1, 2, 3, 4]")
