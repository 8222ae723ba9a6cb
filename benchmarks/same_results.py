"""Compares two versions of the code bitwise: trains configs and computes a digest of each result.

    python -m benchmarks.same_results before.json --keep FOLDER      train, write the digests, keep the checkpoints
    python -m benchmarks.same_results after.json --against before.json --take FOLDER
                                                                     do the same in another version, print differences

Digests cover the final weights, the optimizer states, each logged series and the checkpoint names. With `--take`, each
run is also resumed from the checkpoint that the other version saved in the middle of the run. The exit code is the
number of configs that differ. This file uses only public names, so that it runs in both versions.
"""

import argparse
import hashlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import legato as lg

STEPS = 6
"""Step of the checkpoint that the other version resumes from."""


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Dropout(dropout),
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.drop(self.outer(F.gelu(self.inner(self.norm(stream)))))


class Blocks(lg.Task):
    """A residual stack whose blocks can be sharded and split."""

    def __init__(self, width: int = 16, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.last = nn.Linear(width, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        for layer in self.layers:
            stream = layer(stream)
        return self.last(stream)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), "interval": "step"}]

    def configure_blocks(self) -> list[nn.Module]:
        return [self.first, *self.layers, self.last]

    def tensor_plan(self) -> dict[str, str]:
        return {"layers.*.inner": "split", "layers.*.outer": "gather"}


class BatchNorm(Blocks):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(inputs))

    def configure_blocks(self) -> list[nn.Module]:
        return [nn.Sequential(self.norm, self.first), *self.layers, self.last]


class Manual(Blocks):
    """A task with manual optimization and two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = F.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("train/loss", loss)

    def configure_optimizers(self) -> Any:
        half = [*self.first.parameters(), *self.layers.parameters()]
        return torch.optim.SGD(half, lr=0.05, momentum=0.9), torch.optim.Adam(self.last.parameters(), lr=1e-2)


class LineSearch(Blocks):
    """A task whose optimizer evaluates the loss several times per step."""

    def __init__(self) -> None:
        super().__init__(layers=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class Stream(IterableDataset[Any]):
    """An iterable dataset without a length."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter([self.data[index] for index in range(len(self.data))])


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) * 2).long() % 3)


def loader(samples: int = 68, **options: Any) -> DataLoader[Any]:
    return DataLoader(make_data(samples), **{"batch_size": 4, "shuffle": True, **options})


CONFIGS: dict[str, tuple[Callable[[], lg.Task], Callable[[], Any], dict[str, Any]]] = {
    "one device": (Blocks, loader, {"strategy": "single", "gradient_clip_val": 0.5}),
    "replicas in turn, bitwise": (BatchNorm, loader, {"strategy": "single", "replicas": 3, "reproducible": "bitwise"}),
    "ddp": (BatchNorm, loader, {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2}),
    "ddp, bitwise": (
        BatchNorm,
        lambda: loader(num_workers=1),
        {"strategy": "ddp", "devices": 2, "replicas": 4, "reproducible": "bitwise"},
    ),
    "zero1": (Blocks, loader, {"strategy": "zero1", "devices": 2}),
    "fsdp": (Blocks, loader, {"strategy": "fsdp", "devices": 2}),
    "pipeline": (
        lambda: Blocks(dropout=0.0),
        loader,
        {"strategy": lg.strategies.PipelineMeshStrategy(pipeline=2), "devices": 2},
    ),
    "manual optimization": (Manual, loader, {"strategy": "ddp", "devices": 2}),
    "a stream": (Blocks, lambda: DataLoader(Stream(make_data(50)), batch_size=4), {"strategy": "ddp", "devices": 2}),
    "elastic": (
        BatchNorm,
        loader,
        {"strategy": lg.strategies.DDPStrategy(elastic=True), "devices": 2, "precision": "bf16-mixed"},
    ),
    "ddp, bitwise, 3 processes": (
        BatchNorm,
        loader,
        {"strategy": "ddp", "devices": 3, "reproducible": "bitwise"},
    ),
    "LBFGS": (LineSearch, loader, {"strategy": "single", "accumulate_grad_batches": 2}),
    # the checkpoint of step 6 is saved before the validation of that step
    "resumed within a validation": (Blocks, loader, {"strategy": "ddp", "devices": 2, "val_check_interval": STEPS}),
}


def digest(values: Any) -> str:
    """Return a digest of the exact bits of nested values and tensors."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                hashed.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            hashed.update(repr(value).encode())

    add(values)
    return hashed.hexdigest()[:16]


def logged_values(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key.split("/")[0] not in ("time", "throughput")} for line in lines
    ]


def tensors_of(folder: Path) -> list[str]:
    """Return a digest of each tensor in a checkpoint's files. The tensors' names differ between versions."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return sorted(digest({"": value}) for path in files for value in load_file(path).values())


def train(name: str, root: Path, resume: Path | None = None) -> dict[str, str]:
    """Train a config, and return the digests of its results."""
    make, data, options = CONFIGS[name]
    checkpoint = lg.callbacks.Checkpoint(every_n_train_steps=STEPS, save_top_k=-1)
    trainer = lg.Trainer(
        **options,
        accelerator="cpu",
        max_epochs=2,
        seed=3,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        default_root_dir=root,
        logger=lg.loggers.JSONLinesLogger(),
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = make()
    trainer.fit(task, data(), DataLoader(make_data(22), batch_size=4), resume=resume)
    run_dir = Path(trainer.run_dir or "")
    saved = sorted((run_dir / "checkpoints").glob("step-*"))
    digests = {"weights": digest(task.state_dict()), "checkpoint": digest(tensors_of(saved[-1]))}
    if resume is None:
        points = logged_values(run_dir)
        for series in sorted({series for point in points for series in point} - {"step"}):
            digests[f"logged {series}"] = digest(
                [(point["step"], point[series]) for point in points if series in point]
            )
        digests["names"] = digest([path.name for path in saved])
    return digests


def main() -> int:
    """Run the command, and return the number of configs that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="the digests of another version")
    parser.add_argument("--keep", type=Path, help="folder for the middle checkpoint of each run")
    parser.add_argument(
        "--take", type=Path, help="folder with the checkpoints of another version, from which each run is also resumed"
    )
    options = parser.parse_args()
    logging.getLogger("legato").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    digests: dict[str, dict[str, str]] = {}
    for index, name in enumerate(CONFIGS):
        with tempfile.TemporaryDirectory() as root:
            digests[name] = train(name, Path(root))
            middle = next(Path(root).rglob(f"step-{STEPS:08d}"))
            if options.keep:
                shutil.copytree(middle, options.keep / str(index), dirs_exist_ok=True)
            digests[name] |= {
                f"resumed {key}": value
                for key, value in train(
                    name, Path(root) / "again", options.take / str(index) if options.take else middle
                ).items()
            }
        print(f"{name:<28}{digests[name]}", flush=True)
    options.out.write_text(json.dumps(digests, indent=2) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    differing = {
        name: [key for key in before[name] | digests[name] if before[name].get(key) != digests[name].get(key)]
        for name in digests
    }
    differing = {name: keys for name, keys in differing.items() if keys}
    print(
        f"{len(digests) - len(differing)} of {len(digests)} configs have equal bits"
        + "".join(f"\n{name}: {keys}" for name, keys in differing.items())
    )
    return len(differing)


if __name__ == "__main__":
    sys.exit(main())
