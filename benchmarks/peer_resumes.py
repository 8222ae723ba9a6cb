"""Interrupts and resumes an epoch in a peer and in Legato, and counts the samples that are read twice or never.

    python -m benchmarks.peer_resumes [NAME ...]

Requires lightning, accelerate, transformers, torchdata and datasets. Cases whose package is not installed are skipped.
Each side of a case runs in its own process and records the samples that it reads before and after the interruption.
docs/comparison.md shows the results. The exit code is the number of cases in which Legato does not read each sample
exactly once.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, BREAK = 64, 4, 3
"""Samples per epoch, samples per batch, and number of batches before the interruption."""
SEED = 7


class Numbers(Dataset[torch.Tensor]):
    """A dataset whose sample i is the number i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Cursor:
    """A loader with torchdata's protocol, `state_dict` and `load_state_dict`, that saves its position."""

    def __init__(self) -> None:
        self.done = 0

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.done = self.done, 0
        for number in range(begin, len(self)):
            self.done, first = number + 1, number * BATCH
            yield torch.arange(first, first + BATCH, dtype=torch.float32).unsqueeze(1)
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def hub_stream() -> Any:
    """Return a DataLoader for a `datasets` stream with eight shards."""
    from datasets import Dataset as Table

    rows = Table.from_dict({"number": [float(number) for number in range(SAMPLES)]}).to_iterable_dataset(num_shards=8)
    return DataLoader(rows, batch_size=BATCH, collate_fn=lambda rows: torch.tensor([[row["number"]] for row in rows]))


def write(folder: Path, phase: str, rank: int, epoch: int, batch: torch.Tensor) -> None:
    """Append the samples of a batch to a rank's record."""
    with (folder / f"{phase}-{rank}").open("a") as file:
        file.writelines(f"{epoch} {int(number)}\n" for number in batch.flatten())


def task_of(base: Any, folder: Path, phase: str) -> Any:
    """Return a task that records its samples, for the library whose task class is `base`."""

    class Reads(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            write(folder, phase, self.global_rank, self.current_epoch, batch)
            return self.layer(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            assert self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Reads()


def with_legato(
    folder: Path, loader: Callable[[], Any], epochs: int = 0, batches: int = BREAK, devices: int = 1
) -> None:
    """Train for `epochs` epochs and `batches` batches, then finish the epoch in a new trainer."""
    import legato as lg

    def fit(phase: str, resume: Path | None, **limit: int) -> None:
        lg.seed_everything(SEED)
        keeps = lg.callbacks.Checkpoint(dirpath=folder / "kept")
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "default_root_dir": folder}
        trainer = lg.Trainer(accelerator="cpu", devices=devices, callbacks=[keeps], **quiet, **limit)
        trainer.fit(task_of(lg.Task, folder, phase), loader(), resume=resume)

    fit("before", None, max_steps=epochs * SAMPLES // BATCH // devices + batches)
    fit("after", folder / "kept", max_epochs=epochs + 1)


def with_lightning(folder: Path, loader: Callable[[], Any], epochs: int = 0, batches: int = BREAK) -> None:
    """Do the same in Lightning under DDP, which sets the epoch of the sampler."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(phase: str, resume: Path | None, **limit: int) -> None:
        pl.seed_everything(SEED, verbose=False)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        # saved within the step, as in a job that is killed later; after `fit`, Lightning counts the epoch as complete
        keeps = ModelCheckpoint(folder, "kept", every_n_train_steps=steps)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy="ddp", callbacks=[keeps], default_root_dir=folder, **quiet, **limit
        )
        trainer.fit(task_of(pl.LightningModule, folder, phase), loader(), ckpt_path=resume)

    steps = epochs * SAMPLES // BATCH + batches
    fit("before", None, max_steps=steps)
    fit("after", folder / "kept.ckpt", max_epochs=epochs + 1)


def with_accelerate(folder: Path, loader: Callable[[], Any], epochs: int = 0, **options: Any) -> None:
    """Do the same in a loop with Accelerate and `use_stateful_dataloader`, in processes started by torchrun."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    for phase in ("before", "after"):
        set_seed(SEED)
        config = DataLoaderConfiguration(use_stateful_dataloader=True, **options)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        batches = accelerator.prepare(loader())
        if phase == "after":
            accelerator.load_state(str(folder / "kept"))
        for epoch in range(epochs if phase == "after" else 0, epochs + 1):
            batches.set_epoch(epoch)
            for number, batch in enumerate(batches, start=1):
                write(folder, phase, accelerator.process_index, epoch, batch)
                if phase == "before" and (epoch, number) == (epochs, BREAK):
                    accelerator.save_state(str(folder / "kept"))
                    break
        accelerator.free_memory()
    accelerator.end_training()


def with_transformers(folder: Path) -> None:
    """Do the same in transformers.Trainer, but within the first epoch."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Reads(torch.nn.Module):
        def __init__(self, phase: str) -> None:
            super().__init__()
            self.layer, self.phase = torch.nn.Linear(1, 1), phase

        def forward(self, number: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            write(folder, self.phase, 0, 0, number)
            return {"loss": self.layer(number.unsqueeze(1)).mean()}

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == BREAK

    rows = [{"number": float(number), "labels": 0.0} for number in range(SAMPLES)]
    options: dict[str, Any] = {"per_device_train_batch_size": BATCH, "num_train_epochs": 1, "save_steps": BREAK}
    quiet: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    for phase in ("before", "after"):
        arguments = TrainingArguments(str(folder), seed=SEED, **options, **quiet)
        callbacks = [Stop()] if phase == "before" else []
        checkpoint = str(folder / f"checkpoint-{BREAK}") if phase == "after" else None
        trainer = Trainer(Reads(phase), arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=checkpoint)


def shuffled(**options: Any) -> Callable[[], Any]:
    """Return a function that creates a loader for shuffled numbers."""
    return lambda: DataLoader(Numbers(), batch_size=BATCH, shuffle=True, **options)


CASES: dict[str, tuple[str, str, Callable[[Path], None], Callable[[Path], None]]] = {
    "order": (
        "Lightning #21938: the first epoch after a resume, loader workers",
        "lightning",
        lambda folder: with_lightning(folder, shuffled(num_workers=1), epochs=2, batches=0),
        lambda folder: with_legato(folder, shuffled(num_workers=1), epochs=2, batches=0),
    ),
    "state": (
        "Lightning #20550, #21765: a loader with state_dict, and estimated_stepping_batches in configure_optimizers",
        "lightning",
        lambda folder: with_lightning(folder, Cursor),
        lambda folder: with_legato(folder, Cursor),
    ),
    "shuffle": (
        "a resume within an epoch, DataLoader(shuffle=True)",
        "lightning",
        lambda folder: with_lightning(folder, shuffled()),
        lambda folder: with_legato(folder, shuffled()),
    ),
    "trainer": (
        "transformers.Trainer: a resume within an epoch, on one process",
        "transformers",
        with_transformers,
        lambda folder: with_legato(folder, shuffled()),
    ),
    "processes": (
        "Accelerate #3938: use_stateful_dataloader on two processes, a resume within an epoch",
        "accelerate",
        lambda folder: with_accelerate(folder, shuffled(), use_seedable_sampler=True),
        lambda folder: with_legato(folder, shuffled(), devices=2),
    ),
    "sampler": (
        "Accelerate #4195: the same in the second epoch, with Accelerate's default sampler",
        "accelerate",
        lambda folder: with_accelerate(folder, shuffled(), epochs=1),
        lambda folder: with_legato(folder, shuffled(), epochs=1, devices=2),
    ),
    "stream": (
        "a stream of `datasets` in torch's DataLoader, a resume within an epoch (datasets #7927)",
        "lightning",
        lambda folder: with_lightning(folder, hub_stream),
        lambda folder: with_legato(folder, hub_stream),
    ),
}
"""Name of each case: its title, the peer, the peer's side and Legato's side."""
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def samples_of(folder: Path, phase: str) -> dict[int, list[int]]:
    """Return the samples that a phase of a run read, by epoch."""
    epochs: dict[int, list[int]] = {}
    for path in sorted(folder.glob(f"{phase}-*")):
        for line in path.read_text().splitlines():
            epoch, number = map(int, line.split())
            epochs.setdefault(epoch, []).append(number)
    return epochs


def verdict(folder: Path) -> tuple[bool, str]:
    """Return whether each sample in the interrupted epoch was read once and in order, and a sentence about it."""
    before, after = samples_of(folder, "before"), samples_of(folder, "after")
    last = max(after or before)
    counts = Counter([*before.get(last, []), *after.get(last, [])])
    twice, never = sum(count - 1 for count in counts.values()), SAMPLES - len(counts)
    if twice or never:
        return False, f"of {SAMPLES} samples {twice} were read twice and {never} never"
    if last and after.get(last) == before[0]:
        return False, f"epoch {last} repeated the order of epoch 0"
    return True, f"each of {SAMPLES} samples was read once"


def run(name: str, side: str) -> tuple[bool, str]:
    """Run one side of a case in its own processes."""
    with tempfile.TemporaryDirectory() as folder:
        begin = TWO_PROCESSES if side == "peer" and CASES[name][1] == "accelerate" else ()
        command = [sys.executable, *begin, "-m", "benchmarks.peer_resumes", name, "--side", side, "--folder", folder]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            return False, f"failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        return verdict(Path(folder))


def main() -> int:
    """Run the cases, and return the number of wrong results from Legato."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*CASES, []], help=", ".join(CASES))
    parser.add_argument("--side", choices=["peer", "legato"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        _, _, peer, legato = CASES[options.names[0]]
        (peer if options.side == "peer" else legato)(options.folder)
        return 0
    wrong = 0
    for name in options.names or CASES:
        title, package, *_ = CASES[name]
        print(f"{name}: {title}", flush=True)
        if find_spec(package) is None or (name == "stream" and find_spec("datasets") is None):
            print(f"  not tried: pip install {package} torchdata datasets", flush=True)
            continue
        print(f"  {package} {metadata.version(package):<14}{run(name, 'peer')[1]}", flush=True)
        right, sentence = run(name, "legato")
        print(f"  {'legato':<{len(package) + 15}}{sentence}", flush=True)
        wrong += not right
    return wrong


if __name__ == "__main__":
    sys.exit(main())
