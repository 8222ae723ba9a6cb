"""torch-harness: a callback that wraps training_step in its setup and skips batches that fail or are not finite."""

import json
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from torch_harness.lightning import FaultTolerantTrainingStep, FileModelStructure

seed_everything(0)


class Faulty(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("this batch fails")
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss * float("nan") if batch_idx == 5 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
guards = FaultTolerantTrainingStep(max_faults=10, fault_window=timedelta(hours=1))
callbacks = [guards, FileModelStructure(output_path=Path("model.txt"))]
quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
trainer, module = Trainer(max_epochs=2, accelerator="cpu", devices=1, callbacks=callbacks, **quiet), Faulty()
trainer.fit(module, DataLoader(data, batch_size=4))
results = {
    "steps": trainer.global_step,
    "weights": module.net.weight.tolist(),
    "wrapped": "training_step" in vars(module),
}
print(json.dumps({"exact": {**results, "loss": float(trainer.callback_metrics["loss"])}}))
