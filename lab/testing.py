"""Test helpers: whether a strategy of your own keeps the rules that the loop, checkpoints and metrics rely on."""

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
# ranks that wait for each other for ever are what a broken rule 4 looks like
HANG_SECONDS = 10.0
Weights = dict[str, Tensor]


def check_strategy(make: Callable[[], "Strategy | str"], processes: Sequence[int] = (1, 2, 3)) -> None:
    """Train a small task with a strategy, and compare the result with a loop by hand.

    The rules: 1. once training starts, all ranks hold rank 0's weights. 2. The gradient of a step is that of the mean
    over its samples. 3. It is the same on every rank, and buffers are those of the first replica. 4. All ranks take
    equally many steps, those without a batch too. 5. A run that is stopped and resumed ends as one that is not: the
    strategy keeps nothing between steps but what a checkpoint has.

    Of a strategy whose ranks are not replicated (`weight_ranks` has one rank in a run of several) the ranks need the
    same weights at the start and at the end, and the first gradient is that of the mean over the rank's own samples.

    Args:
        make: returns the strategy, or the name of one; called in each process.
        processes: numbers of processes to train on.

    Raises:
        AssertionError: a rule is broken; the message says which one, on how many processes.
    """
    for count in processes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                # in processes of their own: a strategy that hangs or dies must not take the test with it
                broken = run_workers(partial(_train, make, Path(folder)), count)
            except HangError as error:
                broken = [f"rule 4: the ranks wait for each other. {error}"]
        if broken:
            raise AssertionError(f"On {count} processes the strategy breaks {'; '.join(broken)}")


class _Small(Task):
    """Two layers, other weights on each rank, and a buffer that adds up inputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        for parameter in self.parameters():
            # seeded by rank, so that ranks start apart and `place` has something to do
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.register_buffer("total", torch.zeros(()))
        self.total: Tensor

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self.layers(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Add up the inputs, and return the loss."""
        # a buffer that depends on the samples: the ranks have different ones until a strategy shares them
        self.total += batch[0].sum()
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        """Return SGD, whose update shows the gradient."""
        # an adaptive optimizer would hide a gradient of the wrong length
        return torch.optim.SGD(self.parameters(), RATE)


class _Record(Callback):
    """The weights at the start of training, and the gradient of each step."""

    def __init__(self) -> None:
        self.start: Weights = {}
        self.gradients: list[Weights] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Copy the weights."""
        self.start = _whole(task)

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Copy the gradients."""
        gradients = {name: one.grad for name, one in task.named_parameters() if type(one.grad) is Tensor}
        self.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})


def _whole(task: nn.Module) -> Weights:
    """Return copies of the parameters that this rank has the whole of."""
    named = {name: parameter.detach() for name, parameter in task.named_parameters()}
    return {name: weight.clone() for name, weight in named.items() if type(weight) is Tensor}


def _data(replicas: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: a batch for each replica, but in the last step a single one, which is short."""
    # the last step has a batch for one rank alone, and that is short: the mean over samples shows there
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
        # without it a hang would last for the ten minutes of the process group
        hang_timeout=HANG_SECONDS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        max_steps=max_steps,
        reproducible="off",  # else the run itself would end where ranks drift apart
    )
    trainer.fit(task, DataLoader(TensorDataset(*_data(size)), BATCH), resume=resume)
    return trainer, task, record


def _train(make: Callable[[], "Strategy | str"], folder: Path) -> list[str]:
    """Train in this process, as one of several; return what is broken, the same on every rank."""
    place = find_place()
    assert place is not None
    rank, size = place.rank, place.world_size
    trainer, task, record = _fit(make, folder / "whole", rank, size)
    # a strategy that cuts weights, of which no rank has the whole, has nothing to compare between ranks
    replicated = size == 1 or trainer.strategy.weight_ranks.size > 1 or not record.start
    own = _by_hand(rank, size, replicated, record, task)
    shown = {"start": record.start, "end": _whole(task), "steps": len(record.gradients)}
    every = trainer.strategy.collectives.gather_objects(shown)
    broken: list[str] = [said for told in trainer.strategy.collectives.gather_objects(own) for said in told]
    if any(not _close(one["start"], every[0]["start"]) for one in every):
        broken.append("rule 1: the ranks start with different weights")
    if any(not _close(one["end"], every[0]["end"]) for one in every):
        broken.append("rule 3: the ranks end with different weights")
    if any(one["steps"] != STEPS for one in every):
        broken.append(f"rule 4: the ranks took {[one['steps'] for one in every]} of {STEPS} steps")
    if replicated:
        _fit(make, folder / "resumed", rank, size, max_steps=STEPS - 1)
        _, resumed, _ = _fit(make, folder / "resumed", rank, size, resume="auto")
        if not _close(_whole(resumed), _whole(task)):
            broken.append("rule 5: a resumed run ends with other weights")
    leave_process_group()
    return list(dict.fromkeys(broken))


def _by_hand(rank: int, size: int, replicated: bool, record: _Record, task: Any) -> list[str]:
    """Return the rules that gradients, weights and buffers of this rank break, compared with a loop by hand."""
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
        return ["rule 2: the weights at the end are not those of a loop by hand"]
    total = sum(float(inputs[step * size * BATCH :][:BATCH].sum()) for step in range(STEPS))
    if rank == 0 and abs(float(task.total) - total) > 1e-4:
        return ["rule 3: the buffers are not those of the first replica"]
    return []


def _close(ours: Weights, theirs: dict[str, Any]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    return all(torch.allclose(value.detach(), theirs[name].detach(), atol=1e-5) for name, value in ours.items())
