"""Recovery of an elastic run whose processes are killed: seconds until the next completed step, and lost steps.

Run: python -m benchmarks.elastic [--kills 8] [--processes 2 3 4] [--width 256]

Processes are killed with SIGKILL at random times, each after the previous one was replaced. For each death, the
benchmark reports the seconds until the survivors' new group completes its first step, which is either the interrupted
step or the next one. For each replacement, it reports the seconds between the last step without the new process and the
first step with it; in this time, the process receives weights and optimizer state from another process. `lost` counts
the steps that a process had completed before a death and that were repeated. Finally, the weights are compared bitwise
with those of the same run in one process.
"""

import argparse
import hashlib
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import legato as lg
from legato.trainer.processes.launch import warm_up

Event = tuple[float, str, int, int]
"""Time in seconds on the machine's clock, "step" or "group", number of completed steps, and size of the group."""
REPLICAS = 4


class Vectors(Dataset[Any]):
    """Random vectors, drawn on access."""

    def __init__(self, samples: int, width: int) -> None:
        self.samples, self.width = samples, width

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(self.width)


class Net(lg.Task):
    """Linear layers with AdamW. Writes the time of each step and each new group to a file per process."""

    def __init__(self, width: int, folder: Path | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.folder = folder

    def record(self, event: str) -> None:
        if self.folder is not None:
            line = f"{time.monotonic()} {event} {self.global_step} {self.trainer.world_size}\n"
            with (self.folder / str(os.getpid())).open("a") as file:
                file.write(line)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.net(batch), batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.metrics.step != self.global_step:  # the last batch of its step
            self.record("step")
            if self.folder is not None and (self.folder / "hurry").exists():
                self.trainer.should_stop = True

    def on_processes_changed(self) -> None:
        self.record("group")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Killer(threading.Thread):
    """Kills one process after another."""

    def __init__(self, folder: Path, processes: int, kills: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.processes, self.kills = folder, processes, kills
        self.random = random.Random(processes)
        self.deaths: list[tuple[float, int]] = []
        """Time and process id."""

    def living(self) -> list[int]:
        """Return the processes that have joined and were not killed."""
        dead = {process for _, process in self.deaths}
        return sorted({int(path.name) for path in self.folder.glob("[0-9]*")} - dead)

    def run(self) -> None:
        """Kill all processes one after another, then let the run finish."""
        for _ in range(self.kills):
            while len(self.living()) < self.processes:
                time.sleep(0.01)
            time.sleep(self.random.uniform(0.3, 0.7))
            victim = self.random.choice(self.living())
            self.deaths.append((time.monotonic(), victim))
            os.kill(victim, signal.SIGKILL)
        while len(self.living()) < self.processes:
            time.sleep(0.01)
        time.sleep(0.5)
        (self.folder / "hurry").touch()


def train(processes: int, width: int, folder: Path | None, kills: int, steps: int) -> tuple[int, str]:
    """Train in an elastic run or, without `folder`, in one process. Return the step count and the weights' digest."""
    task = Net(width, folder)
    many = {"strategy": {"name": "ddp", "elastic": True}, "devices": processes, "max_restarts": kills}
    trainer = lg.Trainer(
        max_steps=steps,
        accelerator="cpu",
        replicas=REPLICAS,
        reproducible="bitwise",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(many if folder is not None else {}),  # type: ignore[arg-type]
    )
    trainer.fit(task, DataLoader(Vectors(10**9, width), 8, shuffle=True))
    digest = hashlib.sha256()
    for value in task.state_dict().values():
        digest.update(value.numpy().tobytes())
    return trainer.global_step, digest.hexdigest()


def read_events(folder: Path) -> dict[int, list[Event]]:
    """Return the events of each process."""
    events = {}
    for path in folder.glob("[0-9]*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        events[int(path.name)] = [(float(when), kind, int(step), int(world)) for when, kind, step, world in lines]
    return events


def measure(events: dict[int, list[Event]], deaths: list[tuple[float, int]]) -> tuple[list[float], list[float], int]:
    """Return the seconds from each death to the next step, each replacement's pause, and the number of lost steps."""
    every = sorted(event for process in events.values() for event in process)
    healed, joined, lost = [], [], 0
    for when, _ in deaths:
        group = next(event for event in every if event[0] > when and event[1] == "group")
        step = next(event for event in every if event[0] > group[0] and event[1] == "step")
        healed.append(step[0] - when)
        before = max((event[2] for event in every if event[0] < when), default=0)
        lost += max(0, before - group[2])
    worlds = [event for event in every if event[1] == "step"]
    for earlier, later in pairwise(worlds):
        if later[3] > earlier[3]:
            joined.append(later[0] - earlier[0])
    return healed, joined, lost


def main() -> None:
    """Print a line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    if max(options.processes) > REPLICAS:  # a process without a replica has no batch and never records an event
        parser.error(f"--processes: at most {REPLICAS}, one process per replica")
    torch.set_num_threads(1)
    logging.getLogger("legato").setLevel(logging.ERROR)  # each death causes a warning
    warm_up()
    print("seconds from a death to the next finished step; seconds that a replacement interrupts the others")
    print(f"{'processes':>9}{'kills':>7}{'median':>9}{'max':>8}{'joined: median':>16}{'max':>8}{'lost':>6}  same bits")
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            killer = Killer(folder, processes, options.kills)
            killer.start()
            steps, digest = train(processes, options.width, folder, options.kills, -1)
            killer.join()
            healed, joined, lost = measure(read_events(folder), killer.deaths)
        same = train(1, options.width, None, 0, steps) == (steps, digest)
        print(
            f"{processes:9}{len(healed):7}{statistics.median(healed):9.3f}{max(healed):8.3f}"
            f"{statistics.median(joined):16.3f}{max(joined):8.3f}{lost:6}  {'yes' if same else 'NO'} ({steps} steps)",
            flush=True,
        )


if __name__ == "__main__":
    main()
