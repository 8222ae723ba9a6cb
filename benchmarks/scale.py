"""Costs that grow with the number of processes: seconds for 2 to 64, and the data sent by each of 1,024 processes.

Run: python -m benchmarks.scale [--processes 2 4 8 16 32 64] [--kill] [--plot docs/images/scale.svg]
     python -m benchmarks.scale --simulate 1024 [--parameters 124000000] [--values 20]

The first form trains a tiny task under ddp on this machine. The startup time is measured from the call of fit to the
end of the first step. A step, a logging point, an agreement on stopping and a save are each timed on rank 0 between two
barriers, and the results are medians. With --kill, an elastic run follows, and one of its processes is killed.

The second form runs the same code in one process, in a group whose other ranks send the same data as this one
(`Recorded`), and prints the number of collectives and their input bytes. The number of messages follows from gloo's
algorithms: a ring for all_reduce and all_gather, and a binomial tree for broadcast.
"""

import argparse
import math
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import legato as lg

PARTS = "start", "step", "logging point", "agreement", "save"


class Vectors(Dataset[Tensor]):
    """Vectors of eight numbers."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), index * 1e-6)


class Tiny(lg.Task):
    """Twelve parallel layers. Logs several values in each step."""

    def __init__(self, values: int = 1, parameters: int = 96) -> None:
        super().__init__()
        self.values = values
        self.layers = nn.ModuleList(nn.Linear(8, max(1, parameters // 96), bias=False) for _ in range(12))

    def training_step(self, batch: Tensor) -> Tensor:
        loss = torch.stack([layer(batch).square().mean() for layer in self.layers]).sum()
        for index in range(self.values):
            self.log(f"value_{index}", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


# --- real processes --------------------------------------------------------------------------------------------------
class Parts(lg.Callback):
    """Times the parts of a run on rank 0, and writes the medians to a file."""

    def __init__(self, folder: Path, called: float, rounds: int) -> None:
        self.folder, self.called, self.rounds = folder, called, rounds
        self.seconds: dict[str, list[float]] = {name: [] for name in PARTS}
        self.began = 0.0

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if trainer.global_step == 1:
            self.seconds["start"].append(now - self.called)
            return
        self.seconds["step"].append(now - self.began)
        for name, call in (
            ("logging point", trainer.log_step),
            ("agreement", trainer.current_run.agree_on_stop),
            ("save", lambda: trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}")),
        ):
            trainer.strategy.collectives.barrier()
            began = time.monotonic()
            call()
            trainer.strategy.collectives.barrier()
            self.seconds[name].append(time.monotonic() - began)
        if trainer.is_global_zero and trainer.global_step == self.rounds:
            medians = (str(statistics.median(self.seconds[name])) for name in PARTS)
            (self.folder / "seconds").write_text(" ".join(medians))


def measure(processes: int, rounds: int) -> list[float]:
    """Return the seconds that each of `PARTS` takes in a run on this number of processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = make_trainer(
            folder, rounds, devices=processes, strategy="ddp", callbacks=[Parts(folder, time.monotonic(), rounds)]
        )
        trainer.fit(Tiny(), DataLoader(Vectors(), 4))
        return [float(word) for word in (folder / "seconds").read_text().split()]


class KillOnce(lg.Callback):
    """Saves after step 2, kills the last process after step 3, and records the number of processes in each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            with (self.folder / "steps").open("a") as file:
                file.write(f"{time.monotonic()} {trainer.world_size}\n")
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "saved")
        killed = self.folder / "killed"
        if trainer.global_step == 3 and trainer.global_rank == trainer.world_size - 1 and not killed.exists():
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def kill_one(processes: int, folder: Path, rounds: int = 8) -> tuple[float, list[int]]:
    """Kill a process in an elastic run. Return the seconds until the next step, and the successive group sizes."""
    strategy = {"name": "ddp", "elastic": True}
    options: dict[str, Any] = {"replicas": processes, "max_restarts": 0, "callbacks": [KillOnce(folder)]}
    trainer = make_trainer(folder, rounds, devices=processes, strategy=strategy, log_every_n_steps=2, **options)
    trainer.fit(Tiny(), DataLoader(Vectors(), 4))
    death = float((folder / "killed").read_text())
    steps = [line.split() for line in (folder / "steps").read_text().splitlines()]
    after = next(float(when) for when, size in steps if float(when) > death and int(size) < processes)
    return after - death, list(dict.fromkeys(int(size) for _, size in steps))


def make_trainer(folder: Path, steps: int, **options: Any) -> lg.Trainer:
    """Return a trainer that writes only below `folder`."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"log_every_n_steps": 10**9, **quiet, **options}
    return lg.Trainer(max_steps=steps, accelerator="cpu", default_root_dir=folder, **options)


# --- one process with simulated peers ---------------------------------------------------------------------------------
class Recorded(dist.ProcessGroup):
    """A group whose other ranks send the same data as this one. Counts collectives and their bytes in each phase."""

    phase = "start"
    counts: ClassVar[Counter[tuple[str, str]]] = Counter()
    """Number of collectives, keyed by (phase of the run, operation)."""
    sizes: ClassVar[Counter[tuple[str, str]]] = Counter()
    """Input bytes of these collectives on this rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.ranks = size

    def getBackendName(self) -> str:
        return "recorded"

    def getGroupName(self) -> str:
        return f"recorded-{id(self)}"

    def _done(self, name: str, inputs: list[Tensor], result: Any) -> Any:
        Recorded.counts[Recorded.phase, name] += 1
        Recorded.sizes[Recorded.phase, name] += sum(tensor.nbytes for tensor in inputs)
        future: Any = torch.futures.Future()
        future.set_result(result)
        return _Done(future)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        if getattr(options, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.ranks)
        return self._done("all_reduce", tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for gathered, tensor in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(tensor)
        return self._done("all_gather", inputs, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, options: Any = None) -> Any:
        """Gather into a single tensor, as torch 2.15 does for objects."""
        output.view(self.ranks, -1).copy_(input.reshape(1, -1).expand(self.ranks, -1))
        return self._done("all_gather", [input], [output])

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._done("broadcast", tensors, tensors)

    def barrier(self, options: Any = None) -> Any:
        return self._done("barrier", [], [])


class _Done(dist.Work):
    """A completed collective."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


class Phases(lg.Callback):
    """Sets the phase. After the third step, runs a logging point, an agreement and a save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        Recorded.phase = (
            "step" if trainer.global_step == 2 else "first steps"
        )  # DDP rebuilds its buckets in the second step

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            with during("logging point"):
                trainer.log_step()
            with during("agreement"):
                trainer.current_run.agree_on_stop()
            with during("save"):
                trainer.save_checkpoint(self.folder / "saved")
        Recorded.phase = "end"


@contextmanager
def during(name: str) -> Iterator[None]:
    """Within this context, count collectives under the name of a phase."""
    before, Recorded.phase = Recorded.phase, name
    try:
        yield
    finally:
        Recorded.phase = before


def simulate(processes: int, parameters: int, values: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the number of collectives and their input bytes, by phase of the run and operation."""
    Recorded.phase = "start"
    Recorded.counts.clear()
    Recorded.sizes.clear()
    if "recorded" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "recorded", lambda store, rank, size, timeout: Recorded(rank, size), devices=["cpu"]
        )
    dist.init_process_group("cpu:recorded", store=dist.HashStore(), rank=0, world_size=processes)
    try:
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # gloo groups support it
            trainer = make_trainer(Path(name), 3, strategy="ddp", callbacks=[Phases(Path(name))])
            trainer.fit(Tiny(values, parameters), DataLoader(Vectors(), 4))
    finally:
        dist.destroy_process_group()
    totals: dict[str, dict[str, tuple[int, int]]] = {}
    for (phase, name), count in Recorded.counts.items():
        totals.setdefault(phase, {})[name] = count, Recorded.sizes[phase, name]
    return totals


def messages(operation: str, count: int, size: int, ranks: int) -> tuple[int, float]:
    """Return the number of messages and bytes that a rank sends for these collectives.

    In gloo, all_reduce is a reduce-scatter followed by an all-gather on a ring, all_gather uses a ring, and broadcast
    uses a binomial tree. Rank 0 sends the most in this tree, so the result is for rank 0.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) * count, 2 * size * (ranks - 1) / ranks
    if operation == "all_gather":
        return (ranks - 1) * count, size * (ranks - 1)
    rounds = math.ceil(math.log2(ranks))
    return rounds * count, size * rounds


# --- output ----------------------------------------------------------------------------------------------------------
def draw(path: Path, rows: dict[int, list[float]]) -> None:
    """Plot seconds against processes, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for index, name in enumerate(PARTS):
        axes.plot(list(rows), [row[index] for row in rows.values()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="processes on 2 cores", ylabel="seconds")
    axes.set_xticks(list(rows), [str(count) for count in rows])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def print_simulation(ranks: int, parameters: int, values: int) -> None:
    """Print a row for each phase of a run and each operation."""
    print(f"{ranks} processes, {parameters:,} parameters, {values} logged values; per process")
    print(f"{'part':12}{'operation':12}{'calls':>7}{'input bytes':>14}{'messages':>10}{'bytes sent':>14}")
    for phase, operations in simulate(ranks, parameters, values).items():
        for operation, (count, size) in sorted(operations.items()):
            number, sent = messages(operation, count, size, ranks)
            print(f"{phase:12}{operation:12}{count:7}{size:14,}{number:10,}{sent:14,.0f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=12, help="steps of a run")
    parser.add_argument("--kill", action="store_true", help="kill a process of an elastic run too")
    parser.add_argument("--plot", type=Path, help="an SVG to draw")
    parser.add_argument("--simulate", type=int, metavar="N", help="count what a process sends among N instead")
    parser.add_argument("--parameters", type=int, default=124_000_000)
    parser.add_argument("--values", type=int, default=20, help="values logged in a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulate:
        print_simulation(options.simulate, options.parameters, options.values)
        return
    print(
        f"{'processes':>9}"
        + "".join(f"{name:>14}" for name in PARTS)
        + ("   killed: next step" if options.kill else "")
    )
    rows = {}
    for count in options.processes:
        rows[count] = measure(count, options.rounds)
        line = f"{count:9}" + "".join(f"{seconds:14.4f}" for seconds in rows[count])
        if options.kill:
            with tempfile.TemporaryDirectory() as folder:
                seconds, sizes = kill_one(count, Path(folder))
            line += f"   {seconds:.2f} s, groups of {' -> '.join(map(str, sizes))}"
        print(line, flush=True)
    if options.plot:
        draw(options.plot, rows)


if __name__ == "__main__":
    main()
