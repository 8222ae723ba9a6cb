"""`legato compare --bits`: finds the first step, tensor and operation at which two runs differ."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import ConfigError
from ..base.tensors import local_part
from ..callbacks.callback import Callback, MonitoringCallback
from ..trainer.checkpoints import reading
from ..trainer.checkpoints.codec import flatten
from .history import CheckpointRecord, StudiedRun
from .operations import Operations, different_operation, read_operations
from .replay_steps import Replayed, read_lines, replay_steps
from .watchers import StopAfterStep, gradients_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

KINDS_OF_TENSORS = ("weights", "gradients", "optimizer")
"""Kinds of tensors, in the order of comparison."""
DIGESTS = "tensors.jsonl"


class TensorDigests(MonitoringCallback):
    """Writes digests of all weights, gradients and optimizer states after each step, starting with step `first`.

    Weights are in `named_parameters` order. Gradient digests are computed before clipping.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._gradients: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "Optimizer") -> None:
        """Compute the digests of the gradients."""
        self._gradients |= {name: digest_of(gradient) for name, gradient in gradients_of(task, optimizer)}

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Write the digests of a step."""
        gradients, self._gradients = self._gradients, {}
        if trainer.global_step < self.first or trainer.run_dir is None:
            return
        name_of = {id(parameter): name for name, parameter in task.named_parameters()}
        states = {
            f"{number}.{name_of.get(id(parameter), '?')}.{key}": digest_of(value)
            for number, optimizer in enumerate(trainer.optimizers)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        weights = {name: digest_of(value) for name, value in (*task.named_parameters(), *task.named_buffers())}
        record = {"step": trainer.global_step, "weights": weights, "gradients": gradients, "optimizer": states}
        with (trainer.run_dir / DIGESTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's shape, dtype and bytes."""
    # a replay has one rank, so the local shard is the full tensor
    value = local_part(tensor).detach().cpu().contiguous()
    digest = hashlib.sha1(f"{tuple(value.shape)} {value.dtype} ".encode())
    # as bytes, so that -0.0 differs from 0.0 and a NaN equals itself
    digest.update(value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def first_difference(first_run: StudiedRun, second_run: StudiedRun) -> Iterator[str]:
    """Yield lines that describe the first difference between two runs.

    The function bisects the steps at which both runs have a checkpoint. It then recomputes only the steps between the
    last matching checkpoint and the first differing one.

    Raises ConfigError if a run has no completed step, and CheckpointError if a checkpoint is damaged.
    """
    last = min(first_run.last_step, second_run.last_step)
    if last < 1:
        raise ConfigError("--bits compares the steps of two runs, but one of them has not completed a step yet.")
    # each comparison reads two complete checkpoints, so compare only log2(n) of them
    ours, theirs = ({record.step: record for record in history.checkpoints} for history in (first_run, second_run))
    shared = sorted(step for step in ours.keys() & theirs.keys() if step <= last)
    count = bisect_left(shared, True, key=lambda step: not is_same(ours[step], theirs[step]))
    # bisection assumes that runs stay different once they differ
    begin = shared[count - 1] if count else 0
    end = shared[count] if count < len(shared) else last
    if begin == last:
        yield f"The checkpoints are bitwise identical up to step {last:,}."
        return
    steps, notes = list[dict[int, Any]](), list[str]()
    for history in (first_run, second_run):
        with watched(history, (begin + 1, end), TensorDigests(begin + 1)) as replayed:
            # the code may have changed since the run
            if not replayed.holds:
                notes.append(f"A replay of {history.directory} no longer matches the run: {replayed.describe()}.")
            steps.append({record["step"]: record for record in read_lines(replayed.directory / DIGESTS)})
    first = next((step for step in range(begin + 1, end + 1) if steps[0].get(step) != steps[1].get(step)), None)
    if first is None:
        yield f"The runs are bitwise identical up to step {end:,}, both in its checkpoint and when recomputed."
    else:
        yield f"The runs first differ at step {first:,}."
        for kind in KINDS_OF_TENSORS:
            before, after = (each.get(first, {}).get(kind, {}) for each in steps)
            names = [name for name in before | after if before.get(name) != after.get(name)]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"  {kind:<10}{names[0] + more if names else 'the same'}"
        texts = []
        for history in (first_run, second_run):
            with watched(history, (first, first), Operations(first)) as replayed:
                texts.append(read_operations(replayed.directory))
        yield from different_operation(texts)
    yield from notes


@contextmanager
def watched(history: StudiedRun, steps: tuple[int, int], watcher: Callback) -> Iterator[Replayed]:
    """Replay steps of a run with a watcher, in a temporary folder that is deleted when the context exits."""
    with TemporaryDirectory() as folder:
        yield replay_steps(history, history.make(*steps)(), steps, Path(folder), [watcher, StopAfterStep(steps[1])])


def is_same(our_record: CheckpointRecord, their_record: CheckpointRecord) -> bool:
    """Return whether two checkpoints contain the same weights and optimizer states."""
    contents = (reading.read_checkpoint(record.path) for record in (our_record, their_record))
    first, second = (leaves({key: each[key] for key in ("state_dict", "optimizer_states")}) for each in contents)
    return first == second


def leaves(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and strings in nested values, keyed by dotted name. Tensors become ("tensor", digest)."""
    flat = flatten(contents)
    values = {name: ("tensor", digest_of(each)) for named in flat.tensors.values() for name, each in named.items()}
    rest: list[tuple[str, Any]] = [("", flat.tree)]
    while rest:
        above, tree = rest.pop()
        if isinstance(tree, (dict, list)):
            items = enumerate(tree) if isinstance(tree, list) else tree.items()
            rest += [(f"{above}.{key}".lstrip("."), value) for key, value in items]
        else:
            values[above] = tree
    return values
