"""Runs the same small program in Legato, Lightning, Accelerate and transformers, and prints what each does.

    python -m benchmarks.peer_behavior [NAME ...]

Requires lightning, accelerate and transformers. A package that is not installed is skipped. Each side of a case runs in
its own processes. docs/comparison.md shows the results. The exit code is the number of wrong results from Legato.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

LIMIT = 60
"""Seconds after which a side is considered hung."""
SAMPLES, BATCH, WINDOW = 10, 2, 4
"""Samples per dataset, samples per batch, and batches per accumulation window."""


class Numbers(Dataset[torch.Tensor]):
    """A dataset whose sample i is the number i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Shares(IterableDataset[torch.Tensor]):
    """A stream with four samples on rank 0 and eight on rank 1."""

    def __iter__(self) -> Any:
        rank = int(os.environ["RANK"])
        return iter(torch.arange(4.0 * (rank + 1)) + 100 * rank)


def task_of(base: Any, folder: Path, case: str) -> Any:
    """Return a task for the library whose task class is `base`."""

    class Scale(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            (folder / f"started-{self.global_rank}").touch()
            with (folder / f"samples-{self.global_rank}").open("a") as file:
                file.write(f"{len(batch)}\n")
            if case == "signal":
                time.sleep(0.1)
            if case == "names" and self.global_rank:
                self.log("value", 1.0, sync_dist=True)
            return self.scale * (float("nan") if case == "nan" else 1.0)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("mean", batch.mean(), sync_dist=True, batch_size=len(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Scale()


def with_trainer(package: Any, base: Any, folder: Path, case: str) -> str:
    """Run a case in Legato or Lightning."""
    processes = PROCESSES.get(case, 1)
    options: dict[str, Any] = {"logger": case == "names", "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"log_every_n_steps": 1, "max_epochs": 100 if case == "signal" else 1, "default_root_dir": folder}
    options |= {"devices": processes, "strategy": "ddp"} if processes > 1 else {"devices": 1}
    if case != "signal":
        options["enable_checkpointing"] = False
    if case == "window":
        options["accumulate_grad_batches"] = WINDOW
    task, trainer = task_of(base, folder, case), package.Trainer(accelerator="cpu", **options)
    loader = DataLoader(Shares() if case == "shares" else Numbers(), batch_size=BATCH)
    if case == "evaluation":
        return f"mean {trainer.validate(task, loader, verbose=False)[0]['mean']:.3f}"
    trainer.fit(task, loader)
    return f"weight {float(task.scale):.2f}"


def with_legato(folder: Path, case: str) -> str:
    """Run a case in Legato."""
    import legato as lg

    return with_trainer(lg, lg.Task, folder, case)


def with_lightning(folder: Path, case: str) -> str:
    """Run a case in Lightning."""
    import lightning.pytorch as pl

    return with_trainer(pl, pl.LightningModule, folder, case)


def with_accelerate(folder: Path, case: str) -> str:
    """Run a case in a loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=BATCH))
    if case == "evaluation":
        mean = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).mean()
        accelerator.end_training()
        return f"mean {mean:.3f}"
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(len(batch), 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return f"weight {float(model.weight):.2f}"


def with_transformers(folder: Path, case: str) -> str:
    """Run a case in transformers.Trainer."""
    from transformers import Trainer, TrainingArguments

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(()))

        def forward(self, number: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            loss = self.scale * (float("nan") if case == "nan" else 1.0)
            return {"loss": loss, "logits": number}

    rows = [{"number": float(number), "labels": 0.0} for number in range(SAMPLES)]
    options: dict[str, Any] = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    options |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options |= {"gradient_accumulation_steps": WINDOW if case == "window" else 1, "num_train_epochs": 1}
    quiet: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no"}
    trainer = Trainer(
        Scale(),
        TrainingArguments(str(folder), **options, **quiet),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())},
    )
    if case == "evaluation":
        return f"mean {trainer.evaluate()['eval_mean']:.3f}"
    loss = trainer.train().training_loss
    return f"weight {float(trainer.model.scale):.2f}" + (f", logged loss {loss:.1f}" if case == "nan" else "")


SIDES = {
    "legato": with_legato,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
}
TRAINERS = ("legato", "lightning")
CASES: dict[str, tuple[str, tuple[str, ...], Callable[[str], bool]]] = {
    "evaluation": (
        "the mean of 0 to 9 in a validation on three processes: 4.5",
        tuple(SIDES),
        lambda text: text == "mean 4.500",
    ),
    "window": (
        "five batches with gradient 1, lr 1, accumulation over four: the weight is -2 after two updates",
        tuple(SIDES),
        lambda text: text == "weight -2.00",
    ),
    "nan": (
        "a loss that is NaN from the first step",
        ("legato", "lightning", "transformers"),
        lambda text: "NonFiniteError" in text,
    ),
    "signal": ("SIGTERM to a single process", TRAINERS, lambda text: text.startswith("exit code 75, 1 checkpoint")),
    "names": ("a value that only rank 1 of two logs", TRAINERS, lambda text: text.startswith("exit code 1")),
    "shares": (
        "streams of 4 and 8 samples on two ranks",
        TRAINERS,
        lambda text: text.endswith("4 and 8 samples trained on"),
    ),
}
"""Name of each case: its title, the sides that run it, and whether a result is right."""
PROCESSES = {"evaluation": 3, "names": 2, "shares": 2}


def run(case: str, side: str) -> str:
    """Run one side of a case in its own processes, and return a sentence with the result."""
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), PROCESSES.get(case, 1)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)) if count > 1 else ()
        command = [sys.executable, *launcher, "-m", "benchmarks.peer_behavior", case, "--side", side, "--folder", name]
        output = (folder / "output").open("w")
        root = Path(__file__).parent.parent
        process = subprocess.Popen(command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if case == "signal":
                wait_for(folder / "started-0")
                process.send_signal(signal.SIGTERM)
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"hangs: killed after {LIMIT} s"
        finally:
            output.close()
        return describe(case, folder, code)


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + LIMIT
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def describe(case: str, folder: Path, code: int) -> str:
    """Return a description of what a side did."""
    if case == "signal":
        kinds = [*folder.rglob("manifest.json"), *folder.rglob("*.ckpt")]
        return f"exit code {code}, {len(kinds) or 'no'} checkpoint"
    if case == "shares":
        counts = [sum(map(int, path.read_text().split())) for path in sorted(folder.glob("samples-*"))]
        return f"exit code {code}, {' and '.join(map(str, counts))} samples trained on"
    if code == 0:
        return (folder / "result").read_text()
    lines = [line for line in (folder / "output").read_text().splitlines() if "Error:" in line]
    return f"exit code {code}: {lines[0].strip() if lines else 'no message'}"


def main() -> int:
    """Run the cases, and return the number of wrong results from Legato."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*CASES, []], help=", ".join(CASES))
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        result = SIDES[options.side](options.folder, options.names[0])
        (options.folder / "result").write_text(result)
        return 0
    wrong = 0
    for case in options.names or CASES:
        title, sides, is_right = CASES[case]
        print(f"{case}: {title}", flush=True)
        for side in sides:
            if find_spec(side) is None:
                print(f"  not tried: pip install {side}", flush=True)
                continue
            name, result = side if side == "legato" else f"{side} {metadata.version(side)}", run(case, side)
            print(f"  {name:<22}{result}", flush=True)
            wrong += side == "legato" and not is_right(result)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
