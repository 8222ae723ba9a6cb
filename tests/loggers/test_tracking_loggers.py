"""Loggers of tracking services, by their own packages: MLflow on a local store, W&B offline."""

import os
import warnings
from pathlib import Path

import cloudpickle
import pytest
import torch
from tiny import Validated, make_loader, make_trainer

from legato.callbacks import Checkpoint
from legato.loggers import MLFlowLogger, WandbLogger


def imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The folder of a local MLflow store; the process forgets it afterwards."""
    mlflow = imported("mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = mlflow.get_tracking_uri()
    yield str(tmp_path / "mlruns")
    mlflow.set_tracking_uri(before)
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # which MLflow has set


class Kept(Validated):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


def history(logger, name):
    return [(point.step, point.value) for point in logger.experiment.get_metric_history(logger.run_id, name)]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_each_point_once_after_a_resume(tmp_path, store):
    ids = []
    for epochs in (1, 2):
        logger = MLFlowLogger("tiny", save_dir=store, run_name="first")
        trainer = make_trainer(
            tmp_path,
            logger=logger,
            log_every_n_steps=1,
            max_epochs=epochs,
            callbacks=[Checkpoint(every_n_train_steps=4)],
            enable_checkpointing=True,
        )
        trainer.fit(Kept(), make_loader(), make_loader(), resume="auto")
        ids.append(logger.run_id)
    assert ids[0] == ids[1]
    assert [step for step, _ in history(logger, "train/loss")] == list(range(1, 11))
    assert [step for step, _ in history(logger, "val_loss")] == [5, 10]
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params.items() >= {"lr": "0.1", "batch_size": "4", "seed": "0"}.items()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert sorted(path.name for path in Path(store).iterdir()) == ["mlflow.db"]
    twin = cloudpickle.loads(cloudpickle.dumps(logger))
    assert twin.run_id == logger.run_id


@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_in_the_run_that_workers_have_begun(tmp_path, store):
    logger = MLFlowLogger("tiny", save_dir=store)
    trainer, task = make_trainer(tmp_path, logger=logger, strategy="ddp", devices=2, log_every_n_steps=1), Kept()
    trainer.fit(task, make_loader(16))
    trainer.validate(task, make_loader(), verbose=False)
    (run,) = logger.experiment.search_runs([logger.experiment_id])
    assert run.info.run_id == logger.run_id
    assert [step for step, _ in history(logger, "train/loss")] == [1, 2]
    assert len(history(logger, "val_loss")) == 1


@pytest.mark.filterwarnings("ignore")
def test_mlflow_by_hand(tmp_path, store):
    logger = MLFlowLogger("tiny", save_dir=store)
    logger.log_metrics({"x[0]": torch.tensor(1.0), "text": "no"}, 3)
    logger.log_hyperparams({"outer": {"inner": 1}, **{f"p{number}": number for number in range(120)}})
    assert history(logger, "x0") == [(3, 1.0)]
    assert len(logger.experiment.get_run(logger.run_id).data.params) == 121
    logger.finalize("failed")
    assert logger.experiment.get_run(logger.run_id).info.status == "FAILED"
    again = MLFlowLogger("tiny", save_dir=store, run_id=logger.run_id)
    assert again.experiment_id == logger.experiment_id


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    modules = imported("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield modules
    modules.finish()


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path, wandb):
    logger = WandbLogger(name="shown", dir=tmp_path, project="tiny", mode="offline")
    trainer = make_trainer(tmp_path, logger=logger, log_every_n_steps=1)
    task = Kept()
    logger.watch(task)
    trainer.fit(task, make_loader(), make_loader())
    run = logger.experiment
    assert run.summary["trainer/global_step"] == 5
    assert run.summary.get("train/loss") is not None
    assert run.config["lr"] == 0.1
    assert (trainer.run_dir / "wandb-id.txt").read_text().strip() == run.id
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    run.finish()
    twin = cloudpickle.loads(cloudpickle.dumps(logger))
    assert twin.experiment.id == run.id


@pytest.mark.filterwarnings("ignore")
def test_wandb_goes_on_in_the_run_of_a_resume(tmp_path, wandb):
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0" / "wandb-id.txt").write_text("abc123\n")
    logger = WandbLogger(mode="offline", project="tiny")
    logger.open(tmp_path / "version_0", 5)
    assert logger.experiment.id == "abc123"
    logger.log_metrics({"x": 1.0}, 6)
    logger.finalize("success")
    assert logger.experiment.summary["x"] == 1.0
