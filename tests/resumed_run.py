"""A run in which everything is random, and all that it comes to."""

import json
import os
import random

import numpy as np
import torch
import torchmetrics
from event_files import points
from tiny import unchanged
from torch import nn
from torch.utils.data import DataLoader, Dataset

import legato as lg
from legato.callbacks import Checkpoint, EarlyStopping

SAMPLES, EPOCHS, STEPS = 50, 3, 15
TIMES = {"time", "samples_per_second", "epoch_time"}


class Augmented(Dataset):
    """Random augmentation by each global generator."""

    def __init__(self, length=SAMPLES):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(length, 4, generator=generator)
        self.read = 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.read += 1
        scale = 1 + 0.1 * torch.rand(1) + 0.1 * np.random.rand() + 0.1 * random.random()
        return (scale * self.inputs[index]).float()


class Net(lg.Task):
    """Dropout, batch norm, AdamW, two schedulers, values and metrics logged in every way."""

    def __init__(self, seed=0, frequency=1):
        super().__init__()
        torch.manual_seed(seed)
        self.frequency = frequency
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.average = torchmetrics.MeanMetric()
        self.validated = torchmetrics.MeanMetric()

    def loss(self, batch):
        return (self.net(batch)[:, 0] - batch.sum(1).sin()).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch + 0.01 * torch.randn_like(batch))
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/largest", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.average.update(loss.detach())
        self.log("train/metric", self.average, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.update(self.loss(batch))
        self.log("val/loss", self.loss(batch), prog_bar=True)
        self.log("val/metric", self.validated)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.97)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": plateau, "monitor": "val/loss", "frequency": self.frequency},
        ]


class Counter(lg.Callback):
    """Counts what it sees of a run, and keeps it in checkpoints."""

    def __init__(self):
        self.counts = {}

    def state_dict(self):
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict):
        self.counts = dict(state_dict["counts"])

    def _count(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self._count("batches")

    def on_train_epoch_end(self, trainer, task):
        if trainer.state.epoch_rounds >= trainer.num_training_batches:
            self._count("epochs")

    def on_validation_end(self, trainer, task):
        self._count("validations")


def make_trainer(folder, callbacks=(), checkpoint=True, dirpath=None, **arguments):
    settings = {
        "accelerator": "cpu",
        "strategy": "single",
        "replicas": 2,
        "reproducible": "bitwise",
        "accumulate_grad_batches": 2,
        "max_epochs": EPOCHS,
        "val_check_interval": 4,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "save_code": False,
        "default_root_dir": folder,
        "seed": 11,
        **arguments,
    }
    watching = [EarlyStopping("val/loss", patience=50), Counter(), *callbacks]
    if checkpoint:
        watching.append(Checkpoint(monitor="val/loss", save_top_k=2, every_n_train_steps=3, dirpath=dirpath))
    return lg.Trainer(**{"enable_checkpointing": checkpoint, **settings}, callbacks=watching)


def loaders(workers=0, dataset=None):
    return (
        DataLoader(dataset or Augmented(), 3, shuffle=True, num_workers=workers),
        DataLoader(Augmented(7), 2, num_workers=workers),
    )


def fit(folder, callbacks=(), workers=0, resume="auto", weights=0, **arguments):
    trainer = make_trainer(folder, callbacks, **arguments)
    task = Net(weights)
    with unchanged():
        trainer.fit(task, *loaders(workers), resume=resume)
    return trainer, task


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value.detach().double().flatten()]
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in tensors_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [torch.tensor([float(value)], dtype=torch.float64)] if isinstance(value, (int, float)) else []


def everything(trainer, task):
    """Return weights, buffers, optimizer state and schedulers as one tensor."""
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return torch.cat(tensors_of([task.state_dict(), trainer.optimizers[0].state_dict(), schedulers]))


def lines(run_dir):
    """Return the points of metrics.jsonl by step, without what tells the time; each step stands there once."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    return {record["step"]: {name: value for name, value in record.items() if not is_time(name)} for record in records}


def is_time(name):
    return name in TIMES or "per_second" in name or "seconds" in name or "time" in name


def scalars(run_dir):
    """Return the points that TensorBoard shows: (tag, step) -> values. Not `~best/`, written whenever a run ends."""
    written = {}
    for tag, shown in points(run_dir).items():
        for step, value in shown:
            written.setdefault((tag, step), []).append(value)
    return {key: values for key, values in written.items() if not is_time(key[0]) and not key[0].startswith("~best/")}


def summary(trainer, task):
    """Return what a run comes to, but for its times."""
    stopping, counter = trainer.callbacks[:2]
    state = trainer.state.to_dict()
    return {
        "state": {name: value for name, value in state.items() if name != "elapsed"},
        "best": {
            os.path.basename(path): float(score) for path, score in trainer.checkpoint_callback.best_k_models.items()
        },
        "stopping": (stopping.wait_count, stopping.best_score),
        "counts": counter.counts,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if not is_time(name)},
    }


def run_undisturbed(folder):
    """Return what the run comes to if nothing happens."""
    trainer, task = fit(folder)
    assert trainer.global_step == STEPS
    return {
        "everything": everything(trainer, task),
        "summary": summary(trainer, task),
        "lines": lines(trainer.run_dir),
        "scalars": scalars(trainer.run_dir),
    }


def assert_same(trainer, task, undisturbed):
    assert torch.equal(everything(trainer, task), undisturbed["everything"])
    # a run that was stopped has more checkpoints to choose the best of
    assert summary(trainer, task) | {"best": None} == undisturbed["summary"] | {"best": None}
    assert lines(trainer.run_dir) == undisturbed["lines"]
    assert scalars(trainer.run_dir) == undisturbed["scalars"]
