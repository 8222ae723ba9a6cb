"""Test helper that checks whether a custom strategy obeys the rules that the loop, checkpoints and metrics rely on."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ..base.errors import HangError
from ..base.place import find_place
from ..callbacks.callback import Callback
from ..tasks.task import Task
from ..trainer.processes.launch import run_workers
from ..trainer.processes.rendezvous import leave_process_group

if TYPE_CHECKING:
    from ..trainer.strategies import Strategy

BATCH = 2
STEPS = 3
RATE = 0.1
# if rule 4 is broken, ranks may wait for each other forever
HANG_SECONDS = 10.0
Weights = dict[str, Tensor]


def check_strategy(make: Callable[[], "Strategy | str"], processes: Sequence[int] = (1, 2, 3)) -> None:
    """Train a small task with a strategy and compare the result with that of a hand-written loop.

    A strategy must obey these rules:

    1. When training starts, all ranks have rank 0's weights.
    2. A step's gradient is the gradient of the mean loss over all samples in the step.
    3. All ranks have the same gradient and the same buffers. The buffers are those of the first replica.
    4. All ranks take the same number of steps, including ranks without a batch.
    5. A run that is stopped and resumed ends with the same weights as an uninterrupted run. Between steps,
       the strategy must not keep any state that the checkpoint does not contain.

    A strategy may let weights differ between ranks during training. In a run with multiple ranks, its `weight_ranks`
    must then contain a single rank. All ranks must still have equal weights at the start and end of training. A rank's
    first gradient must be the gradient of the mean loss over the rank's own samples.

    Args:
        make: Function that returns the strategy or the strategy's name. Called in each process.
        processes: Process counts to train with.

    Raises AssertionError if a rule is broken. The message states the rule and the number of processes.
    """
    for count in processes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                # in separate processes, so that the test survives a strategy that hangs or crashes
                broken = run_workers(partial(_train, make, Path(folder)), count)
            except HangError as error:
                broken = [f"rule 4: the ranks wait for each other. {error}"]
        if broken:
            raise AssertionError(f"With {count} processes, the strategy breaks {'; '.join(broken)}")


class _Small(Task):
    """Task with a buffer that sums the inputs, and two layers whose weights differ between ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        for parameter in self.parameters():
            # seeded by rank, so that the strategy has to share rank 0's weights
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.register_buffer("total", torch.zeros(()))
        self.total: Tensor

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self.layers(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Add the inputs to the buffer and return the loss."""
        # the buffer depends on the samples, so it differs between ranks until the strategy shares it
        self.total += batch[0].sum()
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        """Return SGD, whose update is proportional to the gradient."""
        # an adaptive optimizer would hide a wrongly scaled gradient
        return torch.optim.SGD(self.parameters(), RATE)


class _Record(Callback):
    """Records the weights at the start of training and the gradient of each step."""

    def __init__(self) -> None:
        self.start: Weights = {}
        self.gradients: list[Weights] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Copy the weights."""
        self.start = _whole(task)

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Copy the gradients."""
        gradients = {name: weight.grad for name, weight in task.named_parameters() if type(weight.grad) is Tensor}
        self.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})


def _whole(task: nn.Module) -> Weights:
    """Return copies of the unsharded parameters."""
    named = {name: parameter.detach() for name, parameter in task.named_parameters()}
    return {name: weight.clone() for name, weight in named.items() if type(weight) is Tensor}


def _data(replicas: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: one batch per replica, and in the last step a single short batch."""
    # the short batch reveals a mean that is not over samples
    samples = BATCH * (replicas * (STEPS - 1) + 1) - 1
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)


def _fit(
    make: Callable[[], "Strategy | str"], folder: Path, rank: int, size: int, max_steps: int = -1, resume: Any = None
) -> tuple[Any, Any, _Record]:
    from ..trainer.trainer import Trainer

    task, record = _Small(rank), _Record()
    trainer = Trainer(
        strategy=make(),
        devices=size,
        accelerator="cpu",
        callbacks=[record],
        default_root_dir=folder,
        # otherwise a hang would last for the process group's timeout of ten minutes
        hang_timeout=HANG_SECONDS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        max_steps=max_steps,
        reproducible="off",  # otherwise the run would raise an error if ranks drift apart
    )
    trainer.fit(task, DataLoader(TensorDataset(*_data(size)), BATCH), resume=resume)
    return trainer, task, record


def _train(make: Callable[[], "Strategy | str"], folder: Path) -> list[str]:
    """Train in this process as one of the ranks and return the broken rules. The list is the same on every rank."""
    place = find_place()
    assert place is not None
    rank, size = place.rank, place.world_size
    trainer, task, record = _fit(make, folder / "whole", rank, size)
    # sharded weights cannot be compared between ranks
    replicated = size == 1 or trainer.strategy.weight_ranks.size > 1 or not record.start
    broken_here = _by_hand(rank, size, replicated, record, task)
    result = {"start": record.start, "end": _whole(task), "steps": len(record.gradients)}
    results = trainer.strategy.collectives.gather_objects(result)
    broken: list[str] = [rule for rules in trainer.strategy.collectives.gather_objects(broken_here) for rule in rules]
    if any(not _close(each["start"], results[0]["start"]) for each in results):
        broken.append("rule 1: the ranks start with different weights")
    if any(not _close(each["end"], results[0]["end"]) for each in results):
        broken.append("rule 3: the ranks end with different weights")
    if any(each["steps"] != STEPS for each in results):
        broken.append(f"rule 4: the ranks took {[each['steps'] for each in results]} of {STEPS} steps")
    if replicated:
        _fit(make, folder / "resumed", rank, size, max_steps=STEPS - 1)
        _, resumed, _ = _fit(make, folder / "resumed", rank, size, resume="auto")
        if not _close(_whole(resumed), _whole(task)):
            broken.append("rule 5: a resumed run ends with different weights")
    leave_process_group()
    return list(dict.fromkeys(broken))


def _by_hand(rank: int, size: int, replicated: bool, record: _Record, task: Any) -> list[str]:
    """Compare this rank's gradients, weights and buffers with a hand-written loop's, and return the broken rules."""
    model, (inputs, targets) = _Small(0), _data(size)
    for step, gradients in enumerate(record.gradients[: STEPS if replicated else 1]):
        begin = step * size * BATCH
        rows = slice(begin, begin + size * BATCH) if replicated else slice(rank * BATCH, (rank + 1) * BATCH)
        model.zero_grad()
        model.loss(inputs[rows], targets[rows]).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters() if name in gradients}
        if not _close(gradients, expected):
            mean = "the step's samples" if replicated else "this rank's samples"
            return [f"rule 2: the gradient of step {step + 1} on rank {rank} is not that of the mean over {mean}"]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
    end = _whole(task)
    if replicated and not _close(end, {name: weight for name, weight in _whole(model).items() if name in end}):
        return ["rule 2: the final weights do not match those of a hand-written loop"]
    total = sum(float(inputs[step * size * BATCH :][:BATCH].sum()) for step in range(STEPS))
    if rank == 0 and abs(float(task.total) - total) > 1e-4:
        return ["rule 3: the buffers are not the first replica's"]
    return []


def _close(ours: Weights, theirs: dict[str, Any]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    return all(torch.allclose(value.detach(), theirs[name].detach(), atol=1e-5) for name, value in ours.items())
