"""A scene: all that one small run is made of. Features add to it, faults disturb it."""

import copy
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import legato as lg
from legato.callbacks import Checkpoint, PredictionWriter
from legato.loggers.logger import Logger

SAMPLES, HELD_OUT, BATCH, EPOCHS = 26, 10, 4, 3
"""Seven batches an epoch, the last one short: with two replicas four steps, in whose last one replica has no batch."""
BAD_SAMPLE = 9
INJECTED = "injected fault"


@dataclass
class Scene:
    """What a run is made of; `Feature.add` changes it."""

    arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callable[[Path], lg.Callback]] = field(default_factory=list)
    loggers: list[Callable[[Path], Logger]] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    around: list[str] = field(default_factory=list)
    """What else is done with the trainer: "fit before", "validate before", "evaluate after", "predict after"."""
    stops_at: list[int] = field(default_factory=list)
    """Steps at which a run ends by max_steps, to be resumed."""
    tolerance: float = 0.0
    """How far numbers may be from the reference's; 0: every bit is the same."""


# --- data ---------------------------------------------------------------------------------------------------------
class Numbers(Dataset):
    """Inputs (4), target (1) and index of each sample; with `noise` drawn from all three global generators."""

    def __init__(self, count: int, noise: bool = False, bad: bool = False, fault: "Fault | None" = None) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True).sin()
        if bad:
            self.targets[BAD_SAMPLE] = torch.inf
        self.noise, self.fault = noise, fault

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        if self.fault is not None and index == BAD_SAMPLE and self.fault.read_twice():
            raise RuntimeError(f"{INJECTED} data")
        inputs = self.inputs[index]
        if self.noise:
            inputs = inputs + torch.randn(4) / 10 + np.random.rand() / 10 + random.random() / 10
        return inputs.float(), self.targets[index], torch.tensor(float(index))


class Stream(IterableDataset):
    """The same samples, one after the other, without a length."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __iter__(self):
        return (self.numbers[index] for index in range(len(self.numbers)))


def make_loader(count: int, options: dict[str, Any], fault: "Fault | None" = None, shuffle: bool = True) -> Any:
    """Return what fit is given as a loader."""
    numbers = Numbers(count, options.get("noise", False), options.get("bad", False) and shuffle, fault)
    arguments = {"batch_size": BATCH, "num_workers": options.get("workers", 0)}
    if options.get("workers"):
        arguments["persistent_workers"] = options.get("persistent", False)
    if options.get("stream") and shuffle:
        return DataLoader(Stream(numbers), **arguments)
    first = DataLoader(numbers, shuffle=shuffle, drop_last=options.get("drop_last", False) and shuffle, **arguments)
    if not options.get("several"):
        return first
    second = DataLoader(Numbers(count // 2, options.get("noise", False)), shuffle=shuffle, **arguments)
    return {"first": first, "second": second} if shuffle else [first, second]


# --- the task -----------------------------------------------------------------------------------------------------
class Net(lg.Task):
    """Three layers in one nn.Sequential; `options` say what else it does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.automatic_optimization = not options.get("manual")
        generator = torch.Generator().manual_seed(5)
        norm = nn.BatchNorm1d(8) if options.get("norm") else nn.Identity()
        dropout = nn.Dropout(0.2 if options.get("dropout") else 0.0)
        self.net = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), dropout, nn.Linear(8, 1))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
        if options.get("metrics"):
            import torchmetrics

            self.mean_metric = torchmetrics.MeanMetric()
            self.largest_metric = torchmetrics.MaxMetric()
            self.validation_metric = torchmetrics.MeanSquaredError()

    @property
    def backbone(self):
        """What BackboneFinetuning freezes."""
        return self.net[0]

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.net(batch[0])

    def error(self, batch):
        inputs, targets, _ = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        indices = torch.cat([piece[2] for piece in parts])
        if self.options.get("none") and bool((indices == 3).any()):
            return None
        loss = torch.stack([self.error(piece) for piece in parts]).mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        # which samples make up a step: no other set of them is likely to have this sum
        samples = (indices + 1).square().sum()
        self.log("train/samples", samples, on_step=True, on_epoch=True, reduce_fx="sum")
        if self.options.get("metrics"):
            self.mean_metric.update(loss.detach(), weight=len(indices))
            self.largest_metric.update(indices)
            self.log("metric/mean", self.mean_metric, on_step=False, on_epoch=True)
            self.log("metric/largest", self.largest_metric, on_step=False, on_epoch=True)
        if not self.options.get("manual"):
            return [loss, loss * 2] if self.options.get("two optimizers") else loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer)
        optimizer.step()
        return None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if "trained" in self.options and self.global_step:
            Path(self.options["trained"]).touch()

    def on_train_epoch_start(self):
        if self.options.get("freeze"):
            self.net[0].requires_grad_(self.current_epoch != 1)

    def on_train_batch_start(self, batch, batch_idx):
        if self.options.get("leave") and self.current_epoch == 1 and batch_idx == 2:
            return -1
        return None

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if isinstance(batch, dict):  # overfit_batches: the training loaders
            batch = batch["first"]
        error = self.error(batch)
        self.log("val/loss", error, add_dataloader_idx=dataloader_idx > 0)
        self.log("val/samples", batch[2].sum(), reduce_fx="sum", add_dataloader_idx=dataloader_idx > 0)
        if self.options.get("metrics"):
            self.validation_metric.update(self.net(batch[0]), batch[1])
            if not dataloader_idx:
                self.log("metric/validation", self.validation_metric, add_dataloader_idx=False)

    def configure_optimizers(self):
        if self.options.get("two optimizers"):
            first = torch.optim.SGD(self.net[:2].parameters(), lr=0.05, momentum=0.9)
            return first, torch.optim.AdamW(self.net[2:].parameters(), lr=0.01, eps=1e-3)
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        kind, schedulers = self.options.get("scheduler", "epoch"), []
        if "epoch" in kind:
            schedulers.append({"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)})
        if "step" in kind:
            schedulers.append({"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8), "interval": "step"})
        if "plateau" in kind:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.3)
            schedulers.append({"scheduler": plateau, "monitor": "train/loss_epoch"})
        return [optimizer], schedulers


# --- callbacks that use what others use -----------------------------------------------------------------------------
class Draws(lg.Callback):
    """Draws from the global generators wherever it may."""

    def draw(self, *arguments: Any) -> None:
        torch.rand(3), np.random.rand(3), random.random()

    on_train_epoch_start = on_train_batch_end = on_validation_start = on_validation_batch_start = draw
    on_validation_end = on_before_zero_grad = on_after_backward = on_save_checkpoint = on_train_epoch_end = draw


class Writes(PredictionWriter):
    """Writes which samples were predicted, each process into a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder / "predicted"

    def write_on_batch_end(self, trainer, task, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{dataloader_idx}-{trainer.global_rank}.txt").open("a", encoding="utf-8") as file:
            file.writelines(f"{int(index)}\n" for index in batch[2])
        assert list(batch_indices) == batch[2].tolist()

    def write_on_epoch_end(self, trainer, task, predictions, batch_indices):
        assert len(batch_indices) == len(trainer.num_predict_batches)

    def found(self, loader: int) -> list[int]:
        """Return the samples of a loader that were predicted, by all processes."""
        return sorted(int(line) for path in self.folder.glob(f"{loader}-*.txt") for line in path.read_text().split())


class Reads(lg.Callback):
    """Reads from the training loader while the run reads from it."""

    def __init__(self, part: int = 2) -> None:
        self.part = part

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.stage == "fit":
            loader = trainer.train_dataloader
            for source in loader.values() if isinstance(loader, dict) else [loader]:
                next(iter(source))

    on_validation_end = lambda self, trainer, task: self.on_train_batch_end(trainer, task, None, None, 1)  # noqa: E731


class Saves(lg.callbacks.MonitoringCallback):
    """Saves a checkpoint of its own every second step, in the folder where the Checkpoint callback has its own."""

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous, self.step = asynchronous, 0

    def on_train_start(self, trainer, task):
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step % 2 == 0 and trainer.global_step != self.step:
            self.step = trainer.global_step
            path = Path(trainer.run_dir) / "checkpoints" / "mine"
            trainer.save_checkpoint(path, asynchronous=self.asynchronous)


class Says(lg.Callback):
    """Writes to every stream there is."""

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        print("a line")
        print("another one", file=sys.stderr)
        logging.getLogger("a user's").info("a message")

    def on_validation_epoch_end(self, trainer, task):
        trainer.print("of rank 0")


class Validates(lg.Callback):
    """Validates a copy of the task with another trainer, where the run has validated."""

    def on_validation_end(self, trainer, task):
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        inner = lg.Trainer(accelerator="cpu", strategy="single", default_root_dir=trainer.default_root_dir, **quiet)
        inner.validate(copy.deepcopy(task), make_loader(HELD_OUT, {}, shuffle=False), verbose=False)


class Logs(lg.Callback):
    """Logs in hooks, beside the task."""

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        task.log("hook/step", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)

    def on_train_epoch_end(self, trainer, task):
        task.log("hook/epoch", float(trainer.current_epoch))

    def on_validation_epoch_end(self, trainer, task):
        task.log("hook/validation", float(trainer.global_step))


class Counts(lg.Callback):
    """Adds to what is saved, and takes it over."""

    def __init__(self) -> None:
        self.seen = torch.zeros(2)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"].clone()

    def on_save_checkpoint(self, trainer, task, checkpoint):
        checkpoint["counts"] = {"seen": self.seen.clone(), "epoch": trainer.current_epoch}

    def on_load_checkpoint(self, trainer, task, checkpoint):
        assert checkpoint["counts"]["epoch"] <= trainer.max_epochs if trainer.max_epochs not in (None, -1) else True


# --- faults -------------------------------------------------------------------------------------------------------
class Fault:
    """Something that goes wrong once, at a step; a file says that it has happened."""

    def __init__(self, kind: str, step: int, folder: Path) -> None:
        self.kind, self.step, self.folder = kind, step, folder

    @property
    def mark(self) -> Path:
        return self.folder / f"fired-{self.kind}"

    @property
    def fired(self) -> bool:
        return self.mark.exists()

    def fire(self) -> bool:
        """Return whether it is to happen now: once, in one of the processes."""
        if (self.folder / "disarmed").exists():
            return False
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def read_twice(self) -> bool:
        """Return whether a sample is read for the second time, and this is to fail."""
        if (self.folder / "disarmed").exists():
            return False
        try:
            os.close(os.open(self.folder / "read-once", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return self.fire()
        return False

    def explains(self, error: BaseException) -> bool:
        """Return whether this fault may end a run by `error`."""
        if self.kind in ("sigterm", "sigterm in validation"):
            return isinstance(error, SystemExit) and error.code == 75
        if self.kind == "sigint":
            return isinstance(error, KeyboardInterrupt)
        if self.kind == "kill":
            return "SIGKILL" in str(error)
        return f"{INJECTED} {self.kind}" in str(error)


class FaultyCallback(lg.Callback):
    """Lets a fault happen in a hook."""

    def __init__(self, fault: Fault, rank: int = 0) -> None:
        self.fault, self.rank = fault, rank

    @property
    def state_key(self) -> str:
        return f"fault {self.fault.kind}"

    def strike(self, trainer: lg.Trainer) -> None:
        if trainer.global_step < self.fault.step or trainer.global_rank != self.rank % trainer.world_size:
            return
        if not self.fault.fire():
            return
        numbers = {"sigterm": signal.SIGTERM, "sigterm in validation": signal.SIGTERM, "sigint": signal.SIGINT}
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.kind in numbers:
            os.kill(os.getpid(), numbers[self.fault.kind])
        else:
            raise RuntimeError(f"{INJECTED} {self.fault.kind}")

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if self.fault.kind in ("sigterm", "sigint", "hook", "kill"):
            self.strike(trainer)

    def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        if self.fault.kind in ("sigterm in validation", "validation hook") and not trainer.sanity_checking:
            self.strike(trainer)

    def on_before_zero_grad(self, trainer, task, optimizer):
        if self.fault.kind == "zero_grad hook":
            self.strike(trainer)

    def on_save_checkpoint(self, trainer, task, checkpoint):
        if self.fault.kind == "save":
            self.strike(trainer)

    def on_train_epoch_end(self, trainer, task):
        if self.fault.kind == "epoch hook":
            self.strike(trainer)


class FaultyLogger(Logger):
    """Lets a fault happen where a point is written, or where the log ends."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def log_metrics(self, metrics, step):
        if self.fault.kind == "logger" and step >= self.fault.step and self.fault.fire():
            raise OSError(28, f"{INJECTED} logger")

    def finalize(self, status):
        if self.fault.kind == "finalize" and self.fault.fire():
            raise OSError(28, f"{INJECTED} finalize")


def make_trainer(scene: Scene, folder: Path, faults: list[Fault], **changed: Any) -> lg.Trainer:
    """Return the trainer of a scene."""
    arguments = {
        "accelerator": "cpu",
        "strategy": "single",
        "replicas": 2,
        "threads": 1,
        "max_epochs": EPOCHS,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "save_code": False,  # by git, in three processes a run
        "default_root_dir": folder / "runs",
        **scene.arguments,
        **changed,
    }
    callbacks = [Checkpoint(**{"monitor": "val/loss", "save_top_k": 2, **scene.checkpoint})]
    callbacks += [make(folder) for make in scene.callbacks]
    loggers = [make(folder) for make in scene.loggers]
    for index, fault in enumerate(faults):
        if fault.kind in ("logger", "finalize"):
            loggers.append(FaultyLogger(fault))
        elif fault.kind != "data":
            callbacks.append(FaultyCallback(fault, rank=1 if fault.kind == "kill" else index))
    if loggers:
        arguments["logger"] = [lg.loggers.TensorBoardLogger(), lg.loggers.JSONLinesLogger(), *loggers]
    return lg.Trainer(callbacks=callbacks, **arguments)
