"""torchdyn: a neural differential equation that tells two half circles apart."""

import json

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torchdyn.core import NeuralODE
from torchdyn.datasets import ToyDataset

seed_everything(0)
points, labels = ToyDataset().generate(n_samples=128, noise=0.1, dataset_type="moons")
data = torch.utils.data.TensorDataset(points.float(), labels.long())


class Learner(LightningModule):
    def __init__(self):
        super().__init__()
        field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.model = NeuralODE(field, sensitivity="adjoint", solver="rk4", atol_adjoint=1e-4, rtol_adjoint=1e-4)

    def training_step(self, batch, batch_idx):
        _, trajectory = self.model(batch[0], torch.linspace(0, 1, 5))
        loss = nn.functional.cross_entropy(trajectory[-1], batch[1])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(data, batch_size=128)


trainer = Trainer(min_epochs=3, max_epochs=5, accelerator="cpu", devices=1)
trainer.fit(Learner())
print(json.dumps({"exact": {"loss": float(trainer.callback_metrics["loss"])}}))
