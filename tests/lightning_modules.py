"""Modules as written for PyTorch Lightning, but for `import legato as lg`, Task, DataModule and Callback."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import F1Score, MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import legato as lg


class BlobsDataModule(lg.DataModule):
    def __init__(self, batch_size: int = 16, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.parts = None

    def setup(self, stage=None):
        if not self.parts:
            x = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
            y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
            generator = torch.Generator().manual_seed(42)
            self.parts = random_split(TensorDataset(x, y), [50, 15, 15], generator=generator)
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=self.batch_size_per_device, num_workers=self.hparams.num_workers)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.parts[2], batch_size=self.hparams.batch_size)

    def teardown(self, stage=None):
        pass


class LitClassifier(lg.Task):
    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object, compile: bool = False):
        super().__init__()
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"])
        self.net, self.make_optimizer, self.make_scheduler = net, optimizer, scheduler
        self.example_input_array = torch.zeros(2, 4)
        self.train_acc, self.val_acc = MulticlassAccuracy(3), MulticlassAccuracy(3)
        self.train_loss, self.val_loss, self.val_acc_best = MeanMetric(), MeanMetric(), MaxMetric()
        self.test_metrics = MetricCollection({"acc": MulticlassAccuracy(3), "f1": F1Score("multiclass", num_classes=3)})

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y), logits.argmax(dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)
        assert self.trainer.callback_metrics["val/acc"] == self.val_acc.compute()

    def test_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.test_metrics.update(preds, targets)
        self.log("test/loss", loss)
        self.log_dict(self.test_metrics, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(params=self.trainer.model.parameters())
        scheduler = self.make_scheduler(optimizer=optimizer)
        plateau = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


def make_net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def make_loader(samples=20, batch_size=4):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)


class Base(lg.Task):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 1)

    def forward(self, x):
        return self.l(x)

    def loss(self, batch):
        return (self(batch[0]) - batch[1]).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WarmUp(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.trainer.global_step < 3:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 1) / 3) * 0.1
        optimizer.step(closure=optimizer_closure)


class EverySecond(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class LBFGS(Base):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class ManualAccumulation(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log_dict({"loss": loss}, prog_bar=True)

    def on_train_epoch_end(self):
        self.lr_schedulers().step(self.trainer.callback_metrics["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class OneCycle(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1, "name": "lr"}]


class Skips(Base):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else {"loss": self.loss(batch), "extra": 1}


class LeavesEpoch(Base):
    def on_train_batch_start(self, batch, batch_idx, unused=0):
        return -1 if batch_idx == 2 else None


class OwnBackward(Base):
    def backward(self, loss):
        loss.backward()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=True)


class GAN(lg.Task):
    def __init__(self, latent_dim: int = 3, lr: float = 2e-2, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(latent_dim, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.validation_z = torch.ones(2, self.hparams.latent_dim)
        self.last_batches = []

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.ones(len(real), self.hparams.latent_dim, device=self.device).type_as(real)
        self.toggle_optimizer(optimizer_g)
        g_loss = F.softplus(-self.discriminator(self(z))).mean()
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        assert all(p.grad is None for p in self.discriminator.parameters())
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        with optimizer_d.toggle_model():
            d_loss = (F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(self(z).detach()))).mean()
            self.manual_backward(d_loss)
            optimizer_d.step()
            optimizer_d.zero_grad()
        self.log_dict({"d_loss": d_loss}, prog_bar=True)
        self.last_batches.append(self.trainer.is_last_batch)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def on_train_epoch_end(self):
        self.logger.experiment.add_image("generated", self(self.validation_z).view(1, 2, 4), self.current_epoch)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), self.hparams.lr)
        d = torch.optim.Adam(self.discriminator.parameters(), self.hparams.lr)
        return [g, d], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (g, d)]


class Logged(Base):
    """Accumulates outputs by itself, and logs with and without epochs."""

    def __init__(self):
        super().__init__()
        self.training_step_outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("step", loss)  # log_every_n_steps is 50, an epoch has 5 steps
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True, sync_dist=True, batch_size=4)
        self.log("max", loss, on_step=False, on_epoch=True, reduce_fx=torch.max, metric_attribute=None)
        self.training_step_outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("average", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch))
        self.log(f"own_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log("sum", sum(self.trainer.callback_metrics[f"own_{index}"] for index in range(2)))
        self.log("numbers", np.float32(0.5))

    def val_dataloader(self):
        return {"first": make_loader(), "second": make_loader(8)}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "step"}


class History(lg.Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(copy.deepcopy(trainer.callback_metrics))


class FromNamespace(Base):
    def __init__(self, hparams):
        super().__init__()
        self.save_hyperparameters(hparams)
        self.extra = nn.Linear(1, self.hparams.hidden)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


class Sized(Base):
    def __init__(self, hidden=2, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.extra = nn.Linear(1, hidden)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


class Distributed(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.act = lambda x: x
        self.means = []

    def forward(self, x):
        return self.l(self.act(self.norm(x)))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.means.append(batch[0].mean())
        self.log("count", 1.0, reduce_fx="sum")

    def on_validation_epoch_end(self):
        mean = torch.stack(self.means).mean()
        gathered = self.all_gather({"mean": mean, "list": [mean, mean]})
        assert gathered["mean"].shape == gathered["list"][1].shape == (self.trainer.world_size,)
        self.log("gathered", gathered["mean"].mean(), rank_zero_only=False)
        self.means.clear()
        self.say_hello()
        self.trainer.strategy.collectives.barrier()

    @lg.rank_zero_only
    def say_hello(self):
        assert self.trainer.is_global_zero
        self.logger.experiment.add_text("hello", f"from {torch.backends.cudnn.is_available()}", self.global_step)

    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]

    def on_train_end(self):
        weights = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
        assert all(torch.equal(rank_weights, weights) for rank_weights in self.all_gather(weights))


class Thaw(lg.Callback):
    """Freezes the norm, and unfreezes it for the second epoch."""

    def setup(self, trainer, pl_module, stage):
        pl_module.norm.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.norm.requires_grad_(True)


class Loaders(lg.DataModule):
    def train_dataloader(self):
        return make_loader(16)

    def val_dataloader(self):
        return make_loader(12)

    predict_dataloader = val_dataloader
