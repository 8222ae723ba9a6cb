"""Time to start two processes, from the call to the end of their first all_reduce, compared with torch's spawn.

The benchmark also measures `Trainer.fit`, from the call to the end of its first optimizer step, and `legato fit`, from
the command to the end of its first step. The command takes turns with `python -c "import torch"`, which every training
program has to run.

Run: python benchmarks/start.py [--rounds 5] [--only command]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path


def by_spawn(rank: int, meeting: str) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    distributed.all_reduce(torch.ones(1))
    distributed.destroy_process_group()


def by_legato() -> None:
    import torch
    from torch import distributed

    from legato.base.place import find_place
    from legato.trainer.processes.rendezvous import join_process_group, leave_process_group

    place = find_place()
    assert place is not None
    join_process_group(place, "gloo", timedelta(seconds=60))
    distributed.all_reduce(torch.ones(1))
    leave_process_group()


def by_fit(folder: Path) -> float:
    """Train for one step on two processes, and return the time when it ends."""
    import torch

    import legato as lg

    class OneStep(lg.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            if self.global_rank == 0:
                (folder / "done").write_text(str(time.perf_counter()))  # CLOCK_MONOTONIC is the same in every process

    loader = torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=4)
    trainer = lg.Trainer(
        max_steps=1, devices=2, strategy="ddp", accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(OneStep(), loader)
    return float((folder / "done").read_text())


TASK = """
import os, time
from pathlib import Path
import legato as lg
import torch

class OneStep(lg.Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=4)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0:
            server = os.getppid()
            caller = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
            cpu = [sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100
                   for process in (caller, server, os.getpid())]
            Path("done").write_text(f"{[time.perf_counter(), *cpu]}")
"""
CONFIG = """
task: {_target_: one_step.OneStep}
trainer: {strategy: ddp, devices: 2, max_steps: 1, accelerator: cpu}
"""


def by_command(rounds: int) -> None:
    """Print the time from `legato fit` to the end of the first step, and how much longer it is than torch's import."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    rows: list[list[float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one_step.py").write_text(TASK)
        (folder / "one.yaml").write_text(CONFIG)
        for _ in range(rounds + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], env=environment, cwd=folder, check=True)
            torch_took, start = time.perf_counter() - start, time.perf_counter()
            command = [sys.executable, "-m", "legato", "fit", "one.yaml"]
            subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=True)
            ended, *cpu = json.loads((folder / "done").read_text())
            rows.append([torch_took, ended - start, ended - start - torch_took, *cpu])
    rows = rows[1:]  # the first run writes bytecode
    print(f"\n{'legato fit, 2 processes, cold':<36}{'median':>8}{'least':>8}")
    names = ("python -c 'import torch'", "command to the end of the first step", "... beyond import torch")
    for title, column in zip(
        (*names, "CPU: command", "CPU: server", "CPU: rank 0"), zip(*rows, strict=True), strict=True
    ):
        print(f"{title:<36}{statistics.median(column):>8.2f}{min(column):>8.2f}")


def measure(kind: str) -> list[float]:
    """Return the seconds that the first and second start in a new process take."""
    from legato.trainer.processes.launch import run_workers, warm_up

    if kind == "early":
        warm_up()  # the command line does this before it reads the config
    import torch
    from torch import multiprocessing

    torch.nn.Linear(1, 1)
    seconds = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            if kind == "fit":
                seconds.append(by_fit(Path(folder)) - start)
                continue
            if kind == "spawn":
                multiprocessing.spawn(by_spawn, ((Path(folder) / "met").as_uri(),), nprocs=2)
            else:
                run_workers(by_legato, 2)
            seconds.append(time.perf_counter() - start)
    return seconds


def by_call(rounds: int) -> None:
    """Measure the ways to start in turn, each in new processes, and print medians and ratios to spawn."""
    taken: dict[str, list[list[float]]] = {"spawn": [], "cold": [], "early": [], "fit": []}
    for _ in range(rounds):
        for kind, seconds_of in taken.items():
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, __file__, kind], env=environment, stdout=subprocess.PIPE, check=True)
            seconds_of.append(json.loads(done.stdout))
    spawn = statistics.median(first for first, _ in taken["spawn"])
    print(f"{'2 processes, call to end of first all_reduce':52} {'seconds':>8} {'of spawn':>9}")
    for name, kind, which in (
        ("torch.multiprocessing.spawn", "spawn", 0),
        ("Legato, first start", "cold", 0),
        ("Legato, first start, warmed up while torch imports", "early", 0),
        ("Legato, every later start", "cold", 1),
        ("Trainer.fit, call to end of first step", "fit", 0),
        ("Trainer.fit, every later call", "fit", 1),
    ):
        seconds = statistics.median(round_[which] for round_ in taken[kind])
        print(f"{name:52} {seconds:8.2f} {seconds / spawn:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["call", "command"])
    options = parser.parse_args()
    if options.only != "command":
        by_call(options.rounds)
    if options.only != "call":
        by_command(options.rounds)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1][0] != "-":
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
