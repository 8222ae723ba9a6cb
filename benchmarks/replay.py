"""Measures the time needed to replay a run with ten checkpoints, and the cost of a step that Microscope observes.

Run: python -m benchmarks.replay [--steps 1500] [--rounds 2]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import legato as lg


class Wide(lg.Task):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        inputs = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, torch.arange(20_000) % 10), 256, shuffle=True)
"""
CONFIG = """
task: {{_target_: wide.Wide}}
trainer: {{max_steps: {steps}, max_epochs: -1, accelerator: cpu, devices: 1, threads: 1, enable_progress_bar: false}}
callbacks:
  checkpoint: {{_target_: legato.callbacks.Checkpoint, every_n_train_steps: {every}, save_top_k: -1}}
"""


def legato(*words: str) -> tuple[float, float]:
    """Run a command and return its wall time and its CPU time in seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "legato", *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, used


def replays(steps: int, rounds: int) -> None:
    """Print the time in seconds needed to replay all steps."""
    replay = "replay", "runs/default/version_0", "step=1", f"until={steps}"
    walls, processors = zip(*(legato(*replay) for _ in range(rounds)), strict=True)
    print(f"replay of {steps} steps: {min(walls):.1f} s, {min(processors):.1f} s of CPU time")


class Steps(lg.Task):
    """A step of a 300,000-parameter model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def looks(steps: int, rounds: int) -> None:
    """Print the CPU time of a step with Microscope, and its ratio to that of a step without it."""
    loader = DataLoader(TensorDataset(torch.randn(steps * 64, 64), torch.arange(steps * 64) % 10), 64)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    times: dict[int, list[float]] = {}
    for _ in range(rounds):
        for every in (0, 1, 10, 100):
            callbacks: list[lg.Callback] = [lg.lab.Microscope(every)] if every else []
            trainer = lg.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
            began = time.process_time()
            trainer.fit(Steps(), loader)
            times.setdefault(every, []).append((time.process_time() - began) / steps * 1e6)
    base = min(times[0])
    for every, figures in times.items():
        name = f"Microscope every {every} steps" if every else "without"
        print(f"{name:<28}{min(figures):8.0f} us a step  {min(figures) / base:.2f}", flush=True)


def main() -> None:
    """Print both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    looks(max(100, options.steps // 4), 3 * options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("wide.py").write_text(SCRIPT)
        Path("wide.yaml").write_text(CONFIG.format(steps=options.steps, every=options.steps // 10))
        legato("fit", "wide.yaml")
        replays(options.steps, options.rounds)
        os.chdir("/")


if __name__ == "__main__":
    main()
