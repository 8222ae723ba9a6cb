"""Tiny models of each kind, data that draws random numbers, and the runs that train them."""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import legato as lg
from examples.characters import Block, Embedding

WIDTH, VOCABULARY, TIME, CLASSES = 16, 96, 6, 3
STEP_OF_DEATH = 1
"""Number of steps after which rows with a break kill a process: within an epoch, while every rank has a batch."""
POISONED = 3
"""Index of the sample whose loss is NaN in rows with nan=skip."""


class Layer(nn.Module):
    """A residual perceptron with two matrices that tensor parallelism shards."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.dropout(self.outer(F.gelu(self.inner(self.norm(stream)))))


class Recurrent(nn.LSTM):
    """An LSTM that returns only its outputs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, stream: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(stream)[0]


class Mean(nn.Module):
    """Mean of a sequence of vectors over time."""

    def forward(self, stream: Tensor) -> Tensor:
        return stream.mean(1)


def perceptron(dropout: float) -> list[nn.Module]:
    return [nn.Linear(8, WIDTH), Layer(dropout), Layer(dropout), nn.Linear(WIDTH, CLASSES)]


def convolutions(dropout: float) -> list[nn.Module]:
    norm = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return [nn.Conv2d(2, 4, 3), norm, Layer(dropout), nn.Linear(WIDTH, CLASSES)]


def transformer(dropout: float) -> list[nn.Module]:
    blocks = [Block(WIDTH, 4, dropout) for _ in range(2)]
    first = Embedding(VOCABULARY, TIME, WIDTH, 0.0)
    first.dropout = nn.Identity()  # type: ignore[assignment] # a remote module may not have a Dropout, not even of 0
    return [first, *blocks, nn.Linear(WIDTH, VOCABULARY)]


def lstm(dropout: float) -> list[nn.Module]:
    return [nn.Embedding(VOCABULARY, WIDTH), Recurrent(), Layer(dropout), nn.Linear(WIDTH, VOCABULARY)]


def sparse(dropout: float) -> list[nn.Module]:
    first = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, sparse=True), Mean())
    return [first, Layer(dropout), Layer(dropout), nn.Linear(WIDTH, CLASSES)]


def tied(dropout: float) -> list[nn.Module]:
    first, last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    last.weight = first.weight
    nn.init.normal_(first.weight, std=0.3)
    return [first, Layer(dropout), Layer(dropout), last]


def padded(dropout: float) -> list[nn.Module]:
    return [nn.Embedding(VOCABULARY, WIDTH), Layer(dropout), Layer(dropout), nn.Linear(WIDTH, VOCABULARY)]


KINDS: dict[str, tuple[Callable[[float], list[nn.Module]], str]] = {
    "MLP": (perceptron, "vectors"),
    "batch norm CNN": (convolutions, "images"),
    "transformer": (transformer, "text"),
    "LSTM": (lstm, "text"),
    "sparse embedding": (sparse, "words"),
    "tied weights": (tied, "text"),
    "padded batches": (padded, "padded text"),
}
"""Blocks and data for each kind of model."""


class Samples(Dataset[Any]):
    """Samples that are augmented on loading: (inputs, targets, 0 or NaN to add to the loss)."""

    def __init__(self, kind: str, count: int, poisoned: bool = False, noise: bool = True) -> None:
        self.kind, self.count, self.noise = kind, count, noise
        self.poisoned = POISONED if poisoned else -1
        generator = torch.Generator().manual_seed(count)
        shape = {"vectors": (8,), "images": (2, 4, 4)}.get(kind)
        self.inputs = (
            torch.randn(count, *shape, generator=generator)
            if shape
            else torch.randint(1, VOCABULARY, (count, TIME + 1), generator=generator)
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        inputs, spoil = self.inputs[index], torch.tensor(float("nan") if index == self.poisoned else 0.0)
        if inputs.is_floating_point():
            label = torch.tensor(int(inputs.sum() * 10) % CLASSES)
            return (inputs + random.random() * torch.randn(inputs.shape) if self.noise else inputs), label, spoil
        if self.noise:
            inputs = inputs.roll(int(torch.randint(len(inputs), ())))
        if self.kind == "words":
            return inputs, inputs.sum() % CLASSES, spoil
        targets = inputs[1:].clone()
        if self.kind == "padded text":
            targets[1 + index % TIME :] = -100
        return inputs[:-1], targets, spoil


class Stream(IterableDataset[Any]):
    """Samples as an iterable without a length."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


class Langevin(torch.optim.Optimizer):
    """Stochastic gradient Langevin dynamics with a random step size."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Follow the gradients, with added noise."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            scale = 0.01 * (1 + random.random())
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    parameter.add_(torch.randn_like(parameter), alpha=scale)
        return loss


@dataclass(frozen=True)
class Case:
    """A model, its data and an option, for any strategy."""

    kind: str
    option: str
    is_plain: bool = False
    """True: no dropout or augmentation, and complete rounds, so that the batches of replicas can be joined."""
    has_remote: bool = False
    """True if the first block is a remote module, which `ddp_rpc` places on a server."""


class Model(lg.Task):
    """A list of blocks, with the behavior that a row's option requires."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case, self.data_kind = case, KINDS[case.kind][1]
        first, *rest = self._make_blocks()
        if not case.has_remote:
            self.first = first
        self.blocks = nn.ModuleList(rest)
        self.automatic_optimization = case.option != "manual"
        self.killed: Path | None = None
        """File that the process writes before it is killed; None: no process is killed."""

    def _make_blocks(self) -> list[nn.Module]:
        return KINDS[self.case.kind][0](0.0 if self.case.is_plain else 0.2)

    def remote_modules(self) -> dict[str, Callable[[], nn.Module]]:
        return {"first": lambda: self._make_blocks()[0]} if self.case.has_remote else {}

    def configure_blocks(self) -> list[nn.Module]:
        return [self.first, *self.blocks]

    def tensor_plan(self) -> dict[str, str]:
        if self.case.kind == "transformer":
            columns, rows = ("attention.query_key_value", "perceptron.out_of_stream"), ("into_stream",)
            plan = {f"blocks.*.{name}": "column" for name in columns}
            return plan | {
                f"blocks.*.{module}.{name}": "row" for name in rows for module in ("attention", "perceptron")
            }
        return {"blocks.*.inner": "column", "blocks.*.outer": "row"}

    def forward(self, stream: Tensor) -> Tensor:
        for block in self.configure_blocks():
            stream = block(stream)
        return stream

    def loss(self, batch: Any) -> Tensor:
        inputs, targets, spoil = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        return loss + spoil.sum() if self.case.option == "nan=skip" else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._may_die()
        if isinstance(batch, dict):  # two loaders
            batch = [torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True)]
        loss = self.loss(batch)
        kept = (batch[1] >= 0).sum()
        weighted = self.data_kind == "padded text" and self.automatic_optimization
        self.log("loss", loss, on_step=True, on_epoch=True, **({"batch_size": kept} if weighted else {}))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        return {"loss": loss, "weight": kept} if weighted else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weighted = {"batch_size": (batch[1] >= 0).sum()} if self.data_kind == "padded text" else {}
        self.log("val", self.loss(batch), **weighted)

    def _may_die(self) -> None:
        last = self.trainer.world_size - 1
        # with accumulation, an epoch has two steps, and the last rank may have no batch in the second step
        step = STEP_OF_DEATH + (self.case.option == "accumulation")
        if self.killed is None or self.global_step != step or self.trainer.global_rank != last:
            return
        if not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        if self.case.option == "closure":
            return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=3, line_search_fn="strong_wolfe")
        if self.case.option == "noisy optimizer":
            return Langevin(self.parameters(), 0.05)
        if self.case.kind == "sparse embedding":  # Adam does not accept sparse gradients
            optimizer: torch.optim.Optimizer = torch.optim.Adagrad(self.parameters(), 0.05, eps=1e-2)
        else:
            # eps: the gradient of the key bias in attention is pure rounding error, which Adam would amplify
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def make_loader(case: Case, batch_size: int, workers: int) -> Any:
    """Return the loader of a case: 5 or 6 rounds of 4 replicas in 2 epochs, with a short batch at each end."""
    kind = KINDS[case.kind][1]
    # joining batches requires complete rounds of 2, 3 and 4 replicas
    samples = Samples(kind, 24 if case.is_plain else 21, case.option == "nan=skip", not case.is_plain)
    if case.option == "stream":
        return DataLoader(Stream(samples), batch_size)
    if case.option == "weighted sampler":
        sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(len(samples))], len(samples))
        return DataLoader(samples, batch_size, sampler=sampler)
    first = DataLoader(samples, batch_size, shuffle=True, num_workers=workers)
    if case.option == "two loaders":
        second = DataLoader(Samples(kind, 15, noise=not case.is_plain), batch_size, shuffle=True)
        return lg.CombinedLoader({"a": first, "b": second}, mode="max_size_cycle")
    return first


OPTIONS: dict[str, dict[str, Any]] = {
    "-": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.1},
    "compile": {"compile": {"blocks": ["Layer", "Block"], "backend": "aot_eager"}},
    "recomputing": {"activation_checkpointing": ["Layer", "Block"]},
    "sync_batchnorm": {"sync_batchnorm": True},
    "EMA": {},
    "workers": {},
    "weighted sampler": {},
    "stream": {},
    "two loaders": {},
    "manual": {},
    "closure": {},
    "nan=skip": {"nan": "skip"},
    "noisy optimizer": {},
}
"""Trainer arguments for each option. Model and `make_loader` implement the rest of an option."""


def fit(
    case: Case,
    root: Path,
    options: dict[str, Any],
    *,
    batch_size: int = 2,
    workers: int = 0,
    kill: bool = False,
    resume: bool = False,
) -> Path:
    """Train or resume a case below `root`, and return the run directory. With `kill`, one process kills itself."""
    task = Model(case)
    task.killed = root / "killed" if kill else None
    chosen = dict(OPTIONS[case.option])
    present = [name for name in ("Layer", "Block") if any(type(module).__name__ == name for module in task.modules())]
    if "activation_checkpointing" in chosen:
        chosen["activation_checkpointing"] = present
    if "compile" in chosen:
        chosen["compile"] = {**chosen["compile"], "blocks": present}
    callbacks: list[lg.Callback] = [lg.callbacks.Checkpoint(every_n_train_steps=1)]
    if case.option == "EMA":
        callbacks.append(lg.callbacks.ExponentialMovingAverage(decay=0.7))
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer = lg.Trainer(
        **{**quiet, **chosen, **options},
        accelerator="cpu",
        threads=1,
        max_epochs=2,
        num_sanity_val_steps=0,
        default_root_dir=root,
        logger=lg.loggers.JSONLinesLogger(),
        callbacks=callbacks,
        save_code=False,
    )
    loaders = make_loader(case, batch_size, workers), make_validation(case)
    trainer.fit(task, *loaders, resume="auto" if resume else None)
    assert trainer.run_dir is not None
    return Path(trainer.run_dir)


def make_validation(case: Case) -> DataLoader[Any]:
    """Return the validation loader: 11 samples, with a short last batch."""
    return DataLoader(Samples(KINDS[case.kind][1], 11, noise=not case.is_plain), 4)
