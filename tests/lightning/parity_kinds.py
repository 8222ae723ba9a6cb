"""Kinds of modules, each trained under the package that is named; what each rank sees of it goes to OUT.RANK.

python parity_kinds.py lightning.pytorch OUT [kinds]
torchrun --nproc-per-node 2 parity_kinds.py lightning.pytorch OUT [kinds]
"""

import json
import logging
import os
import sys
import warnings
from importlib import import_module

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
pl = import_module(sys.argv[1])
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Numbers(Dataset):
    """Sixteen points of a line for each process, or `more`."""

    def __init__(self, shift=0.0, more=0):
        count, generator = 16 * PROCESSES + more, torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 3, generator=generator) + shift
        self.targets = self.inputs.sum(1, keepdim=True)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset):
    """The shard of a process, which it selects itself."""

    def __iter__(self):
        numbers = Numbers()
        yield from (numbers[index] for index in range(RANK, len(numbers), PROCESSES))


def loader(batch_size=4, trains=True, **options):
    """Return a loader in order; on several processes with a sampler, because Lightning's sampler would shuffle."""
    numbers = Numbers(**options)
    spread = trains and PROCESSES > 1
    sampler = DistributedSampler(numbers, PROCESSES, RANK, shuffle=False) if spread else None
    return DataLoader(numbers, batch_size=batch_size, sampler=sampler)


class Memory(pl.loggers.Logger):
    """Stores points."""

    def __init__(self):
        super().__init__()
        self.points = []

    name, version, save_dir = "memory", 0, None

    def log_hyperparams(self, params, *args, **kwargs):
        """Store nothing."""

    def log_metrics(self, metrics, step=None):
        self.points.append([step, {name: round(float(value), 5) for name, value in sorted(metrics.items())}])


HOOKS = {
    **dict.fromkeys(("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"), 0),
    **dict.fromkeys(("on_train_epoch_end", "on_validation_start", "on_validation_end", "on_after_backward"), 0),
    **dict.fromkeys(("on_validation_epoch_start", "on_validation_epoch_end", "on_before_backward"), 0),
    **dict.fromkeys(("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "setup", "teardown"), 0),
    **dict.fromkeys(("on_before_zero_grad", "on_validation_batch_start", "on_validation_batch_end"), 0),
    **dict.fromkeys(("configure_model", "prepare_data", "on_test_start", "on_test_end", "on_predict_start"), 0),
}


class Base(pl.LightningModule):
    """A small regression that records the order of its hooks and its losses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen = {"hooks": [], "losses": [], "rates": []}

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        self.seen["hooks"].append("training_step")
        loss = self.loss(batch)
        self.seen["losses"].append(round(loss.item(), 5))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.seen["hooks"].append("validation_step")
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen["hooks"].append("on_train_batch_end")
        if self.trainer.optimizers:
            self.seen["rates"].append(round(self.trainer.optimizers[0].param_groups[0]["lr"], 6))


def noted(name):
    def hook(self, *arguments, **options):
        self.seen["hooks"].append(name)

    return hook


for hook_name in HOOKS:
    if hook_name not in vars(Base):
        setattr(Base, hook_name, noted(hook_name))


def scheduler(interval, **more):
    class Scheduled(Base):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            made = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": interval, **more}}

    return Scheduled()


class Contrastive(Base):
    """Compares its batch with those of all ranks; the data do not divide evenly into their batches."""

    def __init__(self):
        super().__init__()
        self.second_layer = nn.Linear(3, 4)

    def loss(self, batch):
        first, second = self.net[0](batch[0]), self.second_layer(batch[0])
        every = self.all_gather(second, sync_grads=self.training).reshape(-1, 4)
        row_numbers = torch.arange(len(first)) + self.global_rank * len(first)
        return nn.functional.cross_entropy(first @ every.T, row_numbers) + self.net(batch[0]).pow(2).mean()

    def train_dataloader(self):
        return loader(more=1)


class ContrastiveByHand(Contrastive):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Plateau(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "monitor": "val"}}


class Several(Base):
    """Two optimizers in manual optimization, like a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.adversary = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        adversarial = (self.adversary(batch[0]) - self(batch[0]).detach()).pow(2).mean()
        second.zero_grad()
        self.manual_backward(adversarial)
        second.step()
        self.log_dict({"first": loss, "second": adversarial}, sync_dist=True)
        self.seen["losses"] += [round(loss.item(), 5), round(adversarial.item(), 5), self.global_step]

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters(), lr=0.05)
        return [first, torch.optim.SGD(self.adversary.parameters(), lr=0.1)], []


class SeveralLoaders(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch["a"]) + self.loss(batch["b"])
        self.seen["losses"].append(round(loss.item(), 5))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch), sync_dist=True)

    def train_dataloader(self):
        return {"a": loader(), "b": loader(shift=1.0)}

    def val_dataloader(self):
        return [loader(trains=False), loader(trains=False, shift=2.0)]


class Metered(Base):
    def __init__(self):
        super().__init__()
        self.error, self.val_error = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        self.error(output, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(output, batch[1])

    def validation_step(self, batch, batch_idx):
        self.val_error.update(self(batch[0]), batch[1])
        self.log("val_error", self.val_error)


class Streams(Base):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=4)


class WholeStream(IterableDataset):
    """All samples, in each process."""

    def __iter__(self):
        numbers = Numbers()
        yield from (numbers[index] for index in range(len(numbers)))


class WholeStreams(Base):
    def train_dataloader(self):
        return DataLoader(WholeStream(), batch_size=4)

    def val_dataloader(self):
        return DataLoader(WholeStream(), batch_size=8)


class Data(pl.LightningDataModule):
    def setup(self, stage):
        self.numbers = Numbers()

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(self.numbers, batch_size=8)


class Transfers(Base):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0], batch[1] + 1


class Configured(Base):
    def configure_model(self):
        if not hasattr(self, "last"):
            self.last = nn.Linear(1, 1)
            nn.init.ones_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, inputs):
        return self.last(self.net(inputs))


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


class Own(Base):
    """Overrides the optimizer step, with a warm-up before its closure, and reads gradients."""

    def on_train_batch_start(self, batch, batch_idx):
        grad = self.net[2].bias.grad
        self.seen["losses"].append(None if grad is None else round(grad.item(), 5))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.seen["hooks"].append("optimizer_step")
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen["hooks"].append("optimizer_zero_grad")
        optimizer.zero_grad()


class Average(Base):
    """Keeps a moving average of its weights."""

    def __init__(self):
        super().__init__()
        self.average = nn.Linear(4, 1)
        self.average.load_state_dict(self.net[2].state_dict())
        self.average.requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        for kept, weight in zip(self.average.parameters(), self.net[2].parameters(), strict=True):
            kept.data.lerp_(weight.data, 0.1)


class Newton(Base):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3)


class Skips(Base):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def stopping():
    return pl.callbacks.EarlyStopping("val", mode="max", patience=1)


class Resumed(Base):
    """Momentum and a decreasing rate, to resume from."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


KINDS = {
    "plain": lambda: (Base(), {}),
    "scheduler per step": lambda: (scheduler("step"), {}),
    "scheduler per epoch": lambda: (scheduler("epoch"), {"max_epochs": 4}),
    "plateau": lambda: (Plateau(), {"max_epochs": 4}),
    "accumulation": lambda: (Base(), {"accumulate_grad_batches": 2}),
    "clip by norm": lambda: (Base(), {"gradient_clip_val": 0.1}),
    "clip by value": lambda: (Base(), {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "several optimizers": lambda: (Several(), {"max_steps": 12}),
    "several loaders": lambda: (SeveralLoaders(), {}),
    "torchmetrics": lambda: (Metered(), {}),
    "streams": lambda: (Streams(), {}),
    "streams, given whole to each process": lambda: (WholeStreams(), {}),
    "data module": lambda: (Base(), {"datamodule": Data()}),
    "transfer hooks": lambda: (Transfers(), {}),
    "configure_model": lambda: (Configured(), {}),
    "frozen parts": lambda: (Frozen(), {}),
    "EMA": lambda: (Average(), {}),
    "early stopping": lambda: (Base(), {"callbacks": [stopping()], "max_epochs": 9}),
    "fast_dev_run": lambda: (Base(), {"fast_dev_run": 2}),
    "overfit_batches": lambda: (Base(), {"overfit_batches": 2}),
    "max_steps": lambda: (Base(), {"max_steps": 6, "max_epochs": -1}),
    "own optimizer step": lambda: (Own(), {}),
    "lbfgs": lambda: (Newton(), {}),
    "skipped batches": lambda: (Skips(), {}),
    "uneven shares": lambda: (Contrastive(), {}),
    "uneven shares, by hand": lambda: (ContrastiveByHand(), {}),
    "limits": lambda: (Base(), {"limit_train_batches": 3, "limit_val_batches": 2, "val_check_interval": 2}),
    "resume": lambda: (Resumed(), {"max_epochs": 3}),
}
ALONE = {
    "skipped batches": "Lightning's processes wait for each other for ever.",
    "lbfgs": "Legato refuses it by name: it evaluates the loss several times a step.",
    "streams, given whole to each process": "Legato refuses it by name: each sample would be trained on twice.",
}
"""Kinds that run only on one process, with the reason."""
LEAVE_PARTS_OUT = ("several optimizers", "frozen parts")
"""Kinds in which a backward does not reach all weights, which Lightning must know on several processes."""


def run(name):
    module, options = KINDS[name]()
    memory, data = Memory(), options.pop("datamodule", None)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    if PROCESSES > 1:
        strategy = "ddp_find_unused_parameters_true" if name in LEAVE_PARTS_OUT else "ddp"
        quiet |= {
            "devices": PROCESSES,
            "strategy": strategy,
            "num_sanity_val_steps": 0,  # Lightning counts it by rank
        }

    def trainer_with(**more):
        defaults = {"max_epochs": 2, "logger": memory, "log_every_n_steps": 1, "accelerator": "cpu"}
        return pl.Trainer(**{**defaults, **quiet, **options, **more})

    has_loader = type(module).train_dataloader is not pl.LightningModule.train_dataloader
    loaders = {} if has_loader or data is not None else {"train_dataloaders": loader(trains=name != "overfit_batches")}
    if data is None and type(module).val_dataloader is pl.LightningModule.val_dataloader:
        loaders["val_dataloaders"] = loader(trains=False, shift=0.5)
    start = None
    if name == "resume":
        first = trainer_with(max_epochs=1)
        first.fit(module, **loaders)
        start = os.path.join(FOLDER, "resume.ckpt")
        first.save_checkpoint(start)
        module = Resumed()
    trainer = trainer_with()
    trainer.fit(module, **loaders, datamodule=data, ckpt_path=start)
    result = {
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        **module.seen,
        "points": memory.points,
        "metrics": {name: round(float(value), 5) for name, value in sorted(trainer.callback_metrics.items())},
        "weights": [round(float(value), 5) for value in nn.utils.parameters_to_vector(module.parameters())],
    }
    if name == "plain":
        result["predicted"] = [item.tolist() for item in trainer.predict(module, loader())] if PROCESSES == 1 else []
        result["validated"] = trainer.validate(module, loader(trains=False), verbose=False)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    results, kinds = {}, sys.argv[3:] or [kind for kind in KINDS if PROCESSES == 1 or kind not in ALONE]
    FOLDER = sys.argv[2] + ".files"
    os.makedirs(FOLDER, exist_ok=True)
    os.chdir(FOLDER)
    for kind in kinds:
        try:
            results[kind] = run(kind)
        except Exception as error:
            if PROCESSES > 1:
                raise  # the other rank may wait for this one
            results[kind] = {"error": f"{type(error).__name__}: {error}"[:300]}
    with open(f"{sys.argv[2]}.{RANK}", "w") as file:
        json.dump(results, file)
