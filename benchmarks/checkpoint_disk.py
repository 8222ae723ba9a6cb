"""Speed of a 2 GB save relative to writing the same number of bytes with an fsync, and its cost to concurrent steps.

Run: python -m benchmarks.checkpoint_disk [--megabytes 2000] [--rounds 3] [--folder FOLDER]

Speed: a save and a write of the same size, as by `dd bs=1M conv=fsync`, take turns, each starting with an idle disk.
Concurrent steps: two processes with one thread each compute steps of an MLP, like two ranks on two cores. One of them
saves in the background. The steps of both processes during saves are compared with those between saves. The stall while
the state is copied is listed separately.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from benchmarks.checkpoint import bytes_of, state_of
from legato.trainer.checkpoints import background, commit, storage


def taken(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call in seconds."""
    os.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def write_and_sync(path: Path, size: int) -> None:
    """Write a file in the same way as `dd conv=fsync`."""
    block = memoryview(bytearray(os.urandom(1 << 20)))
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(block)
        os.fsync(file.fileno())


def rate(folder: Path, size: int, rounds: int, save: Callable[[Path], object]) -> None:
    """Print the speed of a save relative to that of the disk."""
    saves, plain = [], []
    for _ in range(rounds):
        saves.append(taken(lambda: save(folder / "step-00000001")))
        storage.remove(folder / "step-00000001")
        plain.append(taken(lambda: write_and_sync(folder / "plain", size)))
        (folder / "plain").unlink()
    ratio = statistics.median(saved[0] / written[0] for saved, written in zip(saves, plain, strict=True))
    print(f"{size / 1e6:,.0f} MB{'':24}{'seconds':>9}{'MB/s':>8}{'CPU s':>8}{'of dd':>8}")
    for name, rows, of in (("save, hashed and synced", saves, ratio), ("dd conv=fsync", plain, 1.0)):
        wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<32}{wall:>9.2f}{size / wall / 1e6:>8.0f}{cpu:>8.2f}{of:>8.2f}", flush=True)


class Steps:
    """Computes steps of about 5 ms, and records when each step began and how long it took."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer, self.inputs = torch.optim.SGD(self.model.parameters(), 0.01), torch.randn(128, 256)
        self.noted: list[tuple[float, float]] = []

    def run(self, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.noted.append((began, time.perf_counter() - began))


def other_rank(connection: Connection) -> None:
    steps = Steps()
    steps.run(lambda: not connection.poll())
    connection.send(steps.noted)


def beside(folder: Path, rounds: int, state: dict[str, object]) -> None:
    """Print how much longer steps take during a background save."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other_rank, args=(there,))
    process.start()
    steps, writer, path = Steps(), background.Writer(), folder / "step-00000001"
    writer.save(path, state)  # allocates the memory for the copy
    writer.wait()
    stalls: list[float] = []
    spans: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        quiet = time.perf_counter()
        steps.run(lambda until=quiet + 4: time.perf_counter() < until)  # type: ignore[misc]
        began = time.perf_counter()
        writer.save(path, state)
        stalls.append(time.perf_counter() - began)
        copied = time.perf_counter()
        steps.run(lambda: any(thread.name == "legato-checkpoint" for thread in threading.enumerate()))
        spans.append((quiet, copied, time.perf_counter()))
        writer.wait()
    here.send("end")
    theirs = here.recv()
    process.join()
    writer.wait()
    print(f"\n{'beside a background save':<32}{'seconds':>9}{'step':>8}{'without':>9}{'ratio':>8}")
    for name, noted in (("steps of the rank that saves", steps.noted), ("steps of the other rank", theirs)):
        ratios = [mean_step(noted, copied, end) / mean_step(noted, quiet, quiet + 4) for quiet, copied, end in spans]
        during = statistics.median(mean_step(noted, copied, end) for _, copied, end in spans)
        without = statistics.median(mean_step(noted, quiet, quiet + 4) for quiet, _, _ in spans)
        length = statistics.median(end - copied for _, copied, end in spans)
        print(f"{name:<32}{length:>9.1f}{during * 1e3:>8.2f}{without * 1e3:>9.2f}{statistics.median(ratios):>8.2f}")
    print(f"{'stall: the copy in memory':<32}{statistics.median(stalls):>9.2f}")


def mean_step(noted: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the mean duration in seconds of the steps that began in this interval."""
    return statistics.fmean(seconds for began, seconds in noted if begin <= began < end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: a temporary one)")
    options = parser.parse_args()
    state = state_of(options.megabytes)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint-benchmark-"))
    try:
        rate(folder, bytes_of(state), options.rounds, lambda path: commit.write(path, state))
        beside(folder, options.rounds, state)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
