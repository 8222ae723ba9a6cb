"""PyTorch Geometric: its data module for Lightning, and a network over graphs. Needs torch_geometric."""

import json

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GCNConv, global_mean_pool

pl.seed_everything(0)


def make_graph(seed):
    nodes = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    return Data(x=nodes, edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), y=(nodes.sum() > 0).long().view(1))


class Network(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.convolution, self.head = GCNConv(4, 8), torch.nn.Linear(8, 2)

    def forward(self, batch):
        nodes = self.convolution(batch.x, batch.edge_index).relu()
        return self.head(global_mean_pool(nodes, batch.batch))

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch, batch_idx):
        right = (self(batch).argmax(-1) == batch.y).float().mean()
        self.log("val_acc", right, batch_size=batch.num_graphs, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


graphs = [make_graph(seed) for seed in range(60)]
data = LightningDataset(graphs[:40], graphs[40:], batch_size=8, num_workers=0)
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False)
trainer.fit(Network(), data)
print(json.dumps({name: float(value) for name, value in trainer.callback_metrics.items()}))
