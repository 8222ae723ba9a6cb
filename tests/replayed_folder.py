"""A user's folder in tests of replays: a task in which much is random, a config, and `legato` as a user calls it."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import completed, run_module

TASK = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import legato as lg


class Points(Dataset):
    """Points with noise that is drawn when they are loaded; `bad`: indices whose targets are far off."""

    def __init__(self, length: int = 30, bad=()):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(length, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True).sin()
        for index in bad:
            self.targets[index] = 1e4

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.01 * torch.randn(4), self.targets[index]


class Net(lg.Task):
    """Dropout, batch norm, AdamW, a schedule by steps and one by the validation's loss."""

    def __init__(self, bad: list[int] | None = None, length: int = 30, rate: float = 0.05):
        super().__init__()
        self.bad, self.length, self.rate = bad or [], length, rate
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.97)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [
            {"scheduler": schedule, "interval": "step"},
            {"scheduler": plateau, "monitor": "val/loss"},
        ]

    def train_dataloader(self):
        return DataLoader(Points(self.length, self.bad), 3, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points(7), 3)
'''
CONFIG = """\
task: {_target_: points.Net}
seed: 5
trainer:
  max_epochs: 4
  accelerator: cpu
  threads: 1
  replicas: 2
  log_every_n_steps: 1
  num_sanity_val_steps: 0
  enable_progress_bar: false
  enable_model_summary: false
callbacks:
  checkpoint: {_target_: legato.callbacks.Checkpoint, every_n_train_steps: 4, save_top_k: -1}
"""
"""20 steps, 5 in each epoch."""
TWO = ("trainer.devices=2", "trainer.strategy=ddp")
RUN = Path("runs/default/version_0")
MADE: dict[tuple[object, ...], Path] = {}
"""What tests have made, by what they called and the files that were there."""


def make_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a test: for all at one place, which runs note, so that a copy of a run is as good as it."""
    folder = path.parent / "replayed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "points.py").write_text(TASK)
    (folder / "points.yaml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def once(function: Callable[..., object], *words: str) -> None:
    """Call a function that makes files, or copy what it has made of the same files in an earlier test."""
    before = {path: content for path, (content, _) in tree(Path()).items() if "__pycache__" not in path}
    made = MADE.get(key := (function.__qualname__, words, *sorted(before.items())))
    if made is None:
        function(*words)
        made = MADE[key] = Path.cwd().with_name(f"made-{len(MADE)}")
        shutil.copytree(".", made)
    else:
        shutil.copytree(made, ".", dirs_exist_ok=True)


def legato(*arguments: str, fails: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    done = completed(run_module, "legato", *arguments, env={**os.environ, **environment})
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done


def trained(*overrides: str) -> Path:
    once(legato, "fit", "points.yaml", *overrides)
    return RUN


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """What is in a folder: bytes and times of change."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
