"""Twenty thousand short steps on two processes, to detect growth in memory, files, threads or step time.

The run logs, validates, saves every 100 steps, and restarts loader workers in each epoch. The benchmark reports the
values at the beginning and at the end for each process, and the curve in between as JSON lines.

Run: python -m benchmarks.soak [--steps 20000] [--curve FILE]
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import legato as lg

SAMPLES = 4_000
BATCH = 20
EPOCH_STEPS = SAMPLES // BATCH // 2


class Small(lg.Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Watch(lg.Callback):
    """Records this process's resources once per epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.since = 0.0

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        self.since = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        line = {
            "step": trainer.global_step,
            "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "open_files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "native_threads": len(os.listdir("/proc/self/task")),
            "step_ms": (time.perf_counter() - self.since) / EPOCH_STEPS * 1e3,
        }
        with (self.folder / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(steps: int, folder: Path) -> dict[int, list[dict[str, float]]]:
    """Train, and return the curve of each rank."""
    samples = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 16))
    trainer = lg.Trainer(
        max_steps=steps,
        devices=2,
        strategy="ddp",
        accelerator="cpu",
        log_every_n_steps=10,
        default_root_dir=folder,
        callbacks=[Watch(folder), lg.callbacks.Checkpoint(every_n_train_steps=100, save_top_k=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Small(),
        torch.utils.data.DataLoader(samples, BATCH, shuffle=True, num_workers=1),
        torch.utils.data.DataLoader(samples, 500),
    )
    files = {rank: folder / f"rank-{rank}.jsonl" for rank in range(2)}
    return {rank: [json.loads(line) for line in file.read_text().splitlines()] for rank, file in files.items()}


def main() -> None:
    """Print the change of each value from the second tenth of the run (the first warms up) to the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--curve", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        curves = run(arguments.steps, Path(folder))
    if arguments.curve:
        arguments.curve.write_text(json.dumps(curves))
    print(f"{'after ' + str(arguments.steps) + ' steps':24} {'beginning':>10} {'end':>10} {'ratio':>7}")
    for rank, curve in curves.items():
        tenth = max(1, len(curve) // 10)
        for name in ("memory_mb", "open_files", "threads", "native_threads", "step_ms"):
            early = sorted(line[name] for line in curve[tenth : 2 * tenth])[tenth // 2]
            late = sorted(line[name] for line in curve[-tenth:])[tenth // 2]
            print(f"rank {rank} {name:17} {early:10.2f} {late:10.2f} {late / early:7.2f}")


if __name__ == "__main__":
    main()
