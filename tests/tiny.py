"""The smallest task, data and trainer that can show something."""

import logging
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from legato.loggers.logger import Logger


class Tiny(lg.Task):
    """Two layers, squared error, SGD. `seen` keeps the first input of every training batch."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2
        self.lr = lr
        self.seen = []

    def forward(self, inputs):
        return self.model(inputs)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].clone())
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Validated(Tiny):
    """Logs its validation loss."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Watched(Validated):
    """Remembers at which steps it was validated, and on how many batches."""

    def __init__(self):
        super().__init__()
        self.at, self.batches = [], 0

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.at.append(self.global_step)

    def on_validation_batch_start(self, batch, batch_idx):
        self.batches += 1


class Two(Tiny):
    """Two models in a row; each has a loss and an optimizer, and the second loss depends on both models."""

    def __init__(self, as_dict=False):
        super().__init__()
        self.second = nn.Linear(1, 1)
        nn.init.constant_(self.second.weight, 0.5)
        nn.init.constant_(self.second.bias, 0.1)
        self.as_dict = as_dict

    def losses(self, batch):
        first = self.model(batch[0])
        return [nn.functional.mse_loss(first, batch[1]), (self.second(first) - batch[1]).abs().mean()]

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        return {"loss": losses} if self.as_dict else losses

    def configure_optimizers(self):
        return SGD(self.model.parameters(), lr=0.1), Adam(self.second.parameters(), lr=0.01)


class ManualUpdate:
    """Base class before a task's: makes the update of its only optimizer by manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@contextmanager
def unchanged():
    """See that no resume in here says that its settings have changed."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("legato").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("legato").removeHandler(handler)
    assert not [message for message in messages if "with settings that differ" in message]


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.points = []

    def log_metrics(self, metrics, step):
        self.points.append((step, dict(metrics)))

    def of(self, name):
        """Return (step, value) of every point of `name`."""
        return [(step, metrics[name]) for step, metrics in self.points if name in metrics]


class Says(Tiny):
    """Logs what `say` logs, in each training step."""

    def __init__(self, say, validation=None):
        super().__init__()
        self.say, self.say_in_validation = say, validation

    def training_step(self, batch, batch_idx):
        self.say(self, batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        if self.say_in_validation:
            self.say_in_validation(self, batch, batch_idx)


def logs(**options):
    """Log the index of the batch under `x`."""
    return lambda task, batch, batch_idx: task.log("x", float(batch_idx), **options)


def make_data(samples: int = 20) -> TensorDataset:
    """Inputs (samples, 3) and what is to be learned from them (samples, 1)."""
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def make_loader(samples: int = 20, batch_size: int = 4, **options) -> DataLoader:
    """Load `make_data(samples)`."""
    return DataLoader(make_data(samples), batch_size=batch_size, **options)


def make_trainer(folder, **options) -> lg.Trainer:
    """A trainer on one CPU that writes below `folder`, and by default nothing at all."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder, "save_code": False}
    return lg.Trainer(**{**defaults, **quiet, **options})


def weights(module: nn.Module) -> list[float]:
    """The parameters, as one list."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def assert_same_bits(first: nn.Module, second: nn.Module) -> None:
    """Fail unless both hold the same parameters and buffers, to the last bit."""
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def assert_close(first: nn.Module, second: nn.Module) -> None:
    """Fail unless both hold the same parameters but for rounding."""
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def train_by_hand(task: Tiny, loader, epochs: int = 1, accumulate: int = 1, before_step=None) -> Tiny:
    """Train `task` with a plain loop; the gradient of a step is the mean over its samples."""
    optimizer = torch.optim.SGD(task.parameters(), lr=task.lr)
    for _ in range(epochs):
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            samples = sum(len(batch[0]) for batch in window)
            optimizer.zero_grad()
            for batch in window:
                loss = task.loss(batch)
                share = len(batch[0]) / samples
                (loss if share == 1.0 else loss * share).backward()
            if before_step is not None:
                before_step(task)
            optimizer.step()
    return task
