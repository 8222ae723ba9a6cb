"""Runs with random settings for two packages, whose observations must be equal.

Excludes the differences in docs/from-lightning.md: shuffling and draws, accumulation windows that batches do
not fill, validations within one, streams, a resume within an epoch.
"""

import csv
import math
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLAIN = [
    f"on_{stage}_{moment}"
    for stage in ("train", "validation", "test", "predict")
    for moment in ("start", "end", "epoch_start", "epoch_end")
] + ["on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end"]
SCHEDULERS = torch.optim.lr_scheduler


class Samples(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


def loader(count, batch_size, seed):
    return DataLoader(Samples(count, seed), batch_size=batch_size)


def rounded(value: Any) -> Any:
    """Convert a value to JSON types, with floats rounded to four digits."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isnan(value) or math.isinf(value) else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(name): rounded(item) for name, item in sorted(value.items())}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def draw(seed: int) -> dict[str, Any]:
    """Return the settings of a run."""
    chance = random.Random(seed)

    def one_in(share):
        return chance.random() < share

    how = {"seed": seed, "manual": one_in(0.15), "batches": chance.choice([2, 3, 4, 6]), "size": chance.choice([2, 4])}
    logs = [{}, {}, {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}, {"prog_bar": True}]
    logs += [{"logger": False}, {"reduce_fx": "max"}, {"batch_size": 3}, {"on_epoch": True}]
    how["log_train"], how["log_val"] = chance.choices(logs, k=2), chance.choice(logs)
    how["from_hooks"] = chance.sample([name for name in PLAIN if "train_e" in name or "validation_e" in name], 2)
    how["from_hooks"] = [name for name in how["from_hooks"] if name not in ("on_train_end", "on_validation_end")]
    how["scheduler"] = None if one_in(0.3) else chance.choice(["step", "cosine", "one_cycle", "plateau", "two"])
    how["interval"], how["frequency"] = chance.choice(["epoch", "step"]), chance.choice([1, 1, 2, 3])
    how["monitor"] = chance.choice(["train_0", "val"])
    hooks = ["clipping", "step", "zero_grad", "scheduler_step", "transfer"]
    how["own"] = chance.sample(hooks, chance.choice([0, 0, 1]))
    how["validations"] = chance.choice([0, 1, 1, 1, 2])
    how["by"] = chance.choice(["loaders", "module", "datamodule"])
    how["stop_at"] = chance.randint(1, 8) if one_in(0.1) else None
    how["skip_at"] = chance.randint(0, 1) if one_in(0.1) else None
    options: dict[str, Any] = {"max_epochs": chance.randint(1, 4), "log_every_n_steps": chance.choice([1, 2, 3, 50])}
    for name, share, values in (
        ("max_steps", 0.2, range(1, 11)),
        ("min_epochs", 0.1, (1, 2, 3)),
        ("gradient_clip_val", 0.2, (0.1, 0.5)),
        ("check_val_every_n_epoch", 0.3, (1, 2)),
        ("num_sanity_val_steps", 0.5, (0, 1, -1)),
        ("limit_val_batches", 0.2, (0, 1, 1.0)),
        ("limit_train_batches", 0.1, (2,)),
        ("precision", 0.1, ("64-true", "bf16-mixed")),
        ("inference_mode", 0.1, (False,)),
    ):
        if one_in(share):
            options[name] = chance.choice(list(values))
    batches = options.get("limit_train_batches", how["batches"])
    if how["manual"]:
        options.pop("gradient_clip_val", None)
        how["own"], how["scheduler"] = [], None if how["scheduler"] in ("plateau", "two") else how["scheduler"]
    elif one_in(0.2) and batches % 2 == 0 and how["skip_at"] is None:
        options["accumulate_grad_batches"] = 2
    elif one_in(0.3):
        options["val_check_interval"] = 0.5
    how["options"] = options
    saving = [{}, {"save_top_k": -1, "every_n_train_steps": 2}, {"save_last": True, "filename": "{epoch}-{step}"}]
    saving += [{"save_weights_only": True}, {"save_top_k": 0, "save_last": "link"}, {"every_n_epochs": 2}]
    best = [{"monitor": "train_0", "mode": "max"}, {"monitor": "train_0", "save_top_k": 2, "mode": "min"}]
    best += [{"monitor": "train_0", "filename": "x{epoch:02d}-{train_0:.2f}", "save_on_train_epoch_end": True}]
    how["saving"] = [chance.choice(saving)] * one_in(0.6) + [chance.choice(best)] * one_in(0.4)
    how["stopping"] = chance.choice(["min", "max"]) if one_in(0.2) else None
    accumulates = "accumulate_grad_batches" in options
    how["rates"] = None if accumulates else chance.choice([None, None, {}, {"log_momentum": True}])
    how["then"] = chance.sample(["validate", "test", "predict", "fit", "best"], chance.randint(0, 2))
    return how


def module_of(package: Any, how: dict[str, Any], note: Any) -> Any:
    """Return the module of a run."""

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
            generator = torch.Generator().manual_seed(how["seed"])
            for parameter in self.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)
            self.automatic_optimization = not how["manual"]

        def loss(self, batch):
            return (self.layers(batch["x"]) - batch["y"]).square().mean()

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            for index, options in enumerate(how["log_train"]):
                self.log(f"train_{index}", loss, **options)
            if how["manual"]:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                if how["scheduler"] and self.trainer.is_last_batch:
                    self.lr_schedulers().step()
            return {"loss": loss, "index": batch_idx}

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", self.loss(batch), **how["log_val"])

        def test_step(self, batch, batch_idx):
            self.log_dict({"test": self.loss(batch), "unlogged": 1.0}, on_step=True, on_epoch=True)
            self.log("alone", 2.0, logger=False)

        def predict_step(self, batch, batch_idx):
            return self.layers(batch["x"])

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == how["skip_at"] and self.current_epoch == 1 else None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = self.global_step

        def on_load_checkpoint(self, checkpoint):
            note("loaded", checkpoint["mine"])

        def configure_optimizers(self):
            groups = [{"params": self.layers[0].parameters(), "lr": 0.05}, {"params": self.layers[2].parameters()}]
            optimizer = torch.optim.AdamW(groups, lr=0.1)
            by = {"interval": how["interval"], "frequency": how["frequency"]}
            if how["scheduler"] is None:
                return optimizer
            if how["scheduler"] == "plateau":
                scheduler: Any = SCHEDULERS.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
                by |= {"monitor": how["monitor"], "strict": False}
            elif how["scheduler"] == "cosine":
                scheduler = SCHEDULERS.CosineAnnealingLR(optimizer, T_max=7)
            elif how["scheduler"] == "one_cycle":
                scheduler = SCHEDULERS.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
            else:
                scheduler = SCHEDULERS.StepLR(optimizer, 2, gamma=0.5)
            schedulers = [{"scheduler": scheduler, **by}]
            schedulers += [{"scheduler": SCHEDULERS.ExponentialLR(optimizer, 0.9)}] * (how["scheduler"] == "two")
            return [optimizer], schedulers

    def clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        note("clipping", gradient_clip_val, gradient_clip_algorithm)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")

    def step(self, epoch, batch_idx, optimizer, optimizer_closure):
        note("step", epoch, batch_idx)
        optimizer.step(closure=optimizer_closure)

    def zero_grad(self, epoch, batch_idx, optimizer):
        note("zero_grad", epoch, batch_idx)
        optimizer.zero_grad(set_to_none=False)

    def scheduler_step(self, scheduler, metric):
        note("scheduler_step", metric)
        scheduler.step(*([] if metric is None else [metric]))

    def transfer(self, batch, dataloader_idx):
        note("transfer", dataloader_idx)
        return batch

    names = {"clipping": "configure_gradient_clipping", "step": "optimizer_step", "zero_grad": "optimizer_zero_grad"}
    names |= {"scheduler_step": "lr_scheduler_step", "transfer": "on_after_batch_transfer"}
    for name in how["own"]:
        setattr(Net, names[name], locals()[name])
    for name in how["from_hooks"]:
        setattr(Net, name, lambda self, name=name: self.log(name.removeprefix("on_"), 1.0 + self.global_step))
    return Net


def watcher(package: Any, how: dict[str, Any], note: Any) -> Any:
    """Return a callback that records every hook, with counts and values."""

    def place(trainer):
        return trainer.current_epoch, trainer.global_step

    class Watcher(package.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            note("batch_start", *place(trainer), batch_idx)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            loss = None if "accumulate_grad_batches" in how["options"] else outputs["loss"]
            # Lightning shows values logged between steps only after they were read
            metrics = {name: value for name, value in trainer.callback_metrics.items() if f"on_{name}" not in PLAIN}
            note("batch_end", *place(trainer), loss, rates, trainer.is_last_batch, metrics)
            if trainer.global_step == how["stop_at"]:
                trainer.should_stop = True

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            note("before_step", *place(trainer), [parameter.grad.norm() for parameter in pl_module.parameters()])

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            note("before_zero_grad", *place(trainer))

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            note("validation_batch_end", *place(trainer), batch_idx, dataloader_idx)

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            note("save", checkpoint["epoch"], checkpoint["global_step"])

        def setup(self, trainer, pl_module, stage):
            note("setup", getattr(stage, "value", stage))

        def teardown(self, trainer, pl_module, stage):
            note("teardown", getattr(stage, "value", stage))

    def noted(name):
        # with several loaders, Lightning shows no values of the sanity check, and values at the end of each loader
        def hook(self, trainer, pl_module):
            shown = (how["validations"] == 2 and "validation" in name) or "sanity" in name
            note(name, *place(trainer), pl_module.training, {} if shown else trainer.callback_metrics)

        return hook

    for name in PLAIN:
        setattr(Watcher, name, noted(name))
    return Watcher()


def data_of(package: Any, how: dict[str, Any], module: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class of the module, which may have loaders, and the data as arguments of fit."""
    count = how["batches"] * how["size"]
    validations = [loader(7, 3, 2), loader(4, 2, 3)][: how["validations"]]
    loaders = validations if len(validations) > 1 else validations[0] if validations else None
    if how["by"] == "loaders":
        return module, {"train_dataloaders": loader(count, how["size"], 1), "val_dataloaders": loaders}
    methods = {"train_dataloader": lambda self: loader(count, how["size"], 1)}
    methods |= {"val_dataloader": lambda self: loaders} if validations else {}
    if how["by"] == "module":
        return type("Net", (module,), methods), {}
    return module, {"datamodule": type("Data", (package.LightningDataModule,), methods)()}


def make_run(package: Any, how: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Execute a run in the current folder; return the observations."""
    seen: list[Any] = []
    callbacks, loggers = package.callbacks, package.loggers

    def note(*entries):
        seen.append(rounded(list(entries)))

    torch.manual_seed(0)
    module_class, data = data_of(package, how, module_of(package, how, note))
    module, result = module_class(), {"seen": seen}
    used = [watcher(package, how, note)]
    used += [callbacks.ModelCheckpoint(dirpath=f"saved_{n}", **options) for n, options in enumerate(how["saving"])]
    used += [callbacks.EarlyStopping("train_0", patience=1, mode=how["stopping"])] if how["stopping"] else []
    used += [] if how["rates"] is None else [callbacks.LearningRateMonitor(**how["rates"])]
    logger = loggers.CSVLogger(folder, name="logs", version=0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": bool(how["saving"])}
    try:
        trainer = package.Trainer(accelerator="cpu", logger=logger, callbacks=used, **quiet, **how["options"])
        for name in ("first", *how["then"]):
            result[name] = rounded(_call(name, trainer, module, data, how))
            result[f"state after {name}"] = _state(trainer, module)
    except (package.utilities.exceptions.MisconfigurationException, ValueError, RuntimeError):
        return {"ends in an error": True}  # both do, in different words
    result["files"] = sorted(str(path.relative_to(folder)) for path in _files(folder))
    written = folder / "logs" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(written.open())) if written.exists() else []
    result["rows"] = [{name: rounded(float(value)) for name, value in row.items() if value} for row in rows]
    return result


def _call(name: str, trainer: Any, module: Any, data: dict[str, Any], how: dict[str, Any]) -> Any:
    saved = trainer.checkpoint_callback is not None and trainer.checkpoint_callback.best_model_path
    if name == "fit":
        trainer.fit_loop.max_epochs, trainer.should_stop = trainer.current_epoch + 1, False
    if name in ("fit", "first"):
        return trainer.fit(module, **data)
    if name == "validate":
        return trainer.validate(module, loader(5, 2, 4), verbose=False) if how["validations"] else None
    if name == "test" or (name == "best" and saved):
        return trainer.test(module, loader(5, 2, 4), ckpt_path=name if name == "best" else None, verbose=False)
    return trainer.predict(module, loader(5, 2, 4)) if name == "predict" else None


def _state(trainer: Any, module: Any) -> Any:
    saved = [
        (os.path.basename(saver.best_model_path), os.path.basename(saver.last_model_path), saver.best_model_score)
        for saver in trainer.checkpoint_callbacks
    ]
    return rounded(
        {
            "metrics": trainer.callback_metrics,
            "logged": trainer.logged_metrics,
            "bar": trainer.progress_bar_metrics,
            "counts": [trainer.current_epoch, trainer.global_step, trainer.should_stop],
            "weights": [parameter.double().sum() for parameter in module.parameters()],
            "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            "saved": saved,
            "status": [str(trainer.state.fn), str(trainer.state.status), module.training],
        }
    )


def _files(folder: Path) -> list[Path]:
    """Return the files of a run; a checkpoint file or folder counts as one."""
    inside = [path for path in folder.rglob("*") if not any(parent.suffix == ".ckpt" for parent in path.parents)]
    return [path for path in inside if path.suffix == ".ckpt" or path.is_file()]
