"""Cost of `reproducible: bitwise` on two processes: step time, and bytes that its tree reduction sends.

Run: python -m benchmarks.bitwise [--rounds 6] [--steps 6] [--workloads gpt mlp "gpt x 4"] [--strategy fsdp]

Three contestants train the same model on the same processes in turn (A B C, A B C, ...), so any other load affects all
of them equally: a hand-written loop with DistributedDataParallel, Legato with `reproducible: order` (also DDP), and
Legato with `bitwise` (its own reduction). `wall` is the minimum over steps; `CPU` is the median CPU time of all threads
in a process, which is less affected by other load.

gpt: 25 million parameters, 512 tokens per replica; mostly arithmetic. mlp: the same number of parameters, 4 samples per
replica; almost entirely communication. gpt x 4: four replicas on the two processes. If you pass a strategy other than
ddp, `order` and `bitwise` use it and clip gradients by norm.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import legato as lg
from examples.characters import ALPHABET, CharacterGPT
from legato.base.place import find_place
from legato.trainer.data.sampling import Layout
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.rendezvous import join_process_group, leave_process_group
from legato.trainer.strategies import tree
from legato.trainer.strategies.tree import GradientTree

PROCESSES = 2
CONTESTANTS = ("hand", "order", "bitwise")
WORKLOADS = {"gpt": ("gpt", 2), "mlp": ("mlp", 2), "gpt x 4": ("gpt", 4)}
LAYOUTS = [(2, 2), (4, 2), (8, 2), (3, 3), (8, 3), (4, 4), (8, 4)]
"""Numbers of replicas and processes for which bytes are counted."""

Times = list[tuple[float, float]]
"""Wall and CPU seconds of each step."""


class Tokens(Dataset[Any]):
    """Random characters, drawn on access."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(len(ALPHABET), (65,))
        return tokens[:-1], tokens[1:]


class Vectors(Tokens):
    """Random vectors."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2048), torch.randn(2048)


class GPT(CharacterGPT):
    """25 million parameters."""

    data, batch_size, fused = Tokens, 8, True

    def __init__(self) -> None:
        super().__init__(n_layer=8, n_head=8, n_embd=512, block_size=64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=self.fused)


class MLP(lg.Task):
    """25 million parameters with little arithmetic."""

    data, batch_size = Vectors, 4

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class Loss(nn.Module):
    """Module that contains the loss, so that DDP sees the call."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Any:
        return self.task.loss(batch)


class Clock(lg.Callback):
    """Reads the clocks at the beginning of each step."""

    def __init__(self) -> None:
        self.marks: Times = []
        self.step = -1

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.read()

    def read(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    def steps(self) -> Times:
        """Return the times of all steps except the first, which allocates memory."""
        pairs = zip(self.marks[1:], self.marks[2:], strict=False)
        return [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairs]


def train(contestant: str, kind: str, replicas: int, steps: int, strategy: str) -> Times:
    """Train for `steps` steps in this process, as one of PROCESSES."""
    torch.manual_seed(0)
    task: Any = {"gpt": GPT, "mlp": MLP}[kind]()
    task.fused = strategy != "fsdp"  # under fsdp, a fused optimizer rounds the end of a shard differently
    data, clock = task.data(steps * replicas * task.batch_size), Clock()
    if contestant == "hand":
        train_by_hand(task, data, replicas // PROCESSES, clock)
        return clock.steps()
    trainer = lg.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=strategy,
        gradient_clip_val=None if strategy == "ddp" else 1.0,
        devices=PROCESSES,
        replicas=replicas,
        reproducible=contestant,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(data, task.batch_size, shuffle=True))
    return clock.steps()


def train_by_hand(task: Any, data: Dataset[Any], turns: int, clock: Clock) -> None:
    """Train in a hand-written loop with `turns` micro-batches per step."""
    model, optimizer = nn.parallel.DistributedDataParallel(Loss(task)), task.configure_optimizers()
    batches = iter(DataLoader(data, task.batch_size, sampler=DistributedSampler(data)))
    for first in batches:
        clock.read()
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(turns - 1):
                (model(first) / turns).backward()
                first = next(batches)
        (model(first) / turns).backward()
        optimizer.step()


def compare(rounds: int, steps: int, workloads: Sequence[str], strategy: str) -> dict[str, dict[str, Times]]:
    """Run the contestants in turn in every process."""
    place = find_place()
    assert place is not None
    join_process_group(place, "gloo", timedelta(minutes=5))
    times: dict[str, dict[str, Times]] = {name: {contestant: [] for contestant in CONTESTANTS} for name in workloads}
    for _ in range(rounds):
        for name in workloads:
            for contestant in CONTESTANTS:
                times[name][contestant] += train(contestant, *WORKLOADS[name], steps, strategy)
    leave_process_group()
    return times


# --- bytes ----------------------------------------------------------------------------------------------------------


def count_bytes(numbers: int, processes: int) -> dict[tuple[int, int], float]:
    """Return the average number of bytes sent between processes per step, for each layout."""
    place = find_place()
    assert place is not None
    join_process_group(place, "gloo", timedelta(minutes=1))
    sent_bytes = {}
    for replicas, width in LAYOUTS:
        if width == processes:
            parameter = nn.Parameter(torch.zeros(numbers))
            tree = GradientTree([parameter], Layout(replicas, processes), place.rank)
            for replica in Layout(replicas, processes).owned(place.rank):
                tree.begin_replica(replica)
                parameter.grad = torch.ones(numbers)
            with counted() as sent:
                tree.finish()
            total = torch.tensor(float(sum(sent)))
            dist.all_reduce(total)
            sent_bytes[replicas, processes] = total.item() / processes
    leave_process_group()
    return sent_bytes


class counted:
    """Within this context, count the bytes that this process sends in the tree's collectives."""

    def __enter__(self) -> list[int]:
        sent: list[int] = []
        self.before = dist.all_to_all_single, tree.all_gather_single
        world, rank = dist.get_world_size(), dist.get_rank()

        def all_to_all(output: Tensor, input: Tensor, to_receive: Any, to_send: Any, **options: Any) -> Any:
            sent.append((sum(to_send) - to_send[rank]) * input.element_size())
            return self.before[0](output, input, to_receive, to_send, **options)

        def all_gather(output: Tensor, input: Tensor, **options: Any) -> Any:
            sent.append(input.nbytes * (world - 1))
            return self.before[1](output, input, **options)

        dist.all_to_all_single, tree.all_gather_single = all_to_all, all_gather  # type: ignore[assignment]
        return sent

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, tree.all_gather_single = self.before  # type: ignore[assignment]


def lines_of(workloads: dict[str, dict[str, Times]]) -> Iterator[str]:
    """Return the table of step times."""
    titles = (("wall ms", 9), ("CPU ms", 9), ("wall/order", 12), ("CPU/order", 11), ("wall/hand", 11), ("CPU/hand", 10))
    yield " " * 20 + "".join(title.rjust(width) for title, width in titles)
    for name, contestants in workloads.items():
        least = {label: min(wall for wall, _ in times) for label, times in contestants.items()}
        middle = {label: statistics.median(cpu for _, cpu in times) for label, times in contestants.items()}
        for label in CONTESTANTS:
            ratios = [figures[label] / figures[base] for base in ("order", "hand") for figures in (least, middle)]
            times = f"{least[label] * 1e3:9.1f}{middle[label] * 1e3:9.1f}"
            yield f"{name:10}{label:10}{times}{ratios[0]:12.3f}{ratios[1]:11.3f}{ratios[2]:11.3f}{ratios[3]:10.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "zero1", "fsdp", "ddp_model_parallel"])
    options = parser.parse_args()
    work = partial(compare, options.rounds, options.steps, options.workloads, options.strategy)
    for line in lines_of(run_workers(work, PROCESSES, threads=1)):
        print(line)
    if options.strategy != "ddp":
        return
    numbers = 1_000_000
    print("\nMB sent per process and step for each million float32 elements; a ring sends 2 V (W - 1) / W")
    print(f"{'replicas':>9}{'processes':>11}{'tree':>8}{'ring':>8}")
    for processes in sorted({processes for _, processes in LAYOUTS}):
        counts = run_workers(partial(count_bytes, numbers, processes), processes, threads=1)
        for (replicas, _), sent in counts.items():
            ring = 2 * 4 * numbers * (processes - 1) / processes
            print(f"{replicas:9}{processes:11}{sent / 1e6:8.2f}{ring / 1e6:8.2f}")


if __name__ == "__main__":
    main()
