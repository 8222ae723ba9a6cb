"""opacus: private training, set up in configure_optimizers on the run's own loader."""

import json

import torch
from opacus import PrivacyEngine
from opacus.lightning import DPLightningDataModule
from pytorch_lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

seed_everything(0)


class Points(LightningDataModule):
    def setup(self, stage=None):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, (x[:, 0] > 0).long())

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=16, generator=torch.Generator().manual_seed(3))


class Private(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)
        self.engine = PrivacyEngine()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.trainer.fit_loop.setup_data()
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        loader = self.trainer.train_dataloader
        wrapped, optimizer, _ = self.engine.make_private(
            module=self, optimizer=optimizer, data_loader=loader, **options
        )
        self.kept = [wrapped]  # in a list, or the module would hold itself
        return optimizer

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.log("epsilon", self.engine.get_epsilon(1e-5))


trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_model_summary=False)
trainer.fit(Private(), DPLightningDataModule(Points()))
print(json.dumps({"exact": {"epsilon": float(trainer.callback_metrics["epsilon"])}}))
