"""A model split across two devices: the two ways to use ddp_model_parallel.

    python examples/two_parts.py

Four devices make two processes with two parts each. On a machine without four GPUs, the CPU acts as all four devices
and computes the same steps, so you can try a model on any machine.

`InBlocks` returns its blocks, and Legato splits them by parameter size in bytes. `ByHand` places its parts on devices
itself. Both get the same results as the model on a single device.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, stream):
        return stream + self.outer(F.gelu(self.inner(self.norm(stream))))


class Rings(lg.Task):
    """A task that doesn't place any of its modules."""

    def __init__(self, width: int = 32, layers: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(2, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, points):
        stream = self.embedding(points)
        for layer in self.layers:
            stream = layer(stream)
        return self.head(stream)

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = F.cross_entropy(self(points), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        points, labels = batch
        self.log("val/acc", (self(points).argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=6e-3)


class InBlocks(Rings):
    """Lists its blocks, which Legato places."""

    def configure_blocks(self):
        return [self.embedding, *self.layers, self.head]


class ByHand(Rings):
    """Places its parts itself. Batches are moved to the last device, where the loss is computed."""

    def configure_model(self):
        first, last = self.devices
        self.embedding.to(first)
        self.layers[:2].to(first)
        self.layers[2:].to(last)
        self.head.to(last)

    def forward(self, points):
        first, last = self.devices
        stream = self.embedding(points.to(first))
        for layer in self.layers[:2]:
            stream = layer(stream)
        stream = stream.to(last)
        for layer in self.layers[2:]:
            stream = layer(stream)
        return self.head(stream)


def rings(count, seed):
    """Return points (count, 2), and whether each point lies on an odd ring (count,)."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) * 2).long() % 2)


for task, arguments in (
    (Rings(), {"strategy": "single", "devices": 1, "replicas": 2}),
    (InBlocks(), {"strategy": {"name": "ddp_model_parallel", "micro_batches": 4}, "devices": 4}),
    (ByHand(), {"strategy": "ddp_model_parallel", "devices": 4}),
):
    trainer = lg.Trainer(
        max_epochs=8,
        threads=1,
        accelerator="cuda" if torch.cuda.device_count() >= 4 else "cpu",
        run_name="two_parts",
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(
        task,
        DataLoader(rings(1000, seed=0), batch_size=32, shuffle=True),
        DataLoader(rings(1000, seed=1), batch_size=250),
    )
    print(f"{type(task).__name__:8} on {arguments['devices']}: val/acc {trainer.callback_metrics['val/acc']:.3f}")
