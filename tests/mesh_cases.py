"""Small tasks for strategies that shard parameters, and their layouts of 2 and 4 processes."""

import tempfile

import torch
from ddp_cases import QUIET, flat
from tiny import Memory, unchanged
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import legato as lg
from examples.characters import ALPHABET, CharacterGPT

generator = torch.Generator().manual_seed(3)
tokens = torch.randint(0, len(ALPHABET), (40, 9), generator=generator)
TEXT = TensorDataset(tokens[:, :-1], tokens[:, 1:])
IMAGES = TensorDataset(torch.randn(40, 1, 6, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator))

# AdamW makes a full step for a gradient that is only rounding (the key bias of attention has none). A larger eps keeps
# such steps small, so that weights can be compared.
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


class GPT(CharacterGPT):
    def __init__(self, optimizer="sgd", dropout=0.0):
        torch.manual_seed(5)
        super().__init__(1, 4, 16, 8, dropout, sample_length=2)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


class LateGPT(GPT):
    """Builds its modules in configure_model, and records the device that they were built on."""

    def __init__(self, optimizer="sgd"):
        lg.Task.__init__(self)
        self.save_hyperparameters({"block_size": 8, "sample_length": 2})
        self.optimizer = optimizer
        self.devices_seen = []

    def configure_model(self):
        if hasattr(self, "head"):
            return
        made = GPT()
        self.embedding, self.blocks, self.head = made.embedding, made.blocks, made.head
        self.devices_seen.append(next(self.parameters()).device.type)


class CNN(lg.Task):
    """A convolution with batch norm, and a perceptron that calls its layers one by one."""

    def __init__(self, optimizer="sgd", norm=True):
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.Tanh())
        self.wide, self.narrow = nn.Linear(64, 8), nn.Linear(8, 3)
        self.optimizer = optimizer

    def tensor_plan(self):
        return {"wide": "column", "narrow": "row"}

    def loss(self, batch):
        image, label = batch
        return nn.functional.cross_entropy(self.narrow(self.wide(self.body(image).flatten(1)).tanh()), label)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))
        self.log("val/samples", float(len(batch[0])), reduce_fx="sum", batch_size=1)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[1].tolist()

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def mesh(**options):
    return {"name": "mesh", "shard_blocks": 40, **options}


LAYOUTS = {
    2: {"shard": mesh(shard=2), "data": mesh(data="auto"), "tensor": mesh(tensor=2), "zero1": "zero1"},
    4: {
        "shard": mesh(shard=4),
        "data x shard": mesh(data=2, shard="auto"),
        "tensor": mesh(tensor=4),
        "shard x tensor": mesh(shard=2, tensor=2),
        "data x tensor": mesh(data=2, tensor=2),
        "zero1": "zero1",
    },
}
"""By the number of processes."""
RUNS = {
    "sgd": {"replicas": 4, "batch_size": 2},
    "adamw": {"replicas": 5, "batch_size": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
}
"""By optimizer. Four replicas go evenly into 2 and 4 processes, five do not; the last step of an epoch is short."""


class Tied(GPT):
    """Two modules share a tensor."""

    def __init__(self):
        super().__init__()
        self.head[1].weight = self.embedding.token.weight


class Dropped(GPT):
    def __init__(self):
        super().__init__(dropout=0.1)


class Thaws(CNN):
    """Trains its body from the second epoch on."""

    def __init__(self):
        super().__init__(norm=False)
        self.body.requires_grad_(False)

    def on_train_epoch_start(self):
        self.body.requires_grad_(self.current_epoch > 0)


class Leaves(CNN):
    """Ends the first epoch within its second step, after the first batch of the step."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 3) else None


class Explodes(CNN):
    """One replica's loss is infinite in the second step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.trainer.metrics.replica == 1 else loss


SHARD = mesh(shard=2)
COMPILE = {"blocks": ["Perceptron"], "backend": "eager"}
FEATURES = {
    "a block for each class": (GPT, {"strategy": {"name": "fsdp", "shard_blocks": ["Block", "Linear"]}}),
    "one block": (GPT, {"strategy": "fsdp"}),
    "blocks that stay gathered": (GPT, {"strategy": mesh(shard=2, reshard_after_forward=False)}),
    "parts on the host": (GPT, {"strategy": mesh(shard=2, cpu_offload=True)}),
    "built on rank 0": (LateGPT, {"strategy": mesh(shard=2, meta_init=True), "gradient_clip_val": 0.2}),
    "built on rank 0 and cut": (LateGPT, {"strategy": mesh(tensor=2, meta_init=True), "replicas": 2}),
    "bf16-mixed": (GPT, {"strategy": SHARD, "precision": "bf16-mixed"}),
    "16-mixed": (CNN, {"strategy": SHARD, "precision": "16-mixed", "gradient_clip_val": 0.1}),
    "16-mixed, cut": (CNN, {"strategy": mesh(tensor=2), "precision": "16-mixed", "gradient_clip_val": 0.1}),
    "16-mixed, no batch": (CNN, {"strategy": "zero1", "precision": "16-mixed", "gradient_clip_val": 0.1, "samples": 2}),
    "bf16-true": (GPT, {"strategy": SHARD, "precision": "bf16-true"}),
    "64-true": (GPT, {"strategy": SHARD, "precision": "64-true"}),
    "clipped by value": (
        GPT,
        {"strategy": mesh(tensor=2), "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "one tensor in two places": (Tied, {"strategy": SHARD}),
    "parts that thaw": (Thaws, {"strategy": SHARD, "max_epochs": 2}),
    "an epoch that is left": (
        Leaves,
        {"strategy": SHARD, "max_epochs": 2, "replicas": 2, "accumulate_grad_batches": 2},
    ),
    "a step that is dropped": (Explodes, {"strategy": SHARD, "nan": "skip", "replicas": 2}),
    "compiled blocks": (  # whose layers are sharded by themselves
        GPT,
        {"strategy": SHARD | {"shard_blocks": ["Perceptron", "Linear"]}, "compile": COMPILE},
    ),
    "activations computed twice": (Dropped, {"strategy": SHARD, "activation_checkpointing": ["Block"]}),
    "the same under ddp": (Dropped, {"strategy": "ddp", "activation_checkpointing": ["Attention", "Perceptron"]}),
}
"""On 2 processes; each is compared with one process under the same options, except the strategy."""


def data_of(task, samples):
    return Subset(TEXT if isinstance(task, CharacterGPT) else IMAGES, range(samples))


def fit(task, batch_size=2, samples=19, resume=None, **options):
    memory = Memory()
    folder = tempfile.gettempdir()  # a run with a logger has a folder
    trainer = lg.Trainer(**{**QUIET, "max_epochs": 1, "logger": memory, "default_root_dir": folder, **options})
    train = DataLoader(data_of(task, samples), batch_size, shuffle=True)
    with unchanged():
        trainer.fit(task, train, DataLoader(data_of(task, 7), 2), resume=resume)
    trainer.memory = memory
    return trainer


def curve(trainer):
    """Return the loss of every step, and the metrics of every epoch."""
    steps = [value for _, value in trainer.memory.of("train/loss_step")]
    return torch.tensor([*steps, *(float(value) for _, value in sorted(trainer.callback_metrics.items()))])


def outcome(task, **options):
    """Return the weights, and the curve if this process has it."""
    trainer = fit(task, **options)
    return flat(task), curve(trainer)


def in_one(task, **options):
    return outcome(task, strategy="single", **options)


def difference(actual, expected):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(actual, expected, strict=True))
