"""Compares a step under `ddp` with one in a hand-written DistributedDataParallel loop, in the same two processes.

Run: python -m benchmarks.ddp_step [--width 64] [--blocks 120] [--steps 20]

Three contestants train the same MLP on shuffled batches of the same samples, one block of steps at a time: Legato and
two hand-written loops. A Legato hook runs the loops alternately after the last step of each Legato block. Each block
begins after a barrier, and with caches that contain the other contestant's code, so its first steps take up to a third
longer. Each Legato block is compared with the hand-written blocks right before and after it, so that other load on the
machine affects both. The results are the medians of these ratios over both ranks. The ratios of the second hand-written
loop to the first, computed in the same way, show the noise.

The dataset is map-style, and each contestant uses a sampler to read its rank's half. With a stream, each Legato rank
would read all batches and keep its own, which a hand-written loop would not do.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import legato as lg

FIRST = 3
"""Number of initial blocks of each contestant, which are not measured."""


class Samples(Dataset[Any]):
    """Map-style samples, read one batch at a time, at a cost that is negligible relative to the step."""

    def __init__(self, steps: int) -> None:
        self.size = 32 * 2 * steps
        self.inputs, self.targets = torch.randn(512, 64), torch.randint(10, (512,))

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        taken = torch.tensor(indices) % len(self.inputs)
        return self.inputs[taken], self.targets[taken]


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class ByHand:
    """A hand-written loop with DDP."""

    def __init__(self, width: int, steps: int) -> None:
        self.model = DistributedDataParallel(make_model(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        samples = Samples(steps)
        sampler: DistributedSampler[Any] = DistributedSampler(samples)
        self.batches = iter(DataLoader(samples, batch_size=32, sampler=sampler, collate_fn=as_it_is))

    def train(self, steps: int) -> None:
        for inputs, targets in itertools.islice(self.batches, steps):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()


class InTurn(lg.Task):
    """Trains the MLP in turn with the hand-written loops."""

    def __init__(self, width: int, steps: int, folder: Path) -> None:
        super().__init__()
        self.width, self.steps, self.folder = width, steps, folder
        self.model = make_model(width)
        self.taken: dict[str, list[tuple[float, float]]] = {"legato": [], "hand": []}

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_start(self) -> None:
        self.loops = [ByHand(self.width, self.trainer.max_steps) for _ in ("hand", "hand again")]
        self.began = time.perf_counter(), time.process_time()

    def note(self, name: str) -> None:
        now = time.perf_counter(), time.process_time()
        self.taken[name].append((now[0] - self.began[0], now[1] - self.began[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.steps:
            return
        self.note("legato")
        dist.barrier()
        self.began = time.perf_counter(), time.process_time()
        self.loops[len(self.taken["hand"]) % 2].train(self.steps)
        self.note("hand")
        dist.barrier()
        self.began = time.perf_counter(), time.process_time()

    def on_train_end(self) -> None:
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.taken))
        self.loops = []  # free DDP's reducers before the group is destroyed


def ratios(taken: dict[str, list[list[float]]], clock: int, over: str) -> list[float]:
    """Return the ratio of each block in `over` to the mean of the adjacent hand-written blocks."""
    hand = [block[clock] for block in taken["hand"]]
    if over == "legato":
        blocks = [block[clock] for block in taken["legato"][1:]]
        around = list(itertools.pairwise(hand))
    else:
        blocks, around = hand[1::2], list(itertools.pairwise(hand[::2]))
    return [2 * block / (before + after) for block, (before, after) in zip(blocks, around, strict=False)][FIRST:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="64: 9,000 parameters, a step is nearly all overhead")
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        trainer = lg.Trainer(
            max_steps=options.blocks * options.steps, devices=2, strategy="ddp", accelerator="cpu",
            default_root_dir=name, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        task = InTurn(options.width, options.steps, Path(name))
        samples = Samples(options.blocks * options.steps)
        trainer.fit(task, DataLoader(samples, batch_size=32, shuffle=True, collate_fn=as_it_is))
        ranks = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in (0, 1)]
    blocks = len(ranks[0]["legato"])
    hand = [statistics.median(block[clock] for block in ranks[0]["hand"]) / options.steps * 1e6 for clock in (0, 1)]
    print(f"{blocks} blocks of {options.steps} steps; by hand {hand[0]:.0f} us a step, {hand[1]:.0f} us of CPU time\n")
    print(f"{'relative to hand-written':<32}{'wall':>8}{'+-':>7}{'CPU':>8}{'+-':>7}")
    for over in ("legato", "hand again"):
        row = ""
        for clock in (0, 1):
            values = sorted(ratio for taken in ranks for ratio in ratios(taken, clock, over))
            # half the interquartile range, scaled as a standard error of the mean
            spread = (values[len(values) * 3 // 4] - values[len(values) // 4]) / 2 / len(values) ** 0.5
            row += f"{statistics.median(values):>8.3f}{spread:>7.3f}"
        print(f"{over:<32}{row}")


if __name__ == "__main__":
    main()
