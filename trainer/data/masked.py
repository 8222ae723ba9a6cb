"""Masked turns: batches of another process that this one takes along, so that all take equally many turns.

Where a forward gathers parameters from all processes, one that has fewer batches than others must take part all the
same. It runs the step on a batch of the process that has most; nothing of that counts: its loss is multiplied by zero,
what it logs is dropped, buffers and metrics are put back, and no hook of a batch is called.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..optimization.outputs import losses_of
from .randomness import seed_generators
from .sampling import mix
from .steps import ReplicaBatch

if TYPE_CHECKING:
    from ..run import Run

MASKED = 0x6D61736B
"""Keeps their random numbers apart from those of the turns that count."""


def train(run: "Run", turns: Sequence[ReplicaBatch], last: bool) -> None:
    """Run training_step on some turns; with `last` the gradients of all processes meet in the backward of the last."""
    strategy, inputs = run.strategy, run.optimization.loss_inputs
    for left, turn in zip(reversed(range(len(turns))), turns, strict=True):
        meet = last and left == 0
        with _unseen(run, turn):
            batch = turn.batch if run.transfer is None else run.transfer(turn.batch, 0)
            output = strategy.training_step((batch, turn.batch_idx)[: run.arity], meet)
            losses = losses_of(output, len(inputs))
            for index, loss in enumerate(losses):
                strategy.backward(loss * 0.0, meet, inputs[index], index + 1 < len(losses))


def evaluate(run: "Run", turn: ReplicaBatch, step: str, arity: int) -> None:
    """Run an evaluation's step on a turn."""
    with _unseen(run, turn):
        batch = turn.batch if run.transfer is None else run.transfer(turn.batch, turn.dataloader_idx)
        run.strategy.evaluation_step(step, (batch, turn.batch_idx, turn.dataloader_idx)[:arity])


def counted(run: "Run", turns: Iterable[ReplicaBatch], step: str, arity: int) -> Iterator[ReplicaBatch]:
    """Yield the turns of an evaluation that count, until the run is told to stop; run those that do not."""
    for turn in run.preemption.until_preempted(turns):
        if turn.masked:
            evaluate(run, turn, step, arity)
        else:
            yield turn


@contextmanager
def _unseen(run: "Run", turn: ReplicaBatch) -> Iterator[None]:
    """Leave nothing behind of what is logged and changed meanwhile."""
    metrics, state = run.metrics, run.state
    buffers = list(run.task.buffers())
    before, metrics_before = [buffer.detach().clone() for buffer in buffers], metrics.states.snapshot()
    metrics.muted = True
    seed_generators(mix(state.seed, MASKED, state.global_step, turn.replica, turn.batch_idx))
    try:
        yield
    finally:
        metrics.muted = False
        metrics.states.restore(metrics_before)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
