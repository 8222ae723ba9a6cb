"""Cost of `tensor_shards`: a step with logical shards relative to one that torch shards along the tensor axis.

Run: python -m benchmarks.tensor_bits [--processes 2] [--rounds 3] [--steps 6] [--clip]

The same 25-million-parameter GPT is trained on the same processes in turn: sharded along the tensor axis with
`reproducible: order`, and under `bitwise` with one, two or four shards, if that number is divisible by the number of
processes. With --clip, gradients are clipped by their norm, for which `bitwise` gathers each gradient. `wall` is the
minimum time of a step; `CPU` is the median CPU time of all threads in process 0, which is less affected by other load.
"""

import argparse
import statistics
from datetime import timedelta
from functools import partial

import torch
from torch.utils.data import DataLoader

import legato as lg
from benchmarks.bitwise import GPT, Clock, Times, Tokens
from legato.base.place import find_place
from legato.trainer.processes.launch import run_workers
from legato.trainer.processes.rendezvous import join_process_group, leave_process_group

SHARDS = (1, 2, 4)


class Sliced(GPT):
    """The same model with an optimizer that updates parameters one by one."""

    fused = False


def train(shards: int | None, processes: int, steps: int, clip: bool) -> Times:
    """Train for `steps` steps in this process, as one of `processes`."""
    torch.manual_seed(0)
    task, clock = Sliced(), Clock()
    trainer = lg.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy={"name": "mesh", "tensor": processes, "tensor_shards": shards},
        gradient_clip_val=1.0 if clip else None,
        devices=processes,
        reproducible="order" if shards is None else "bitwise",
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(Tokens(steps * task.batch_size), task.batch_size))
    return clock.steps()


def compare(processes: int, rounds: int, steps: int, clip: bool) -> dict[int | None, Times]:
    """Run the contestants in turn in every process."""
    place = find_place()
    if place is not None and processes > 1:
        join_process_group(place, "gloo", timedelta(minutes=5))
    contestants = [None, *(shards for shards in SHARDS if shards % processes == 0)]
    times: dict[int | None, Times] = {shards: [] for shards in contestants}
    for _ in range(rounds):
        for shards in contestants:
            times[shards] += train(shards, processes, steps, clip)
    leave_process_group()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--clip", action="store_true")
    options = parser.parse_args()
    times = run_workers(
        partial(compare, options.processes, options.rounds, options.steps, options.clip), options.processes, threads=1
    )
    least = {shards: min(wall for wall, _ in figures) for shards, figures in times.items()}
    middle = {shards: statistics.median(cpu for _, cpu in figures) for shards, figures in times.items()}
    print(f"{'':12}{'wall ms':>10}{'CPU ms':>10}{'wall/order':>12}{'CPU/order':>12}")
    for shards in times:
        name = "order" if shards is None else f"{shards} shard{'s' if shards > 1 else ''}"
        ratios = f"{least[shards] / least[None]:12.3f}{middle[shards] / middle[None]:12.3f}"
        print(f"{name:12}{least[shards] * 1e3:10.1f}{middle[shards] * 1e3:10.1f}{ratios}")


if __name__ == "__main__":
    main()
