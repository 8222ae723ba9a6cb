"""Time to start two processes, from the call to the end of their first all_reduce, against torch's own spawn.

Also for `Trainer.fit`: from the call to the end of its first optimizer step.

Run: python benchmarks/start.py
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROUNDS = 5


def by_spawn(rank: int, meeting: str) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    distributed.all_reduce(torch.ones(1))
    distributed.destroy_process_group()


def by_legato() -> None:
    import torch
    from torch import distributed

    from legato.trainer.processes import environment

    place = environment.find_place()
    assert place is not None
    environment.join_process_group(place, "gloo", timedelta(seconds=60))
    distributed.all_reduce(torch.ones(1))
    environment.leave_process_group()


def by_fit(folder: Path) -> float:
    """Train for one step on two processes; return the time of its end."""
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
                (folder / "done").write_text(str(time.perf_counter()))  # CLOCK_MONOTONIC: the same in every process

    loader = torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=4)
    trainer = lg.Trainer(
        max_steps=1, devices=2, strategy="ddp", accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(OneStep(), loader)
    return float((folder / "done").read_text())


def measure(kind: str) -> list[float]:
    """Return the seconds of a fresh process's first start and of its next one."""
    from legato.trainer.processes import environment

    if kind == "early":
        environment.warm_up()  # as the command line does it, before it reads the config
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
                environment.run_workers(by_legato, 2)
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure each way in fresh processes, in turn, and print medians and ratios to spawn."""
    taken: dict[str, list[list[float]]] = {"spawn": [], "cold": [], "early": [], "fit": []}
    for _ in range(ROUNDS):
        for kind, rounds in taken.items():
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, __file__, kind], env=environment, stdout=subprocess.PIPE, check=True)
            rounds.append(json.loads(done.stdout))
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


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
