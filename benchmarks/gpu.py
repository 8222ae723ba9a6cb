"""Legato on a GPU: GPT-2 tokens/s, the cost of a step, the stall of a background save, and batch transfers.

Run: make gpu, or python -m benchmarks.gpu [--device cuda] [--small] [--out FILE]
Everything is compared with a hand-written loop and, if it is installed, with Lightning; they take turns in one process.
The benchmark writes FILE.json and FILE.md. It takes about six minutes on one H100, or a few seconds on any device with
`--small`.
"""

import argparse
import importlib.util
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import legato as lg
from benchmarks.checkpoint import state_of
from examples.characters import Block, Embedding
from legato.trainer.checkpoints import background
from legato.trainer.data.transfer import to_device

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s by device name, from the data sheets."""
WARMUP = 5
"""Number of steps before the clock starts. With torch.compile, the first steps compile the model."""


@dataclass(frozen=True)
class Size:
    """Sizes of all measured models and data."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    block: int = 1024
    batch: int = 16
    steps: int = 40
    tiny_steps: int = 1500
    megabytes: int = 2000
    image_batch: int = 256
    image: int = 128


SMALL = Size(1, 2, 32, 64, 16, 2, steps=8, tiny_steps=40, megabytes=24, image_batch=4, image=8)


class Clock:
    """Seconds per step from the end of the warmup to the last step. The device is synchronized at both points."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.last, self.done, self.began, self.seconds = device, WARMUP + steps, 0, 0.0, 0.0

    def tick(self, *_: Any) -> None:
        """Count a step."""
        self.done += 1
        if self.done in (WARMUP, self.last):
            wait_for(self.device)
            now = time.perf_counter()
            if self.done == WARMUP:
                self.began = now
            else:
                self.seconds = (now - self.began) / (self.last - WARMUP)


def wait_for(device: torch.device) -> None:
    """Synchronize the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- what is trained --------------------------------------------------------------------------------------------------
class GPT(nn.Module):
    """GPT-2 small (Radford et al., 2019) with tied embeddings: 124 million parameters."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = Embedding(size.vocabulary, size.block, size.width, 0.0)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, 0.0) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of tokens (n, time + 1)."""
        stream = self.embedding(batch[:, :-1])
        for block in self.blocks:
            stream = block(stream)
        logits = functional.linear(self.norm(stream), self.embedding.token.weight)
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Tiny(nn.Module):
    """A perceptron that is so small that the device waits for the host."""

    def __init__(self, _: Size) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean square of the output."""
        return self.layers(batch).square().mean()


class Shrunk(nn.Module):
    """One convolution over large images, so that the copy to the device matters."""

    def __init__(self, _: Size) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 8, stride=8)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean square of the output."""
        return self.layer(batch).square().mean()


class Repeated(IterableDataset[Tensor]):
    """One batch, repeated from host memory."""

    def __init__(self, batch: Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        return islice(repeat(self.batch), self.steps)


@dataclass
class Job:
    """A training run to time."""

    model: Callable[[Size], nn.Module]
    batch: Tensor
    steps: int
    size: Size
    device: torch.device
    half: bool = False
    compiled: bool = False

    def loader(self) -> DataLoader[Tensor]:
        """Return a loader for one epoch, with pinned memory on CUDA."""
        steps, pinned = self.steps + WARMUP, self.device.type == "cuda"
        return DataLoader(Repeated(self.batch, steps), batch_size=None, pin_memory=pinned)

    def module(self) -> nn.Module:
        """Return the model, with the same initial weights for all contestants."""
        torch.manual_seed(0)
        return self.model(self.size)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, fused for all contestants."""
        return torch.optim.AdamW(module.parameters(), 3e-4, fused=self.device.type == "cuda" or None)


def by_hand(job: Job) -> float:
    """Return the seconds per step of the hand-written loop."""
    clock, module = Clock(job.device, job.steps), job.module().to(job.device)
    optimizer = job.optimizer(module)
    if job.compiled:
        for block in module.blocks:
            block.compile()
    for batch in job.loader():
        batch = batch.to(job.device, non_blocking=True)
        with torch.autocast(job.device.type, torch.bfloat16) if job.half else nullcontext():
            loss = module(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick()
    return clock.seconds


def framework(job: Job, library: Any, **options: Any) -> float:
    """Return the seconds per step with Legato's or Lightning's Trainer."""
    clock, base = Clock(job.device, job.steps), library.Task if hasattr(library, "Task") else library.LightningModule

    class Trained(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = job.module()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.module(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self)

        on_train_batch_end = clock.tick

    names = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    kind = {"cuda": "gpu"}.get(job.device.type, job.device.type)
    common = {"accelerator": kind, "devices": 1, "max_epochs": 1, "precision": "bf16-mixed" if job.half else "32-true"}
    library.Trainer(**dict.fromkeys(names, False), **common, **options).fit(Trained(), job.loader())
    return clock.seconds


def contestants(job: Job) -> dict[str, Callable[[], float]]:
    """Return functions that time the contestants, keyed by name."""
    compiled = {"compile": {"blocks": ["Block"]}} if job.compiled else {}
    timed: dict[str, Callable[[], float]] = {
        "by hand": lambda: by_hand(job),
        "legato": lambda: framework(job, lg, **compiled),
    }
    if job.model is Shrunk:
        timed["legato, no prefetch"] = lambda: framework(job, lg, prefetch_to_device=False)
    if job.model is GPT and not job.compiled:
        timed["legato, bitwise"] = lambda: framework(job, lg, reproducible="bitwise")
    if importlib.util.find_spec("lightning") and not job.compiled:
        import lightning

        timed["lightning"] = lambda: framework(job, lightning)
    return timed


# --- measurements -----------------------------------------------------------------------------------------------------
def time_steps(job: Job, rounds: int = 2) -> dict[str, float]:
    """Run the contestants in turn, and return each one's minimum seconds per step."""
    seconds: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in contestants(job).items():
            seconds[name] = min(seconds.get(name, float("inf")), run())
    return seconds


def measure_gpt(size: Size, device: torch.device, compiled: bool = False) -> list[dict[str, Any]]:
    """Return a row for each contestant: tokens/s and the share of the device's peak (MFU, PaLM appendix B)."""
    tokens = torch.randint(size.vocabulary, (size.batch, size.block + 1))
    steps = time_steps(Job(GPT, tokens, size.steps, size, device, half=True, compiled=compiled))
    parameters = sum(weight.numel() for weight in GPT(size).parameters()) - size.block * size.width
    flops = (6 * parameters + 12 * size.layers * size.width * size.block) * size.batch * size.block
    peak = peak_of(device)
    return [
        {
            "what": f"GPT, {parameters / 1e6:.0f} M parameters, bf16{', compiled' if compiled else ''}",
            "who": name,
            "value": size.batch * size.block / seconds,
            "unit": "tokens/s",
            "ratio": steps["by hand"] / seconds,
            "mfu": flops / seconds / peak if peak else None,
        }
        for name, seconds in steps.items()
    ]


def measure_steps(title: str, job: Job) -> list[dict[str, Any]]:
    """Return a row for each contestant: microseconds per step."""
    steps = time_steps(job)
    return [
        {"what": title, "who": name, "value": seconds * 1e6, "unit": "us a step", "ratio": seconds / steps["by hand"]}
        for name, seconds in steps.items()
    ]


def measure_save(size: Size, device: torch.device) -> list[dict[str, Any]]:
    """Return rows for the stall of the second background save, and for the time until that save is on disk."""
    state = to_device(state_of(size.megabytes), device)
    rows, writer = [], background.Writer()
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            wait_for(device)
            began = time.perf_counter()
            writer.save(Path(folder) / f"step-{step:08d}", state)
            stall = time.perf_counter() - began
            writer.wait()
            rows = [("stall of the step", stall), ("until it is on the disk", time.perf_counter() - began)]
    title = f"background save of {size.megabytes} MB"
    return [{"what": title, "who": who, "value": value, "unit": "s", "ratio": None} for who, value in rows]


def peak_of(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 FLOP/s, or None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for model, flops in PEAK.items() if model in name), None)


def describe(rows: list[dict[str, Any]], machine: str) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        f"Measured on {machine}.",
        "",
        "| | | value | ratio to by hand | MFU |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        mfu = f"{row['mfu']:.1%}" if row.get("mfu") else ""
        lines.append(f"| {row['what']} | {row['who']} | {row['value']:,.4g} {row['unit']} | {ratio} | {mfu} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the files after each measurement, so that an interrupted run leaves results behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="takes seconds; its figures mean little")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="FILE of FILE.json and FILE.md")
    options = parser.parse_args()
    device, size = torch.device(options.device), SMALL if options.small else Size()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    machine = f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    images = torch.randn(size.image_batch, 3, size.image, size.image)
    rows: list[dict[str, Any]] = []
    for measure in (
        lambda: measure_steps(
            "tiny model: the device waits", Job(Tiny, torch.randn(8, 32), size.tiny_steps, size, device)
        ),
        lambda: measure_gpt(size, device),
        lambda: measure_steps("images to the device", Job(Shrunk, images, size.steps, size, device)),
        lambda: measure_save(size, device),
        lambda: [] if options.small else measure_gpt(size, device, compiled=True),
    ):
        rows += measure()
        options.out.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
        options.out.with_suffix(".md").write_text(describe(rows, machine))
    print(describe(rows, machine))


if __name__ == "__main__":
    main()
