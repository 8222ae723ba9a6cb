"""lightly: SimCLR with an online classifier, then a linear and a nearest neighbour classifier on its features."""

import json

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.utils.benchmarking import KNNClassifier, LinearClassifier, MetricCallback, OnlineLinearClassifier
from lightly.utils.scheduler import CosineWarmupScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head, self.criterion = SimCLRProjectionHead(8, 8, 4), NTXentLoss()
        self.online = OnlineLinearClassifier(feature_dim=8, num_classes=4, topk=(1, 2))

    def forward(self, images):
        return self.backbone(images)

    def training_step(self, batch, batch_idx):
        first, second, classes = batch
        features = self(first)
        loss = self.criterion(self.head(features), self.head(self(second)))
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(first))
        online_loss, values = self.online.training_step((features.detach(), classes), batch_idx)
        self.log_dict(values, sync_dist=True, batch_size=len(first))
        return loss + online_loss

    def validation_step(self, batch, batch_idx):
        loss, values = self.online.validation_step((self(batch[0]), batch[1]), batch_idx)
        self.log_dict(values, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": CosineWarmupScheduler(optimizer, 2, steps), "interval": "step"}]


def trained(model, loaders, watch):
    monitor = pl.callbacks.LearningRateMonitor()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[watch, monitor], enable_progress_bar=False, log_every_n_steps=1
    )
    trainer.fit(model, *loaders)
    return [watch.train_metrics, watch.val_metrics]


pl.seed_everything(0)
images, classes = torch.randn(48, 3, 8, 8), torch.arange(48) % 4
pairs = DataLoader(TensorDataset(images, images + 0.1 * torch.randn_like(images), classes), batch_size=16)
labelled = DataLoader(TensorDataset(images, classes), batch_size=16)
model = SimCLR()
exact = {"simclr": trained(model, (pairs, labelled), MetricCallback())}
pl.seed_everything(1)
linear = LinearClassifier(model, batch_size_per_device=16, feature_dim=8, num_classes=4, topk=(1, 2))
exact["linear"] = trained(linear, (labelled, labelled), MetricCallback())
neighbours = KNNClassifier(
    model, num_classes=4, knn_k=5, knn_t=0.1, topk=(1, 2), train_dataloader_idx=0, val_dataloader_idx=1
)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False, logger=False)
exact["neighbours"] = trainer.validate(neighbours, [labelled, labelled], verbose=False)
print(json.dumps({"exact": exact}))
