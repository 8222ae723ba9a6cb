"""CPU time that a training step takes beyond a hand-written loop, for Legato and for installed peers.

Run: python -m benchmarks.step_overhead [--modes bare,usual,map] [--steps 2000] [--rounds 3] [--only raw,legato,...]

Every contestant trains the same small MLP on the same batches in its own process. They take turns of 50 steps (A B C, A
B C, ...) while the others wait, so that other load and changes in clock speed affect all of them equally. The benchmark
measures the CPU time of the process during a turn, excluding its first steps, when caches are cold. Each turn is
compared with the turns of the hand-written loop right before and after it. The results are the medians of the step
times and of these ratios over all rounds, excluding the first turns. "raw, again" is a second hand-written loop, which
shows the noise.

bare: nothing attached, batches from a stream. map: the same, but with shuffled and collated batches from a map-style
DataLoader. usual: one loss logged per step, a progress bar (written to a file), TensorBoard every 50 steps, and a
checkpoint at the end, as far as the framework supports these.

"legato, off" is Legato with `reproducible: off`, without keyed random numbers, which no peer has.
"""

import argparse
import importlib.util
import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

BLOCK, COLD = 50, 10
"""Number of steps in a turn, and number of its first steps that are not measured."""
FIRST = 5
"""Number of initial turns of each contestant, which are not measured."""
BATCH, BATCHES = 32, 64
MODES = ("bare", "usual", "map")


@dataclass
class Job:
    """A contestant's training run, and the clock that it calls after each step."""

    mode: str
    steps: int
    folder: Path
    answers: TextIO
    """Stream that receives the seconds of each turn."""
    done: int = 0
    began: float = 0.0

    def __post_init__(self) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.usual = self.mode == "usual"
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.inputs, self.targets = torch.randn(BATCHES, BATCH, 32), torch.randint(0, 10, (BATCHES, BATCH))

    def loader(self) -> Any:
        """Return a loader for one epoch."""
        from torch.utils.data import DataLoader, IterableDataset, TensorDataset

        batches, steps = list(zip(self.inputs, self.targets, strict=True)), self.steps
        if self.mode == "map":
            repeats = -(-steps // BATCHES)
            inputs, targets = self.inputs.flatten(0, 1).repeat(repeats, 1), self.targets.flatten().repeat(repeats)
            return DataLoader(TensorDataset(inputs[: steps * BATCH], targets[: steps * BATCH]), BATCH, shuffle=True)

        class Stream(IterableDataset[Any]):
            def __len__(self) -> int:
                return steps

            def __iter__(self) -> Iterator[Any]:
                return itertools.islice(itertools.cycle(batches), steps)

        return DataLoader(Stream(), batch_size=None)

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the loss of a batch."""
        from torch.nn import functional

        return functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model: Any) -> Any:
        """Return Adam for a model."""
        import torch

        return torch.optim.Adam(model.parameters(), 1e-3)

    def tick(self, *_: Any) -> None:
        """Count a step. At the end of a turn, print its time and wait for the next turn."""
        self.done += 1
        if self.done % BLOCK == COLD:
            self.began = time.process_time()
        elif self.done % BLOCK == 0:
            print(time.process_time() - self.began, file=self.answers, flush=True)
            sys.stdin.readline()


# --- the contestants --------------------------------------------------------------------------------------------------
def raw(job: Job) -> None:
    """Train in a hand-written loop."""
    optimizer = job.optimizer(job.model)
    bar: Any = None
    writer: Any = None
    if job.usual:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        bar, writer = tqdm(total=job.steps), SummaryWriter(str(job.folder))
    for index, batch in enumerate(job.loader()):
        loss = job.loss(job.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.usual:
            bar.update()
            if index % BLOCK == 0:
                writer.add_scalar("loss", loss.item(), index)
        job.tick()


def legato(job: Job, reproducible: str = "order") -> None:
    """Train with Legato."""
    import legato as lg
    from legato.loggers.tensorboard import TensorBoardLogger

    class Task(lg.Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = job.loss(self.model, batch)
            if job.usual:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return job.optimizer(self)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            job.tick()

    trainer = lg.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        reproducible=reproducible,
        logger=TensorBoardLogger() if job.usual else False,
        enable_checkpointing=job.usual,
        enable_progress_bar=job.usual,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(Task(), job.loader())


def legato_off(job: Job) -> None:
    """Train with Legato, without keyed random numbers."""
    legato(job, "off")


def lightning(job: Job) -> None:
    """Train with PyTorch Lightning."""
    import lightning as peer
    from lightning.pytorch.loggers import TensorBoardLogger

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(peer.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = job.loss(self.model, batch)
            if job.usual:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return job.optimizer(self)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            job.tick()

    trainer = peer.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=TensorBoardLogger(str(job.folder)) if job.usual else False,
        enable_checkpointing=job.usual,
        enable_progress_bar=job.usual,
        enable_model_summary=False,
        default_root_dir=str(job.folder),
    )
    trainer.fit(Module(), job.loader())


def ignite(job: Job) -> None:
    """Train with PyTorch-Ignite."""
    from ignite.engine import Engine, Events

    optimizer = job.optimizer(job.model)

    def step(engine: Any, batch: Any) -> Any:
        loss = job.loss(job.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item() if job.usual else loss.detach()

    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, job.tick)
    if job.usual:
        from ignite.handlers import ProgressBar, TensorboardLogger

        ProgressBar().attach(engine, output_transform=lambda loss: {"loss": loss})
        TensorboardLogger(log_dir=str(job.folder)).attach_output_handler(
            engine, Events.ITERATION_COMPLETED(every=BLOCK), tag="train", output_transform=lambda loss: {"loss": loss}
        )
    engine.run(job.loader(), max_epochs=1)


def fabric(job: Job) -> None:
    """Train with Lightning Fabric, in a hand-written loop."""
    from lightning.fabric import Fabric

    peer = Fabric(accelerator="cpu", devices=1)
    peer.launch()
    model, optimizer = peer.setup(job.model, job.optimizer(job.model))
    by_hand(job, model, optimizer, peer.setup_dataloaders(job.loader()), peer.backward)


def accelerate(job: Job) -> None:
    """Train with Hugging Face Accelerate, in a hand-written loop."""
    from accelerate import Accelerator

    peer = Accelerator(cpu=True)
    model, optimizer, loader = peer.prepare(job.model, job.optimizer(job.model), job.loader())
    by_hand(job, model, optimizer, loader, peer.backward)


def by_hand(job: Job, model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], None]) -> None:
    for batch in loader:
        loss = job.loss(model, batch)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        job.tick()


CONTESTANTS: dict[str, tuple[Callable[[Job], None], str, tuple[str, ...]]] = {
    "raw": (raw, "torch", MODES),
    "raw, again": (raw, "torch", MODES),
    "legato": (legato, "legato", MODES),
    "legato, off": (legato_off, "legato", MODES),
    "lightning": (lightning, "lightning", MODES),
    "ignite": (ignite, "ignite", MODES),
    "fabric": (fabric, "lightning", ("bare", "map")),
    "accelerate": (accelerate, "accelerate", ("bare", "map")),
}
"""Function, required package and supported modes, by name."""


# --- the comparison ---------------------------------------------------------------------------------------------------
def measure(names: list[str], mode: str, steps: int) -> dict[str, list[float]]:
    """Run the contestants in turn, each in its own process, and return the duration of each turn in seconds."""
    environment, taken = os.environ | {"OMP_NUM_THREADS": "1"}, {name: list[float]() for name in names}
    with ExitStack() as opened:
        errors = {name: opened.enter_context(tempfile.TemporaryFile("w+")) for name in names}
        processes = {
            name: opened.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--one", name, "--modes", mode, "--steps", str(steps)],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors[name], text=True,
                )
            )
            for name in names
        }  # fmt: skip
        for _ in range(steps // BLOCK):
            for name, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                print(file=process.stdin, flush=True)
                answer = process.stdout.readline()
                if not answer:
                    errors[name].seek(0)
                    raise SystemExit(f"{name} failed in mode {mode}:\n{errors[name].read()[-2000:]}")
                taken[name].append(float(answer))
    return taken


def compare(mode: str, names: list[str], steps: int, rounds: int) -> None:
    """Print the table for a mode."""
    names = [name for name in names if mode in CONTESTANTS[name][2]]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # reversed in every second round, since a contestant starts with its predecessor's caches
        peers = names[1:] if number % 2 == 0 else names[:0:-1]
        taken = measure([names[0], *peers], mode, steps)
        for name, turns in taken.items():
            seconds[name] += turns[FIRST:]
            around = list(itertools.pairwise(taken[names[0]]))[FIRST:]
            pairs = zip(turns[FIRST:], around, strict=False)
            ratios[name] += [2 * turn / (before + after) for turn, (before, after) in pairs]
    base = statistics.median(seconds["raw"])
    print(f"{mode + ', CPU time of a step':<32}{'us':>8}{'over raw':>10}{'ratio':>8}{'+-':>7}")
    for name in names:
        microseconds = statistics.median(seconds[name]) / (BLOCK - COLD) * 1e6
        ratio = 1.0 if name == "raw" else statistics.median(ratios[name])
        # half the interquartile range, scaled as a standard error of the mean
        lower, _, upper = statistics.quantiles(ratios[name], n=4)
        spread = (upper - lower) / 2 / len(ratios[name]) ** 0.5
        over = (ratio - 1) * base / (BLOCK - COLD) * 1e6
        print(f"  {name:<30}{microseconds:>8.1f}{over:>+10.1f}{ratio:>8.2f}{spread:>7.3f}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="some of: " + "; ".join(CONTESTANTS), default="")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        # a framework's output must not be read as an answer
        with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(1), "w") as answers:
            os.dup2(2, 1)
            job = Job(options.modes, options.steps // BLOCK * BLOCK, Path(folder), answers)
            sys.stdin.readline()
            CONTESTANTS[options.one][0](job)
        assert job.done == job.steps, f"{job.done} steps instead of {job.steps}"
        return
    if options.steps < 2 * FIRST * BLOCK:
        parser.error(
            f"--steps takes {2 * FIRST * BLOCK} or more: turns have {BLOCK} steps, the first {FIRST} do not count"
        )
    wanted = ["raw", "raw, again", *options.only.split(",")] if options.only else list(CONTESTANTS)
    names = [name for name in CONTESTANTS if name in wanted and importlib.util.find_spec(CONTESTANTS[name][1])]
    for mode in options.modes.split(","):
        compare(mode, names, options.steps, options.rounds)


if __name__ == "__main__":
    main()
