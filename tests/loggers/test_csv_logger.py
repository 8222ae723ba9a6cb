"""CSVLogger: real files, whose rows outlive deaths and resumes."""

import csv
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from tiny import Validated, make_loader, make_trainer

from legato.loggers import CSVLogger


def read_rows(path):
    """Return the rows, without empty cells."""
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_a_row_for_each_call_and_a_column_for_each_metric(tmp_path):
    folder, logger = tmp_path / "mine" / "version_0", CSVLogger()
    logger.open(folder, None)
    logger.log_metrics({"loss": torch.tensor(0.5), "epoch": 0}, 9)
    logger.log_metrics({"acc": 0.25}, 9)
    logger.log_hyperparams({"lr": np.float64(0.1), "kind": torch.nn.Linear})
    logger.finalize("success")
    assert (folder / "metrics.csv").read_text().splitlines() == ["acc,epoch,loss,step", ",0,0.5,9", "0.25,,,9"]
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["lr"] == 0.1
    assert (logger.log_dir, logger.root_dir) == (str(folder), str(folder.parent))


def test_a_resume_removes_later_rows_and_repeats_none(tmp_path):
    path, logger = tmp_path / "metrics.csv", CSVLogger()
    logger.open(tmp_path, None)
    for step in range(10, 101, 10):
        logger.log_metrics({"loss": float(step)}, step)
    with path.open("a") as file:
        file.write("110,1")  # torn by a power cut
    logger = CSVLogger()
    logger.open(tmp_path, 80)
    assert [row["step"] for row in read_rows(path)] == [str(step) for step in range(10, 81, 10)]
    logger.log_metrics({"loss": -1.0}, 80)
    logger.log_metrics({"loss": -1.0, "acc": 0.5}, 80)
    for step in range(90, 131, 10):
        logger.log_metrics({"loss": float(step)}, step)
    rows = read_rows(path)
    losses = {int(row["step"]): float(row["loss"]) for row in rows if "loss" in row}
    assert losses == {step: float(step) for step in range(10, 131, 10)}
    assert [row["acc"] for row in rows if "acc" in row] == ["0.5"]
    assert len(rows) == 14
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.slow
def test_a_killed_process_loses_no_row(tmp_path):
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom legato.loggers import CSVLogger\n"
        "logger = CSVLogger()\nlogger.open(Path(sys.argv[1]), None)\n"
        "for step in range(1, 51): logger.log_metrics({'loss': 1 / step}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=dict(os.environ), timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == [str(step) for step in range(1, 51)]


def test_a_run_and_its_resume(tmp_path):
    for epochs in (1, 2):
        options = {"log_every_n_steps": 1, "max_epochs": epochs, "enable_checkpointing": True}
        trainer = make_trainer(tmp_path, logger=CSVLogger(), **options)
        trainer.fit(Validated(), make_loader(), make_loader(), resume="auto")
    rows = read_rows(trainer.run_dir / "metrics.csv")
    assert [row["step"] for row in rows if "val_loss" in row] == ["5", "10"]
    assert len(list(trainer.run_dir.parent.glob("version_*"))) == 1
