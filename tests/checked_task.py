"""What the tests of `legato check` and `legato plan` run; copied into each test's own folder, imported from there."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg


class Line(lg.Task):
    """A line through points. `fault` says what is wrong with it."""

    def __init__(self, fault: str = "", optimizer: str = "AdamW", hidden: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Sequential(nn.Linear(1, hidden), nn.Linear(hidden, 1))
        if fault in ("unused", "unused on rank 1"):
            self.head = nn.Linear(1, 1)
        if fault == "values":
            self.rates = torch.linspace(0, 1, 3).tolist()

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.layer(x)
        if self.hparams.fault == "unused on rank 1" and self.global_rank == 0:
            prediction = self.head(prediction)
        loss = F.mse_loss(prediction, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.mse_loss(self.layer(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        if self.hparams.fault.startswith("test"):
            raise ValueError("a bug in the test")

    def on_save_checkpoint(self, checkpoint):
        if self.hparams.fault == "state":
            checkpoint["odd"] = object()

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        optimizer = getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=0.01)
        if "plateau" not in self.hparams.fault:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/lss"}}


class Manual(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Points(lg.DataModule):
    def __init__(self, length: int = 50, batch_size: int = 4, kind: str = "shuffled") -> None:
        super().__init__()
        self.length, self.batch_size, self.kind = length, batch_size, kind

    def loader(self, **options):
        x = torch.linspace(-1, 1, self.length).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x), **options)

    def train_dataloader(self):
        if self.kind == "weighted":
            sampler = torch.utils.data.WeightedRandomSampler([1.0] * self.length, 2 * self.length)
            return self.loader(batch_size=self.batch_size, sampler=sampler)
        if self.kind == "batches":
            return self.loader(batch_sampler=[[0, 1], [2], [3, 4, 5]])
        if self.kind == "two":
            return {"long": self.loader(batch_size=self.batch_size, shuffle=True), "short": self.loader(batch_size=50)}
        if self.kind == "stream":
            return [(torch.ones(2, 1), torch.ones(2, 1))] * self.length
        if self.kind == "endless":
            return iter([])
        return self.loader(batch_size=self.batch_size, shuffle=self.kind == "shuffled", drop_last=self.kind == "drop")

    def val_dataloader(self):
        return self.loader(batch_size=self.batch_size)

    test_dataloader = val_dataloader
