"""Loggers in Lightning compatibility mode: Lightning's arguments, files and attributes; custom loggers."""

import csv
import importlib
import inspect
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from forked import completed, run_module, run_script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from legato.compat.lightning.placeholders import UnsupportedError
from legato.compat.lightning.pytorch import LightningModule, Trainer
from legato.compat.lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from legato.compat.lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment

QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def real_loggers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("lightning.pytorch.loggers")


class Model(LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def loader():
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


def fit(folder, logger, devices=1, **options):
    options = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 2, "default_root_dir": folder} | options
    trainer = Trainer(logger=logger, devices=devices, **(QUIET | options))
    trainer.fit(Model(), loader() if devices == 1 else DataLoader(loader().dataset, batch_size=1))
    return trainer


class Own(Logger):
    """A typical custom logger: no call of `super().__init__`, decorated methods."""

    def __init__(self):
        self.calls = []

    name = "own"

    @property
    def version(self):
        return "0.1"

    @property
    @rank_zero_experiment
    def experiment(self):
        return self.calls

    def log_hyperparams(self, params, *args, **kwargs):
        self.calls.append(("hparams", dict(params)))

    def log_metrics(self, metrics, step):
        self.calls.append((step, dict(metrics)))

    def save(self):
        self.calls.append("save")

    def finalize(self, status):
        self.calls.append(status)


def test_a_logger_that_a_user_wrote(tmp_path):
    logger = Own()
    fit(tmp_path, logger)
    assert logger.calls[0] == ("hparams", {"lr": 0.1})
    assert [call[0] for call in logger.calls if isinstance(call, tuple) and "loss" in call[1]] == [1, 3]
    assert logger.calls[-1] == "success"
    assert (logger.save_dir, logger.log_dir, logger.root_dir) == (None, None, None)
    with pytest.raises(TypeError, match="abstract"):
        Logger()


def test_a_csv_file_of_another_run_is_kept(tmp_path):
    for step, expected in enumerate(([], ["metrics.1.csv"], ["metrics.1.csv", "metrics.2.csv"])):
        logger = CSVLogger(tmp_path, "mine", version=0)
        with nullcontext() if step == 0 else pytest.warns(UserWarning, match="another run"):
            logger.log_metrics({"loss": 1.0}, step)
        logger.log_metrics({"more": 1.0}, step)
        copy = pickle.loads(pickle.dumps(logger))  # as for a worker process, in which it continues
        copy.log_metrics({"loss": 0.5}, step)
        folder = tmp_path / "mine" / "version_0"
        assert sorted(path.name for path in folder.glob("metrics.*.csv")) == expected
        rows = (folder / "metrics.csv").read_text().splitlines()
        assert [row.split(",")[-1] for row in rows[1:]] == [str(step)] * 3


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())


@pytest.mark.slow
def test_a_csv_file_of_workers_is_gone_on_with(tmp_path):
    loader, task, logger = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2), Validated(), CSVLogger(tmp_path)
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn", "max_epochs": 1, "log_every_n_steps": 1}
    trainer = Trainer(logger=logger, **options, **QUIET)
    trainer.fit(task, loader)
    trainer.validate(task, loader, verbose=False)
    folder = tmp_path / "lightning_logs" / "version_0"
    assert [path.name for path in folder.glob("*.csv")] == ["metrics.csv"]
    assert {"loss", "val_loss"} <= set((folder / "metrics.csv").read_text().splitlines()[0].split(","))


@pytest.mark.parametrize("name", ["", None, "mine"])
def test_a_csv_logger_makes_its_folder_when_it_saves(tmp_path, name):
    logger = CSVLogger(tmp_path, name)
    logger.save()
    assert (tmp_path / (name or "") / "version_0").is_dir()


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
@pytest.mark.parametrize("options", [{}, {"name": "x", "version": 3}, {"name": "", "version": "v"}, {"name": None}])
def test_what_a_logger_answers_before_fit(tmp_path, name, options):
    ours = {"CSVLogger": CSVLogger, "TensorBoardLogger": TensorBoardLogger}[name](str(tmp_path), **options)
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = getattr(real_loggers(), name)(str(tmp_path), **options)
    for attribute in ("name", "version", "save_dir", "root_dir", "log_dir", "group_separator"):
        actual, expected = (str(getattr(kind, attribute)).rstrip("/") for kind in (ours, theirs))
        assert actual == expected, attribute
    assert isinstance(ours, Logger)


def test_the_files_of_a_csv_logger(tmp_path):
    logger = CSVLogger(tmp_path, "mine")
    fit(tmp_path, logger)
    folder = tmp_path / "mine" / "version_0"
    assert yaml.safe_load((folder / "hparams.yaml").read_text()) == {"lr": 0.1}
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row.get("loss")] == ["1", "3"]
    logger.log_metrics({"after": 1})
    assert "after" in (folder / "metrics.csv").read_text()
    assert CSVLogger(tmp_path, "mine").version == 1


def test_a_logger_opens_when_it_is_used(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_metrics({"x": 1.0, "pair": {"a": 1.0, "b": 2.0}}, 3)
    logger.experiment.add_text("note", "text")
    logger.log_hyperparams({"lr": 0.1}, {"best": 2.0})
    logger.finalize("success")
    folder = tmp_path / "lightning_logs" / "version_0"
    assert yaml.safe_load((folder / "hparams.yaml").read_text()) == {"lr": 0.1}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["best", "x"]
    assert (folder / "pair_a").is_dir()
    logger = CSVLogger(tmp_path / "csv")
    logger.experiment.log_metrics({"x": 1})
    logger.experiment.log_hparams({"a": 1})
    logger.log_metrics({"x": 2})
    assert (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").read_text().split() == [
        "step,x",
        "0,1",
        "1,2",
    ]


def test_a_run_and_then_more(tmp_path):
    logger = TensorBoardLogger(tmp_path, "mine")
    fit(tmp_path, logger)
    logger.log_metrics({"later": 1.0}, 9)
    logger.finalize("success")
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_small_things():
    dummy = DummyLogger()
    dummy.anything(1)
    assert dummy[0].experiment[0].add_image(1) is not None
    assert (dummy.name, dummy.version) == ("", "")


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger"])
def test_arguments_are_lightnings(name):
    ours = getattr(importlib.import_module("legato.compat.lightning.pytorch.loggers"), name)
    theirs = getattr(real_loggers(), name)
    first, second = (inspect.signature(kind.__init__).parameters for kind in (ours, theirs))
    assert list(first) == list(second)
    assert [parameter.default for parameter in first.values()] == [parameter.default for parameter in second.values()]
    sent = "log_table", "log_text", "log_audio", "log_video", "use_artifact", "download_artifact"
    for method, value in vars(theirs).items():
        if not method.startswith("_") and not method.isupper() and method not in sent:
            assert hasattr(ours, method), method
            if inspect.isfunction(value) and method not in ("finalize", "log_graph"):
                names = list(inspect.signature(value).parameters)
                assert list(inspect.signature(getattr(ours, method)).parameters)[: len(names)] == names, method


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger("shown", tmp_path, offline=True)
    assert logger.name == "lightning_logs"
    fit(tmp_path, logger)
    logger.log_image("i", [torch.zeros(3, 4, 4)], caption=["zero"])
    with pytest.raises(UnsupportedError, match=r"logger\.experiment\.log"):
        logger.log_table("t", columns=["a"], data=[[1]])
    with pytest.raises(UnsupportedError, match=r"logger\.experiment\.log"):
        logger.log_text("t", columns=["a"], data=[["b"]])
    assert logger.experiment.summary.get("loss") is not None
    wandb.finish()


class WithFolder(Logger):
    """Adds a folder to save_dir, name and version."""

    name, version, save_dir, log_dir = "mine", 3, "saved", "elsewhere"

    def log_metrics(self, metrics, step):
        """Write nothing."""

    def log_hyperparams(self, params):
        """Write nothing."""


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_checkpoints_lie_below_the_name_and_version_of_a_logger_without_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "saved/mine/version_3/checkpoints"
    for name in ("epoch=0-step=4.ckpt", "epoch=0-step=4-v1.ckpt"):
        trainer = fit(tmp_path, WithFolder(), enable_checkpointing=True)
        assert trainer.log_dir == "saved"
        assert trainer.checkpoint_callback.best_model_path == f"{folder}/{name}"
        assert (tmp_path / folder / name).exists()


def kept_files(folder):
    """Return the files below a folder that contain the id of a service."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*-id.txt"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("devices", [1, 2])
def test_checkpoints_lie_below_the_run_of_a_service(tmp_path, monkeypatch, devices):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger, name = WandbLogger(save_dir="saved", project="project", offline=True), "epoch=0-step=4.ckpt"
    for begun in (False, True):
        if begun:
            logger.experiment.config.update({"hand": 1})  # in this process, and the worker processes join it
        trainer = fit(tmp_path, logger, enable_checkpointing=True, devices=devices, strategy="ddp_spawn")
        folder = f"saved/project/{logger.version}"
        assert (trainer.log_dir, logger.log_dir) == ("saved", None)
        assert trainer.checkpoint_callback.best_model_path == f"{folder}/checkpoints/{name}"
        assert trainer.callback_metrics.keys() == {"loss"}
        assert kept_files(tmp_path) == [f"{folder}/wandb-id.txt"]
        assert not (tmp_path / "lightning_logs").exists()
        assert all(path.name.endswith(logger.version) for path in (tmp_path / "saved/wandb").glob("offline-run-*"))
        name = "epoch=0-step=4-v1.ckpt"
    wandb.finish()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_wandb_that_goes_on_or_was_chosen_names_the_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    for version in ("chosen", "agent"):  # as an argument, and as the agent of a sweep sets it
        if version == "agent":
            monkeypatch.setenv("WANDB_RUN_ID", version)
        logger = WandbLogger(version="chosen" if version == "chosen" else None, offline=True)
        trainer = fit(tmp_path, logger, enable_checkpointing=True)
        assert trainer.checkpoint_callback.dirpath == f"./lightning_logs/{version}/checkpoints"
        assert wandb.run.id == version
        wandb.finish()
    begun = wandb.init(mode="offline", id="begun", dir=str(tmp_path))
    trainer = fit(tmp_path, WandbLogger(), enable_checkpointing=True)
    assert trainer.checkpoint_callback.dirpath == "./lightning_logs/begun/checkpoints"
    assert trainer.logger.experiment is begun
    wandb.finish()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_lie_below_the_run_of_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before, logger = mlflow.get_tracking_uri(), MLFlowLogger(save_dir="saved", tracking_uri="file:saved")
    try:
        trainer = fit(tmp_path, logger, enable_checkpointing=True)
        folder = f"saved/{logger.experiment_id}/{logger.run_id}"
    finally:
        mlflow.set_tracking_uri(before)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert trainer.checkpoint_callback.best_model_path == f"{folder}/checkpoints/epoch=0-step=4.ckpt"
    assert kept_files(tmp_path) == [f"{folder}/mlflow-id.txt"]
    assert (trainer.log_dir, logger.log_dir) == ("saved", None)
    assert not (tmp_path / "lightning_logs").exists()


SCRIPT = """
import sys, torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

class Model(pl.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def loss(self, batch):
        return self.layer(batch[0]).square().mean()
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

samples = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
data, model, logger = DataLoader(TensorDataset(samples), batch_size=4), Model(), CSVLogger(sys.argv[1], "mine")
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=logger, log_every_n_steps=3, enable_progress_bar=False,
                     callbacks=[LearningRateMonitor()], default_root_dir=sys.argv[1])
Tuner(trainer).lr_find(model, data, num_training=60, min_lr=1e-4, early_stop_threshold=None)
trainer.fit(model, data, data)
trainer.test(model, data, verbose=False)
trainer.logger.experiment.log_metrics({"x": 1}, 99)
trainer.logger.save()
"""


@pytest.mark.slow
def test_a_script_writes_the_rows_that_it_writes_with_lightning(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    results = {}
    for name, called in (("theirs", [run_script]), ("ours", [run_module, "legato", "lightning"])):
        done = completed(*called, "train.py", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        with (tmp_path / name / "mine" / "version_0" / "metrics.csv").open(newline="") as file:
            results[name] = list(csv.DictReader(file))
    assert len(results["ours"]) == len(results["theirs"]) == 13
    for ours, theirs in zip(results["ours"], results["theirs"], strict=True):
        assert list(ours) == list(theirs)
        assert {name: value and pytest.approx(float(value), rel=1e-5) for name, value in theirs.items()} == {
            name: value and float(value) for name, value in ours.items()
        }


def test_a_logger_may_derive_from_both_base_classes():
    fabric = importlib.import_module("legato.compat.lightning.fabric.loggers.logger")

    class Shared(fabric.Logger):
        pass

    class Both(Logger, Shared):
        pass

    assert issubclass(Logger, fabric.Logger)
    assert issubclass(Both, Shared)


def test_a_run_without_a_folder_of_its_logger_lies_where_checkpoints_do(tmp_path):
    class Silent(Logger):
        name, version, save_dir = "own", None, str(tmp_path / "saved")

        def log_metrics(self, metrics, step=None):
            pass

        def log_hyperparams(self, params):
            pass

    written = CSVLogger(tmp_path)
    quiet = {**QUIET, "enable_checkpointing": True}
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=[Silent(), written], default_root_dir=tmp_path, **quiet)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(2, 2))))
    folder = tmp_path / "saved" / "own" / "version_None"
    assert Path(trainer.checkpoint_callback.best_model_path).parent == folder / "checkpoints"
    assert Path(written.log_dir) == tmp_path / "lightning_logs" / "version_0"


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_lists_of_a_config_are_lists_in_the_file_of_hyperparameters(kind, tmp_path):
    config = pytest.importorskip("omegaconf").OmegaConf.create({"sizes": [1, 2], "inner": {"names": ["a"]}})
    logger = kind(tmp_path)
    logger.log_hyperparams(config)
    logger.save()
    hparams = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert hparams == {"sizes": [1, 2], "inner": {"names": ["a"]}}


def test_a_logger_that_is_one_by_registration_alone_logs_a_run(tmp_path):
    from legato.loggers.logger import Logger as CoreLogger

    class Remote(CoreLogger):
        """Like loggers of services: registered, and without a folder."""

    Logger.register(Remote)
    assert isinstance(Remote(), Logger)
    trainer = fit(tmp_path, Remote())
    assert trainer.global_step == 4


def with_own_parts(base, parts):
    """Return a subclass of a logger with overridden properties; `log_dir` adds a folder, as programs do."""
    properties = {
        "name": property(lambda logger: "own"),
        "version": property(lambda logger: "first"),
        "root_dir": property(lambda logger: str(Path(logger.save_dir, "root"))),
        "log_dir": property(lambda logger: str(Path(base.log_dir.fget(logger), "below"))),
    }
    return type(base.__name__, (base,), {name: properties[name] for name in parts})


@pytest.mark.parametrize("kind", ["TensorBoardLogger", "CSVLogger"])
@pytest.mark.parametrize("parts", [("name", "version"), ("log_dir",), ("root_dir",)], ids=str)
def test_properties_of_a_subclass_are_the_parts_of_its_folder(kind, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = []
    for package in (real_loggers(), importlib.import_module("legato.compat.lightning.pytorch.loggers")):
        folder = Path(package.__name__)
        logger = with_own_parts(getattr(package, kind), parts)(folder)
        logger.log_metrics({"value": 1.0}, 0)
        logger.save()
        places = {str(path.relative_to(folder).parent) for path in folder.rglob("*") if path.is_file()}
        results.append((places, str(Path(logger.log_dir).relative_to(folder)), logger.name, logger.version))
    assert results[0] == results[1]
    assert results[0][0] == {results[0][1]}
