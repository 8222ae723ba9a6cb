"""`legato compare --bits`: the first step at which two runs differ, and the first tensor there."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import CheckpointError, ConfigError
from ..base.torch_private import local_part
from ..callbacks.callback import Callback
from ..trainer.checkpoints import find, reading
from ..trainer.checkpoints.manifest import MODEL_FILE, TENSORS_FILE, load_manifest
from ..trainer.optimization.optimizers import optimizer_parameters
from .history import CheckpointRecord, RunHistory
from .replay import Make, read_lines, replay_steps
from .watchers import StopAfterStep

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

KINDS_OF_TENSORS = ("weights", "gradients", "optimizer")
"""Kinds in the order of comparison: the weights after a step, its gradients, the optimizer's state after it."""
DIGESTS = "tensors.jsonl"


class TensorDigests(Callback):
    """Writes a digest of each weight, gradient and state of an optimizer in each step from `first` on.

    Weights are in the order of `named_parameters`. Gradients are those before clipping.
    """

    after_every_step = True

    def __init__(self, first: int) -> None:
        self.first = first
        self._gradients: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "Optimizer") -> None:
        """Take the digests of the gradients."""
        stepped = set(map(id, optimizer_parameters(optimizer)))
        for name, parameter in task.named_parameters():
            if id(parameter) in stepped and parameter.grad is not None:
                self._gradients[name] = digest_of(parameter.grad)

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the digests of a complete step."""
        if trainer.metrics.step == trainer.global_step:
            return
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
    value = local_part(tensor).detach().cpu().contiguous()
    found = hashlib.sha1(f"{tuple(value.shape)} {value.dtype} ".encode())
    found.update(value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return found.hexdigest()


@dataclass
class FirstDifference:
    """First difference of two runs."""

    step: int | None
    """None: they do not, as far as both go."""
    until: int
    """The last step that was compared."""
    tensors: dict[str, list[str]] = field(default_factory=dict)
    """The tensors that differ after that step, by kind; of each kind the first one first."""
    notes: list[str] = field(default_factory=list)

    def describe(self) -> Iterator[str]:
        """Yield the lines that tell it."""
        if self.step is None:
            yield f"Every bit is the same up to step {self.until:,}."
        else:
            yield f"The first step at which they differ is {self.step:,}."
            for kind in KINDS_OF_TENSORS:
                names = self.tensors.get(kind, [])
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield f"  {kind:<10}{names[0] + more if names else 'the same'}"
        yield from self.notes


def first_difference(
    one: RunHistory, other: RunHistory, makes: Sequence[Callable[[int, int], Make]]
) -> FirstDifference:
    """Return the first difference of two runs: the checkpoints that both have are searched by bisection, and only the
    steps between the last same and the first different one are computed again.

    makes: of each run, returns what makes trainer, task and data to replay some steps, the first and the last.

    Raises ConfigError where a run has no step yet.
    """
    last = min(one.last_step, other.last_step)
    if last < 1:
        raise ConfigError("--bits compares steps of two runs; one of them has none yet.")
    compared = list[str]()
    begin, end = bracket(one, other, last, compared)
    if begin == last:
        return FirstDifference(None, last, {}, compared)
    records, notes = [], list[str]()
    for history, make in zip((one, other), makes, strict=True):
        with TemporaryDirectory() as folder:
            watchers = [TensorDigests(begin + 1), StopAfterStep(end)]
            made = make(begin + 1, end)()
            comparison = replay_steps(history, made, (begin + 1, end), Path(folder), watchers).comparison()
            if not comparison.holds:
                notes.append(f"{history.directory} is not what its config gives today: {comparison.describe()}.")
            records.append({record["step"]: record for record in read_lines(Path(folder) / DIGESTS)})
    for step in range(begin + 1, end + 1):
        tensors = differing(records[0].get(step, {}), records[1].get(step, {}))
        if tensors:
            return FirstDifference(step, end, tensors, [*compared, *notes])
    if not notes:
        notes.append(f"Computed again, both have the same bits up to step {end:,}.")
    return FirstDifference(None, end, {}, [*compared, *notes])


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the tensors that differ between two steps, by kind."""
    found = {}
    for kind in KINDS_OF_TENSORS:
        first, second = one.get(kind, {}), other.get(kind, {})
        names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
        if names:
            found[kind] = names
    return found


def bracket(one: RunHistory, other: RunHistory, last: int, notes: list[str]) -> tuple[int, int]:
    """Return the newest step at which both are known to be the same, and the oldest at which they may differ.

    Damaged checkpoints are taken out of the histories; they, and the steps that were compared, are added to `notes`.
    """
    compared = set[int]()
    while True:
        ours, theirs = ({record.step: record for record in history.checkpoints} for history in (one, other))
        shared = sorted(step for step in ours.keys() & theirs.keys() if step <= last)
        low, high = -1, len(shared)
        while high - low > 1:
            middle = (low + high) // 2
            pair = ours[shared[middle]], theirs[shared[middle]]
            if drop_damaged((one, other), pair, notes):
                break
            compared.add(shared[middle])
            if is_same(*pair):
                low = middle
            else:
                high = middle
        else:
            break
    steps = ", ".join(f"{step:,}" for step in sorted(compared)) or "none"
    notes.insert(0, f"Steps whose checkpoints were compared by their files: {steps}.")
    return (shared[low] if low >= 0 else 0), (shared[high] if high < len(shared) else last)


def drop_damaged(histories: Sequence[RunHistory], records: Sequence[CheckpointRecord], notes: list[str]) -> bool:
    """Take checkpoints whose files are not those of their manifests out of the histories; return whether any was."""
    before = len(notes)
    for history, record in zip(histories, records, strict=True):
        try:
            find.verify(record.path)
        except CheckpointError as error:
            notes.append(f"Passed over, as it is damaged: {error}")
            history.checkpoints.remove(record)
    return len(notes) > before


def is_same(one: CheckpointRecord, other: CheckpointRecord) -> bool:
    """Return whether two verified checkpoints hold the same weights and optimizer states."""
    files = [load_manifest(record.path).files for record in (one, other)]
    if files[0].keys() == files[1].keys() and all(
        files[0][name] == files[1][name] for name in files[0] if name != "state.json"
    ):
        assert {MODEL_FILE, TENSORS_FILE} <= files[0].keys()
        return True
    contents = [reading.read_checkpoint(record.path) for record in (one, other)]
    return all(same_tensors(contents[0][key], contents[1][key]) for key in ("state_dict", "optimizer_states"))


def same_tensors(one: Any, other: Any) -> bool:
    """Return whether two nested values hold the same bits."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and digest_of(one) == digest_of(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_tensors(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_tensors, one, other))
    return bool(one == other)
