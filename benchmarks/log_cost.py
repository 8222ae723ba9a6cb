"""CPU time per logged value: the time of steps that log many values minus that of steps that log none.

Run: python -m benchmarks.log_cost [--values 100] [--blocks 600]

The hand-written baseline is `store[name].append(value)`, with tensors detached. Values are numbers, tensors, or tensors
with a graph, logged per step, per epoch, or both. All variants alternate in one run, in blocks of 50 steps that end
with a logging point, so that other load affects all of them equally. The results are the tenth percentile over blocks.
"""

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import legato as lg

BLOCK = 50
KINDS = ("number", "tensor", "graph")
WAYS = ("none", "by hand", "log_dict", "log_dict, epoch", "log_dict, both", "log")


class Logs(lg.Task):
    """A small step that logs `values` values of one kind, all in the same way."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)
        self.turns = itertools.cycle(itertools.product(WAYS, KINDS))
        self.way, self.kind, self.values = *next(self.turns), values
        self.names = [f"value/{index}" for index in range(values)]
        self.store: dict[str, list[Any]] = defaultdict(list)
        self.began = 0.0
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and log it under many names."""
        loss = self.model(batch[0]).square().mean()
        value: Any = 1.5 if self.kind == "number" else loss.detach() if self.kind == "tensor" else loss
        values = dict.fromkeys(self.names, value)
        if self.way == "by hand":
            for name, number in values.items():
                self.store[name].append(number.detach() if isinstance(number, torch.Tensor) else number)
        elif self.way == "log":
            for name, number in values.items():
                self.log(name, number)
        elif self.way != "none":
            per_epoch = self.way.endswith("epoch")
            self.log_dict(values, on_step=not per_epoch, on_epoch=per_epoch or self.way.endswith("both"))
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Record the time of a block, and switch to the next way of logging."""
        if self.global_step % BLOCK == 0:
            now = time.process_time()
            if self.global_step:
                self.times[self.way, self.kind].append((now - self.began) / BLOCK * 1e6)
                self.way, self.kind = next(self.turns)
            self.names = [f"{self.way}/{self.kind}/{index}" for index in range(self.values)]
            self.store.clear()
            self.began = time.process_time()

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def measure(values: int, blocks: int) -> dict[tuple[str, str], float]:
    """Return the microseconds per step for each way of logging and kind of value."""
    task, steps = Logs(values), blocks * BLOCK
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lg.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, default_root_dir=Path(folder), **quiet
        )
        trainer.fit(task, DataLoader(TensorDataset(torch.randn(steps * 4, 8)), 4))
    return {turn: sorted(figures)[len(figures) // 10] for turn, figures in task.times.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(options.values, options.blocks)
    costs = {turn: (figure - times["none", turn[1]]) / options.values for turn, figure in times.items()}
    print(f"{'us a value (ratio)':<20}" + "".join(f"{kind:>16}" for kind in KINDS))
    for way in WAYS[1:]:
        cells = (f"{costs[way, kind]:.2f} ({costs[way, kind] / costs['by hand', kind]:.1f})" for kind in KINDS)
        print(f"{way:<20}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
