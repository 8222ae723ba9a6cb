"""Bytes of weights, gradients and optimizer state that each process holds between steps, by strategy.

Run: python -m benchmarks.memory [--processes 4] [--steps 6]
The model is the character GPT of examples/characters.py with AdamW. The result is the size of a process's own shards,
computed from tensor sizes, as the maximum over processes. It is not the memory use of the process, where a few MiB of
weights would not be visible. The step time is the median on this machine's CPU, whose cores all processes share.
"""

import argparse
import time
from statistics import median

import torch
from torch.utils.data import DataLoader, TensorDataset

import legato as lg
from examples.characters import ALPHABET, CharacterGPT
from legato.base.tensors import local_part
from legato.trainer.processes.launch import run_workers

LAYOUTS = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": {"name": "fsdp", "shard_blocks": ["Block"]},
    "mesh, data 2 x shard 2": {"name": "mesh", "data": 2, "shard": "auto", "shard_blocks": ["Block"]},
    "mesh, tensor 4": {"name": "mesh", "tensor": "auto"},
    "mesh, shard 2 x tensor 2": {"name": "mesh", "shard": 2, "tensor": "auto", "shard_blocks": ["Block"]},
    "mesh, data 2 x tensor 2": {"name": "mesh", "data": 2, "tensor": "auto"},
    "mesh, pipeline 4": {"name": "mesh", "pipeline": "auto"},
    "mesh, pipeline 2 x data 2": {"name": "mesh", "pipeline": 2, "data": "auto"},
    "mesh, pipeline 2 x shard 2": {"name": "mesh", "pipeline": 2, "shard": "auto", "shard_blocks": ["Block"]},
    "mesh, pipeline 2 x tensor 2": {"name": "mesh", "pipeline": 2, "tensor": "auto"},
}


def local_bytes(tensors):
    """Return the size in bytes of the tensors that this rank holds."""
    shards = map(local_part, tensors)  # a tensor that belongs to another pipeline stage is stored as one element
    return sum(min(shard.nbytes, shard.untyped_storage().nbytes()) for shard in shards)


class Counts(lg.Callback):
    """Counts this process's bytes after each step."""

    def __init__(self) -> None:
        self.bytes = (0, 0, 0)
        self.moments: list[float] = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        parameters = list(task.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        optimizer = getattr(trainer.optimizers[0], "optim", trainer.optimizers[0])  # zero1's optimizer shard
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        self.bytes = local_bytes(parameters), local_bytes(gradients), local_bytes(states)
        self.moments.append(time.perf_counter())


def measure(strategy, processes: int, steps: int) -> tuple[list[int], float]:
    """Return the largest number of bytes of each kind in any process, and the seconds per step."""
    counts = Counts()
    windows = torch.randint(0, len(ALPHABET), (16 * steps, 65), generator=torch.Generator().manual_seed(1))
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"max_steps": steps, "replicas": 4, "accelerator": "cpu", "callbacks": [counts]}
    trainer = lg.Trainer(**options, devices=processes, strategy=strategy)
    trainer.fit(CharacterGPT(block_size=64), DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), 4))
    seconds = [after - before for before, after in zip(counts.moments[2:], counts.moments[3:], strict=False)]
    return torch.tensor(trainer.strategy.collectives.gather_objects(counts.bytes)).amax(dim=0).tolist(), median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    def work():
        torch.set_num_threads(1)
        return {name: measure(layout, options.processes, options.steps) for name, layout in LAYOUTS.items()}

    torch.set_num_threads(1)
    rows = {"single": measure("single", 1, options.steps), **run_workers(work, options.processes)}
    print(f"{'':28}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'together':>10}  MB       ms a step")
    for name, (kinds, seconds) in rows.items():
        weights, gradients, states = (count / 1e6 for count in kinds)
        together = weights + gradients + states
        print(f"{name:28}{weights:9.2f}{gradients:11.2f}{states:11.2f}{together:10.2f}{1000 * seconds:18.0f}")


if __name__ == "__main__":
    main()
