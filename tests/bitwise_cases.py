"""Small runs of every kind, and fingerprints of their results."""

import hashlib
import json
import os
import signal
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import legato as lg
from examples.characters import ALPHABET, CharacterGPT
from legato.loggers import JSONLinesLogger
from legato.trainer.processes.rendezvous import leave_process_group

REPLICAS = 5
"""So many that a block of one of two processes ends within a subtree, and blocks of two or three differ in size."""
SHARDED = ("zero1", "fsdp", "mesh")
"""Strategies with a sharded optimizer state, which a resume tests."""
CLASSES = 3


class Noisy(Dataset):
    """Inputs that differ each time: half of each is drawn when it is loaded."""

    def __init__(self, samples, shape):
        self.samples = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(samples))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        noise = torch.rand(()) + float(np.random.rand())
        return sample + noise * torch.randn(sample.shape), int(sample.mean() * 10) % CLASSES


class Text(Dataset):
    """Random characters, and the next ones."""

    def __init__(self, samples=23):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        tokens = torch.randint(len(ALPHABET), (9,))
        return tokens[:-1], tokens[1:]


class Classifier(lg.Task):
    """Base of the tasks below; `die` is (stage, global step, batch or None) at which rank 1 is killed."""

    die = None

    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        self.may_die("train", batch_idx)
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.may_die("validation", batch_idx)
        logits = self(batch[0])
        self.log("val/loss", functional.cross_entropy(logits, batch[1]))
        self.log("val/correct", (logits.argmax(1) == batch[1]).float().sum(), reduce_fx="sum")

    def may_die(self, *here):
        if self.die is not None and (here[0], self.global_step, *here[1:]) == self.die:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3, fused=self.optimizer == "fused adamw")
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Perceptron(Classifier):
    """Dropout, torchmetrics with states of real numbers, and a layer that only some batches use."""

    def __init__(self, optimizer="sgd"):
        from torchmetrics import MeanMetric, MeanSquaredError, SumMetric

        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(7, 19), nn.ReLU(), nn.Dropout(0.3), nn.Linear(19, CLASSES))
        self.seldom, self.never = nn.Linear(7, CLASSES), nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(()))
        self.mean, self.error, self.total, self.output_sum = MeanMetric(), MeanSquaredError(), SumMetric(), SumMetric()

    def forward(self, inputs):
        logits = self.net(inputs)
        return logits + self.seldom(inputs) if self.training and inputs[0, 0] > 0.5 else logits

    def training_step(self, batch, batch_idx):
        if batch[0][0, 1] > 1.5:
            return None
        self.average = 0.9 * self.average + 0.1 * batch[0].mean()  # assigns another tensor to the buffer
        loss = super().training_step(batch, batch_idx) * (1 + 0.01 * self.average)
        self.mean.update(loss.detach(), len(batch[1]))
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.error.update(self(batch[0]).softmax(1)[:, 0], (batch[1] == 0).float())
        self.total.update(self(batch[0]).square().sum())
        self.output_sum.update(self(batch[0]).sum())
        self.log_dict({"val/error": self.error, "val/total": self.total})

    def on_validation_epoch_end(self):
        self.log("val/own", self.output_sum.compute())
        self.output_sum.reset()


class Convolutions(Classifier):
    """Batch norm, whose forward changes its statistics."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.net = nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(5 * 16, CLASSES)
        )

    def forward(self, images):
        return self.net(images)


def make_gpt():
    return CharacterGPT(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.1, warmup_steps=2, sample_length=2)


@dataclass(frozen=True)
class Case:
    """A run: task, data and options. 43 samples are five rounds of 5 replicas x 2, of which the last is short."""

    make: object
    data: object
    options: dict = field(default_factory=dict)
    batch_size: int = 2

    def loader(self, workers=0, shuffle=True):
        return DataLoader(self.data, self.batch_size, shuffle=shuffle, num_workers=workers)


def vectors(samples=43):
    return Noisy(samples, (7,))


CASES = {
    "mlp sgd accumulate clip": Case(
        Perceptron, vectors(), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 2}
    ),
    "mlp fused adamw bf16": Case(lambda: Perceptron("fused adamw"), vectors(26), {"precision": "bf16-mixed"}, 3),
    "cnn adamw": Case(Convolutions, Noisy(23, (2, 6, 6)), {"accumulate_grad_batches": 2}),
    "cnn sgd bf16 clip": Case(
        lambda: Convolutions("sgd"),
        Noisy(33, (2, 6, 6)),
        {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        4,
    ),
    "gpt adamw clip": Case(make_gpt, Text(), {"gradient_clip_val": 1.0}),
    "gpt adamw bf16 accumulate": Case(make_gpt, Text(), {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
}


class Fingerprint(lg.callbacks.MonitoringCallback):
    """Computes fingerprints at the end of training, and stops it after `stop_after` steps."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.fingerprints = {}

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.stop_after:
            trainer.should_stop = True

    def on_train_end(self, trainer, task):
        optimizers = [] if trainer.strategy.name in SHARDED else trainer.optimizers
        self.fingerprints = {
            "weights": digest((name, full_tensor(tensor)) for name, tensor in task.named_parameters()),
            "buffers": digest(task.named_buffers()),
            "optimizer": digest(
                (f"{index} {name}", value)
                for optimizer in optimizers
                for index, values in sorted(optimizer.state_dict()["state"].items())
                for name, value in sorted(values.items())
            ),
            "callback_metrics": {name: value.item().hex() for name, value in sorted(trainer.callback_metrics.items())},
            "counts": [trainer.global_step, trainer.current_epoch, trainer.state.samples_seen],
        }
        every = trainer.strategy.collectives.gather_objects(self.fingerprints)
        same = all(fingerprints == self.fingerprints for fingerprints in every)
        assert trainer.reproducible != "bitwise" or same, "the processes differ"


def full_tensor(tensor):
    """Return the full tensor, also of a sharded one."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def digest(named):
    """Return a hash of tensors and numbers, with their names, types, shapes and every bit."""
    hashed = hashlib.sha256()
    for name, value in named:
        tensor = torch.as_tensor(value).detach()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def run(case, root, *, workers=0, checkpoints=False, stop_after=None, die=None, **options):
    """Run `case`, or resume the run in `root`; return its fingerprints."""
    torch.manual_seed(0)
    task = case.make()
    task.die = die
    fingerprint = Fingerprint(stop_after)
    callbacks = [fingerprint, *([lg.callbacks.Checkpoint(every_n_train_steps=1)] if checkpoints else [])]
    defaults = {"max_epochs": 2, "accelerator": "cpu", "replicas": REPLICAS, "reproducible": "bitwise"}
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "save_code"), False)
    quiet["enable_checkpointing"] = checkpoints
    settings = {**defaults, **quiet, "log_every_n_steps": 1, "num_sanity_val_steps": 1, **case.options, **options}
    trainer = lg.Trainer(**settings, default_root_dir=root, logger=JSONLinesLogger(), callbacks=callbacks)
    validation = replace(
        case, data=case.data if isinstance(case.data, Text) else Noisy(13, case.data.samples.shape[1:])
    )
    trainer.fit(task, case.loader(workers), validation.loader(workers, shuffle=False), resume="auto")
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    return {**fingerprint.fingerprints, "metrics": [without_clock(line) for line in lines]}


def without_clock(line):
    """Return a logged point without values that depend on the machine's speed."""
    return {name: value for name, value in line.items() if name != "time" and not name.startswith("throughput/")}


def run_all(root, names, processes, **options):
    """Run these cases in turn, in the same processes."""
    try:
        options = {"strategy": "ddp", "devices": processes, **options}
        return {name: run(CASES[name], root / name, **options) for name in names}
    finally:
        leave_process_group()
