"""Cost of a checkpoint: a synchronous save, the stall of a background save, and loading with verification.

Run: python benchmarks/checkpoint.py [--quick] [--folder FOLDER]
The state is that of a model trained with AdamW: 500 MB (200 MB with --quick), a third of which is weights. `torch.save`
with an fsync and `torch.load` of the same state take turns with Legato. Compare ratios, since the machine may be
shared.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from legato.trainer.checkpoints import background, commit, find, reading, storage
from legato.trainer.checkpoints.codec import flatten


def state_of(megabytes: int) -> dict[str, Any]:
    """Return a training state of about this size, consisting of 4 MB tensors and small tensors."""
    layers = megabytes // 12
    weights = {f"layers.{layer}.weight": torch.randn(1000, 1000) for layer in range(layers)}
    weights |= {f"layers.{layer}.bias": torch.randn(1000) for layer in range(layers)}
    moments = {
        place: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for place, weight in enumerate(weights.values())
    }
    return {"state_dict": weights, "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1}]}]}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def torch_save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def bytes_of(state: Any) -> int:
    """Return the total size of a state's tensors in bytes."""
    return sum(tensor.nbytes for tensors in flatten(state).tensors.values() for tensor in tensors.values())


def measure(state: dict[str, Any], folder: Path, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds that each operation takes in each round, and the first stall, which allocates memory."""
    writer = background.Writer()
    behind, at_once, pickled = folder / "step-00000001", folder / "step-00000002", folder / "state.pt"
    first_stall = seconds(lambda: writer.save(behind, state))
    writer.wait()
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work))

    for _ in range(rounds):
        # each one writes to new files while the disk is idle
        storage.remove(behind)
        os.sync()
        timed("torch.save + fsync", lambda: torch_save(state, pickled))
        os.sync()
        timed("torch.load", lambda: torch.load(pickled, weights_only=True))
        pickled.unlink()
        os.sync()
        timed("synchronous save", lambda: commit.write(at_once, state))
        timed("verify", lambda: find.verify(at_once))
        timed("verify and load", lambda: reading.read_checkpoint(at_once))
        storage.remove(at_once)
        os.sync()
        timed("background save: stall", lambda: writer.save(behind, state))
        timed("background save: rest, during training", writer.wait)
    writer.wait()
    return times, first_stall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="folder to write to (default: a temporary one)")
    options = parser.parse_args()
    state = state_of(200 if options.quick else 500)
    size = bytes_of(state)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint-benchmark-"))
    try:
        # warm up: a virtual machine may first have to allocate memory for the page cache and the snapshot
        (folder / "warm").mkdir()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        writer = background.Writer()
        writer.save(folder / "warm" / "memory", state)
        writer.wait()
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        measure(state, folder / "warm", 1)
        times, first_stall = measure(state, folder, 5)
    finally:
        shutil.rmtree(folder)
    best = {name: min(values) for name, values in times.items()}
    at_once = best["synchronous save"]
    print(f"A state of {size / 1e6:,.0f} MB in {len(state['state_dict']) * 4:,} tensors; best and median of 5 rounds\n")
    print(f"{'':52}{'best s':>9}{'median':>9}{'of a synchronous save':>22}")
    for name, values in times.items():
        ratio = f"{100 * best[name] / at_once:.0f}%"
        print(f"{name:52}{best[name]:9.3f}{statistics.median(values):9.3f}{ratio:>22}")
    print(f"{'first stall (allocates memory)':52}{first_stall:9.3f}{'':9}{100 * first_stall / at_once:>20.0f}%")
    print(f"\nHost memory of a background save: {more / size:.2f} times the state.")


if __name__ == "__main__":
    main()
