"""Runs that a program for Lightning makes, with what it sees of them: `python lightning_callbacks.py PACKAGE FOLDER`.

Under either package each returns the same JSON value.
"""

import importlib
import inspect
import json
import logging
import os
import sys
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

SCENARIOS = {}


def scenario(function):
    """Register a scenario: a function of the package and a folder that is its own."""
    SCENARIOS[function.__name__] = function
    return function


def make_module(L, values=(), train_values=(), lr=0.1, momentum=0.0, **extra):
    """Return a module that logs given values: `val_loss` per validation, `train_loss` per step and epoch."""

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.backbone = torch.nn.Linear(4, 3)
            self.head = torch.nn.Linear(3, 1)
            self.validations = 0

        def training_step(self, batch, batch_idx):
            loss = self.head(self.backbone(batch[0])).square().mean()
            if train_values:
                self.log("train_loss", train_values[self.global_step % len(train_values)], on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            if values:
                self.log("val_loss", values[self.validations % len(values)])
                self.log("val/acc", 1.0 - values[self.validations % len(values)])

        def on_validation_epoch_end(self):
            self.validations += not self.trainer.sanity_checking

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=momentum)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]

    for name, value in extra.items():
        setattr(Module, name, value)
    return Module()


def loader(batches=4, size=2):
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(batches * size, 4, generator=generator)), batch_size=size)


def make_trainer(L, folder, callbacks=(), **options):
    chosen = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "logger": False, "num_sanity_val_steps": 0}
    chosen |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder)}
    return L.Trainer(callbacks=list(callbacks), **(chosen | options))


def fit(L, folder, callbacks=(), module=None, val=True, ckpt_path=None, values=(0.5, 0.3, 0.4), **options):
    trainer = make_trainer(L, folder, callbacks, **options)
    trainer.fit(module or make_module(L, values), loader(), loader(1) if val else None, ckpt_path=ckpt_path)
    return trainer


def seen(callback, folder):
    """Return what a script sees of a ModelCheckpoint: files and attributes, paths relative to the folder."""

    def short(path):
        return os.path.relpath(path, os.path.realpath(folder)) if path else path

    def number(value):
        return None if value is None else round(float(value), 6)

    return {
        "files": sorted(short(path) for path in Path(os.path.realpath(folder)).rglob("*.ckpt")),
        "links": sorted(short(path) for path in Path(os.path.realpath(folder)).rglob("*.ckpt") if path.is_symlink()),
        "best": short(callback.best_model_path),
        "score": number(callback.best_model_score),
        "current": number(callback.current_score),
        "last": short(callback.last_model_path),
        "best_k": {short(path): number(value) for path, value in callback.best_k_models.items()},
        "kth": short(callback.kth_best_model_path),
        "kth_value": number(callback.kth_value),
        "key": callback.state_key,
    }


CHECKPOINTS = {
    "default": ({}, {}),
    "named": ({"filename": "{epoch}-{val_loss:.2f}", "monitor": "val_loss"}, {}),
    "top two": ({"filename": "{epoch:02d}-{val_loss:.2f}", "monitor": "val_loss", "save_top_k": 2}, {}),
    "all": ({"save_top_k": -1}, {}),
    "all monitored": ({"save_top_k": -1, "monitor": "val_loss", "mode": "max"}, {}),
    "none": ({"save_top_k": 0}, {}),
    "last only": ({"save_top_k": 0, "save_last": True}, {}),
    "last": ({"save_last": True, "monitor": "val_loss"}, {}),
    "link": ({"save_last": "link", "monitor": "val_loss", "save_top_k": 2}, {}),
    "no metric names": ({"filename": "e{epoch}_acc{val/acc:.1f}", "auto_insert_metric_name": False}, {}),
    "a slash": ({"filename": "{epoch}-{val/acc:.1f}", "monitor": "val/acc", "mode": "max"}, {}),
    "same name": ({"filename": "model", "monitor": "val_loss", "save_top_k": -1}, {}),
    "same name replaced": ({"filename": "model", "enable_version_counter": False, "save_last": True}, {}),
    "steps": ({"every_n_train_steps": 3, "save_top_k": -1}, {}),
    "steps monitored": ({"every_n_train_steps": 2, "monitor": "val_loss", "save_top_k": 2}, {}),
    "steps by training": ({"every_n_train_steps": 3, "monitor": "train_loss_step", "save_top_k": 2}, {}),
    "epochs by training": ({"monitor": "train_loss", "save_top_k": 2}, {}),
    "every second epoch": ({"every_n_epochs": 2, "save_top_k": -1, "save_last": True}, {"max_epochs": 5}),
    "after validation": ({"save_on_train_epoch_end": False, "save_top_k": -1}, {"val_check_interval": 0.5}),
    "validation twice": ({"monitor": "val_loss", "save_top_k": 2}, {"val_check_interval": 0.5}),
    "rare validation": ({"monitor": "val_loss", "save_top_k": 2}, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "max steps": ({"save_last": True}, {"max_steps": 6, "max_epochs": -1}),
    "no validation": ({"save_top_k": -1}, {"val": False}),
    "accumulated": ({"every_n_train_steps": 1, "save_top_k": -1}, {"accumulate_grad_batches": 3}),
    "at once": ({"train_time_interval": timedelta(0), "save_top_k": -1}, {"max_epochs": 1}),
    "weights": ({"save_weights_only": True, "filename": "{step}"}, {}),
    "not a number": ({"monitor": "val_loss", "save_top_k": 2}, {"values": (float("nan"), 0.3, 0.2)}),
    "ties": ({"monitor": "val_loss", "save_top_k": 2}, {"values": (0.3, 0.3, 0.3)}),
    "fast": ({}, {"fast_dev_run": True}),
}


@scenario
def checkpoints(L, folder):
    results = {}
    for name, (options, run) in CHECKPOINTS.items():
        place = folder / name.replace(" ", "_")
        callback = L.pytorch.callbacks.ModelCheckpoint(dirpath=place, **options)
        module = None
        if "train" in str(options.get("monitor")):
            module = make_module(L, (0.5, 0.3), (0.9, 0.8, 0.85, 0.7, 0.6, 0.9))
        fit(L, folder, [callback], module, **run)
        results[name] = seen(callback, place)
    return results


@scenario
def two_in_one_folder(L, folder):
    kinds = L.pytorch.callbacks.ModelCheckpoint
    best = kinds(dirpath=folder, monitor="val_loss", filename="best-{val_loss:.2f}", save_top_k=2)
    every = kinds(dirpath=folder, every_n_train_steps=5, filename="{step}", save_top_k=-1, save_last=True)
    fit(L, folder, [best, every])
    again = kinds(dirpath=folder, monitor="val_loss", filename="best-{val_loss:.2f}")
    fit(L, folder, [again])
    return [seen(best, folder), seen(every, folder), seen(again, folder)]


@scenario
def default_folder(L, folder):
    trainer = fit(L, folder / "without", [L.pytorch.callbacks.ModelCheckpoint()])
    return [seen(trainer.checkpoint_callback, folder), len(trainer.checkpoint_callbacks)]


@scenario
def reading_it_again(L, folder):
    options = {"dirpath": folder, "monitor": "val_loss", "filename": "{epoch}", "save_last": True}
    callback = L.pytorch.callbacks.ModelCheckpoint(**options)
    trainer = fit(L, folder, [callback])
    best, fresh = callback.best_model_path, make_module(L, (0.9, 0.2, 0.1))
    values = trainer.validate(make_module(L, (0.25,)), loader(1), ckpt_path="best", verbose=False)
    existed, weights = os.path.exists(best), type(fresh).load_from_checkpoint(best).state_dict()
    resumed = L.pytorch.callbacks.ModelCheckpoint(**options)
    again = fit(L, folder, [resumed], fresh, ckpt_path=callback.last_model_path, max_epochs=5)
    return [
        existed,
        {name: round(float(value), 6) for name, value in values[0].items()},
        seen(resumed, folder),
        again.current_epoch,
        again.global_step,
        round(float(sum(value.double().sum() for value in weights.values())), 5),
        round(float(sum(value.double().sum() for value in fresh.state_dict().values())), 5),
    ]


@scenario
def names(L, folder):
    kind = L.pytorch.callbacks.ModelCheckpoint
    metrics = {
        "epoch": torch.tensor(3),
        "step": torch.tensor(12),
        "val_loss": torch.tensor(0.123456),
        "a.b": torch.tensor(1.5),
    }
    formatted = []
    for template in (
        None,
        "{epoch}",
        "{epoch:03d}",
        "x-{val_loss:.2f}",
        "{missing:d}-{a.b}",
        "plain",
        "{val_loss:.3e}",
    ):
        for options in ({}, {"auto_insert_metric_name": False}):
            for more in ({}, {"ver": 2}, {"prefix": "p"}):
                callback = kind(filename=template, **options)
                formatted.append(callback.format_checkpoint_name(dict(metrics), **more))
    return formatted


@scenario
def exceptions(L, folder):
    def training_step(self, batch, batch_idx):
        if self.global_step == 6:
            raise ZeroDivisionError("here")
        return self.head(self.backbone(batch[0])).square().mean()

    callback = L.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_on_exception=True, save_top_k=-1)
    module = make_module(L, (0.5,), training_step=training_step)
    with suppress(ZeroDivisionError):
        fit(L, folder, [callback], module)
    return [path.name for path in sorted(folder.glob("*.ckpt"))]


@scenario
def wrong_arguments(L, folder):
    kind, results = L.pytorch.callbacks.ModelCheckpoint, []
    for options in (
        {"mode": "best"},
        {"save_top_k": -2},
        {"save_top_k": 3},
        {"every_n_train_steps": -1},
        {"every_n_epochs": -1},
        {"every_n_train_steps": 1, "every_n_epochs": 1},
    ):
        try:
            kind(**options)
        except L.pytorch.utilities.exceptions.MisconfigurationException:
            results.append("refused")
    return results


STOPS = {
    "patience": ({"patience": 2}, (0.5, 0.3, 0.4, 0.35, 0.2, 0.1)),
    "max": ({"patience": 1, "mode": "max", "min_delta": 0.1}, (0.1, 0.3, 0.35, 0.9)),
    "stopping": ({"stopping_threshold": 0.3}, (0.5, 0.4, 0.2, 0.1)),
    "diverging": ({"divergence_threshold": 2.0}, (0.5, 1.9, 2.1, 0.1)),
    "finite": ({}, (0.5, float("nan"), 0.1)),
    "not finite": ({"check_finite": False, "patience": 2}, (0.5, float("nan"), 0.4, 0.3)),
    "after validation": ({"patience": 2, "check_on_train_epoch_end": False}, (0.5, 0.3, 0.4, 0.35, 0.2)),
    "never": ({"patience": 9}, (0.5, 0.4)),
    "not strict": ({"monitor": "nothing", "strict": False}, (0.5, 0.4)),
    "strict": ({"monitor": "nothing"}, (0.5, 0.4)),
}


@scenario
def early_stopping(L, folder):
    results = {}
    for name, (options, values) in STOPS.items():
        callback = L.pytorch.callbacks.EarlyStopping(**({"monitor": "val_loss"} | options))
        raised, trainer = "", make_trainer(L, folder / name, [callback], max_epochs=6, enable_checkpointing=False)
        try:
            trainer.fit(make_module(L, values), loader(), loader(1))
        except RuntimeError as error:
            raised = str(error).split("`")[1]
        state = callback.state_dict()
        results[name] = [
            trainer.current_epoch, trainer.global_step, raised, callback.wait_count, callback.stopped_epoch,
            callback.patience, round(float(callback.best_score), 5), callback.stopping_reason.name, callback.min_delta,
            callback.stopping_reason_message, callback.state_key, sorted(state), callback.monitor_op.__name__,
        ]  # fmt: skip
    return results


def recording_logger(L, points):
    class Recording(L.pytorch.loggers.Logger):
        name, version = "recording", 0

        def log_metrics(self, metrics, step=None):
            points.append(metrics)

        def log_hyperparams(self, *arguments, **options):
            pass

    return Recording()


@scenario
def learning_rates(L, folder):
    def groups(self):
        first = torch.optim.SGD(
            [{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "lr": 0.05}],
            lr=0.1,
            momentum=0.9,
        )
        return [first], [torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)]

    def named(self):
        optimizer = torch.optim.AdamW([{"params": self.parameters(), "name": "all"}], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "mine"},
        }

    def alone(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    results = []
    for configure in (groups, named, alone):
        for options in ({}, {"logging_interval": "epoch"}, {"logging_interval": "step", "log_momentum": True}):
            points, callback = [], L.pytorch.callbacks.LearningRateMonitor(**options, log_weight_decay=True)
            logger = recording_logger(L, points)
            module = make_module(L, (0.5,), configure_optimizers=configure)
            trainer = fit(L, folder, [callback], module, logger=logger, log_every_n_steps=1, enable_checkpointing=False)
            rates = [point for point in points if any("lr" in name or "mine" in name for name in point)]
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            results.append([rates, callback.lrs, metrics, callback.last_momentum_values])
    return results


@scenario
def bars(L, folder):
    """What subclasses of the bar are asked for."""
    calls = []

    class Bar(L.pytorch.callbacks.TQDMProgressBar):
        def init_train_tqdm(self):
            calls.append("train")
            bar = super().init_train_tqdm()
            bar.set_description("own")
            return bar

        def init_validation_tqdm(self):
            calls.append("validation")
            return super().init_validation_tqdm()

        def get_metrics(self, trainer, pl_module):
            items = super().get_metrics(trainer, pl_module)
            items.pop("v_num", None)
            calls.append(sorted(items))
            return items

        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            bar = self.train_progress_bar
            calls.append([bar.n, bar.total, trainer.progress_bar_callback is self, self.total_train_batches])

    class Own(L.pytorch.callbacks.ProgressBar):
        enabled = True

        def disable(self):
            self.enabled = False

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            calls.append(round(batch_idx / self.total_train_batches, 3))

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            calls.append([self.has_dataloader_changed(dataloader_idx), self.total_val_batches_current_dataloader])

    for bar in (Bar(), Own()):
        fit(L, folder, [bar], max_epochs=1, enable_progress_bar=True, enable_checkpointing=False)
    return [call for index, call in enumerate(calls) if call != [] or calls[index - 1] != []]


@scenario
def timers(L, folder):
    kind, interval = L.pytorch.callbacks.Timer, L.pytorch.callbacks.timer.Interval
    stopped = kind({"seconds": 0})
    trainer = fit(L, folder, [stopped], enable_checkpointing=False)
    timer = kind(timedelta(hours=1), interval=interval.epoch)
    fit(L, folder, [timer], enable_checkpointing=False)
    elapsed, left = timer.time_elapsed("train"), timer.time_remaining("train")
    return [
        trainer.global_step, 0 < elapsed < 60, 3500 < left < 3600, timer.start_time("test"), timer.end_time("test"),
        timer.time_elapsed("validate") > 0, kind("00:01:00:00").time_remaining() == 3600, stopped.time_remaining() <= 0,
    ]  # fmt: skip


@scenario
def logging_from_callbacks(L, folder):
    seen = []

    class Logs(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.log("by_callback", float(batch_idx), on_step=False, on_epoch=True)

        def on_validation_epoch_end(self, trainer, pl_module):
            self.log_dict({"val_a": 1.0, "val_b": 2.0})

        def on_train_epoch_end(self, trainer, pl_module):
            seen.append({name: float(value) for name, value in sorted(trainer.callback_metrics.items())})

    fit(L, folder, [Logs()], max_epochs=1, enable_checkpointing=False)
    return seen


def weights_of(module):
    """Return what is trained; the count of batches in a batch norm is averaged, and cut, by Lightning alone."""
    weights = {name: value for name, value in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    return [round(value, 4) for tensor in weights.values() for value in tensor.double().flatten().tolist()]


class Norms(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


AVERAGES = {
    "swa": lambda kinds: kinds.StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=2),
    "swa linear": lambda kinds: kinds.StochasticWeightAveraging([0.05], 2, 3, "linear"),
    "swa at once": lambda kinds: kinds.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=0),
    "own average": lambda kinds: kinds.StochasticWeightAveraging(
        0.05, 1, avg_fn=lambda average, new, count: (average + new) / 2
    ),
    "mean": lambda kinds: kinds.WeightAveraging(),
    "ema": lambda kinds: kinds.EMAWeightAveraging(decay=0.8),
    "ema later": lambda kinds: kinds.EMAWeightAveraging(decay=0.5, update_every_n_steps=3, update_starting_at_step=4),
}


def measured(self, batch, batch_idx):
    self.seen.append(round(float(self.head(self.backbone(batch[0])).double().sum()), 4))


@scenario
def averages(L, folder):
    results = {}
    for name, make in AVERAGES.items():
        for norms in (False, True):
            seen, module = [], make_module(L, validation_step=measured)
            module.seen = seen
            if norms:
                module.backbone = Norms()
            trainer = make_trainer(L, folder, [make(L.pytorch.callbacks)], max_epochs=4, enable_checkpointing=False)
            trainer.fit(module, loader(), loader(1))
            # Lightning measures batch norms in an epoch with a validation; before there is an average, it validates the
            # first weights of the run, and Legato the newest
            results[f"{name} {norms}"] = [weights_of(module), seen[1:4]]
    return results


@scenario
def finetuning(L, folder):
    kinds, rates = L.pytorch.callbacks, []

    def of_head(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)

    class Own(kinds.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(modules=pl_module.backbone, optimizer=optimizer, lr=0.01)

    class Rates(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            rates.append([round(group["lr"], 6) for group in trainer.optimizers[0].param_groups])

    results = []
    for callback in (
        Own(),
        kinds.BackboneFinetuning(1, lambda epoch: 1.5),
        kinds.BackboneFinetuning(2, train_bn=False),
    ):
        module = make_module(L, (0.5,), configure_optimizers=of_head)
        fit(L, folder, [callback, Rates()], module, max_epochs=4, enable_checkpointing=False)
        results.append(weights_of(module))
    base, module = kinds.BaseFinetuning, make_module(L)
    module.backbone = Norms()
    base.freeze(module.backbone, train_bn=True)
    results.append([name for name, parameter in module.named_parameters() if parameter.requires_grad])
    results.append(
        [len(list(base.filter_params(module, requires_grad=True))), len(base.flatten_modules(module.backbone))]
    )
    base.freeze([module.backbone, [module.head]], train_bn=False)
    results.append([name for name, parameter in module.named_parameters() if parameter.requires_grad])
    base.make_trainable(module)
    results.append([name for name, parameter in module.named_parameters() if parameter.requires_grad])
    return [*results, rates, kinds.finetuning.multiplicative(3)]


@scenario
def accumulation(L, folder):
    counts = []

    class Counts(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            counts.append([trainer.accumulate_grad_batches, trainer.global_step])

    results = []
    for scheduling in ({0: 2, 2: 4}, {1: 4}):
        callback, module = L.pytorch.callbacks.GradientAccumulationScheduler(scheduling), make_module(L, (0.5,))
        fit(L, folder, [callback, Counts()], module, max_epochs=3, enable_checkpointing=False)
        results.append([weights_of(module), callback.going_to_accumulate_grad_batches()])
    return [results, counts]


@scenario
def predictions(L, folder):
    written = []

    class Writer(L.pytorch.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            written.append([prediction, list(batch_indices), batch_idx, dataloader_idx])

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            written.append([predictions, batch_indices])

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return [round(value, 4) for value in batch[0].sum(1).tolist()]

    module = make_module(L, predict_step=predict_step)
    for interval in ("batch", "epoch", "batch_and_epoch"):
        for loaders in (loader(3), [loader(2), loader(1, 3)]):
            trainer = make_trainer(L, folder, [Writer(interval)], enable_checkpointing=False)
            trainer.predict(module, loaders, return_predictions=False)
    try:
        Writer("never")
    except L.pytorch.utilities.exceptions.MisconfigurationException:
        written.append("refused")
    return written


@scenario
def functions(L, folder):
    calls = []
    hooks = {
        "setup": lambda trainer, module, stage: calls.append(["setup", stage]),
        "on_train_epoch_start": lambda trainer, module: calls.append(["epoch", trainer.current_epoch]),
        "on_validation_batch_end": lambda *arguments: calls.append(["validation", arguments[4]]),
        "on_train_end": lambda trainer, module: calls.append(["end", trainer.global_step]),
        "on_fit_end": None,
    }
    fit(L, folder, [L.pytorch.callbacks.LambdaCallback(**hooks)], max_epochs=2, enable_checkpointing=False)

    def training_step(self, batch, batch_idx):
        if self.global_step == 5:
            raise ZeroDivisionError
        return self.head(self.backbone(batch[0])).square().mean()

    callback = L.pytorch.callbacks.OnExceptionCheckpoint(folder, "failed")
    module = make_module(L, (0.5,), training_step=training_step)
    with suppress(ZeroDivisionError):
        fit(L, folder, [callback], module)
    calls.append([os.path.relpath(callback.ckpt_path, folder), os.path.exists(callback.ckpt_path)])
    again = make_module(L, (0.5,))
    trainer = fit(L, folder, [], again, ckpt_path=callback.ckpt_path, enable_checkpointing=False)
    return [*calls, trainer.global_step, trainer.current_epoch]


@scenario
def all_together(L, folder):
    kinds, points = L.pytorch.callbacks, []
    best = kinds.ModelCheckpoint(folder / "best", monitor="val_loss", filename="{epoch}-{val_loss:.2f}", save_top_k=2)
    every = kinds.ModelCheckpoint(folder / "every", every_n_train_steps=3, save_top_k=-1, save_last=True)
    stopping = kinds.EarlyStopping("val_loss", patience=2)
    rates, averaging = kinds.LearningRateMonitor(), kinds.StochasticWeightAveraging(0.02, 2, annealing_epochs=2)
    module = make_module(L, (0.5, 0.3, 0.4, 0.35, 0.2, 0.1))
    callbacks, logger = [best, stopping, rates, averaging, every], recording_logger(L, points)
    trainer = fit(L, folder, callbacks, module, max_epochs=8, logger=logger, log_every_n_steps=1)
    resumed = make_module(L, (0.9, 0.8, 0.7))
    again = fit(
        L, folder / "again", [kinds.StochasticWeightAveraging(0.02, 2, annealing_epochs=2)], resumed,
        max_epochs=6, enable_checkpointing=False, ckpt_path=every.last_model_path,
    )  # fmt: skip
    return [
        seen(best, folder / "best"), seen(every, folder / "every"), stopping.stopped_epoch, stopping.wait_count,
        trainer.global_step, rates.lrs, weights_of(module), again.global_step,
    ]  # fmt: skip


DIFFERENT_ARGUMENTS = {
    "LambdaCallback": "takes any hook by name",
    "ModelPruning": "a placeholder",
    "SpikeDetection": "a placeholder",
    "WeightAveraging": "has avg_fn as an argument of its own",
}


@scenario
def arguments(L, folder):
    results = {}
    for name in sorted(L.pytorch.callbacks.__all__):
        kind = getattr(L.pytorch.callbacks, name)
        if not (isinstance(kind, type) and issubclass(kind, L.Callback)):  # ours lists names of the modules below, too
            continue
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
        defaults = [
            parameter.default if isinstance(parameter.default, (int, float, bool)) else 0 for parameter in parameters
        ]
        if name not in DIFFERENT_ARGUMENTS and kind.__init__ is not object.__init__:
            results[name] = [
                [parameter.name, str(parameter.kind), value]
                for parameter, value in zip(parameters, defaults, strict=True)
            ]
    return results


def main():
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "legato", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    package, folder = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
    importlib.import_module(f"{sys.argv[1]}.pytorch.callbacks")
    importlib.import_module(f"{sys.argv[1]}.pytorch.utilities.exceptions")
    importlib.import_module(f"{sys.argv[1]}.pytorch.loggers")
    results = {}
    for name in sys.argv[3:] or SCENARIOS:
        place = folder / name
        place.mkdir(parents=True)
        results[name] = SCENARIOS[name](package, place)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
