"""Masked batches: batches of another process, run so that all processes take equally many forward and backward passes.

A forward that gathers parameters (FSDP) is a collective, so a process with fewer batches must still take part. It runs
a batch of the process that has most and discards the results: the loss is multiplied by zero, logged values are
dropped, buffers and metrics are restored, and no batch hook is called.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .data.randomness import seed_generators
from .data.sampling import mix
from .data.steps import ReplicaBatch, StepInput
from .optimization.outputs import losses_of

MASKED = 0x6D61736B
"""Stream constant that separates their random numbers from those of batches that count."""


def begin_step(run: Any, step: StepInput) -> None:
    """Run the masked batches that come first in a step: all, or those before the last where none of its own follows."""
    if run.optimization.automatic:
        # after the gradients are cleared: they may add other processes' gradients to this shard
        train(run, step.masked if step.batches else step.masked[:-1], last=False)


def stand_in(run: Any, step: StepInput) -> None:
    """Take part in a step of which this process has no batch."""
    if run.strategy.lockstep:
        train(run, step.masked[-1:], last=True)
    else:
        run.strategy.leave_out(last=True, after_forward=False)


def train(run: Any, batches: Sequence[ReplicaBatch], last: bool) -> None:
    """Run training_step and backward on masked batches; with `last` the final backward reduces gradients."""
    strategy, inputs = run.strategy, run.optimization.loss_inputs
    for left, item in zip(reversed(range(len(batches))), batches, strict=True):
        meet = last and left == 0
        with discarding_effects(run, item):
            batch = item.batch if run.transfer is None else run.transfer(item.batch, 0)
            output = strategy.training_step((batch, item.batch_idx)[: run.arity], None, meet)
            losses = losses_of(output, len(inputs))
            for index, loss in enumerate(losses):
                # times zero and not left out: FSDP's backward gathers and reduces from all ranks
                reached = None if len(losses) == 1 else inputs[index]
                strategy.backward(loss * 0.0, meet, reached, index + 1 < len(losses))


def evaluate(run: Any, item: ReplicaBatch, step: str, arity: int) -> None:
    """Run an evaluation step on a masked batch."""
    with discarding_effects(run, item):
        batch = item.batch if run.transfer is None else run.transfer(item.batch, item.dataloader_idx)
        run.strategy.evaluation_step(step, (batch, item.batch_idx, item.dataloader_idx)[:arity])


def counted(run: Any, batches: Iterable[ReplicaBatch], step: str, arity: int) -> Iterator[ReplicaBatch]:
    """Yield the unmasked batches of an evaluation until the run is preempted; run masked ones on the way."""
    for item in run.preemption.until_preempted(batches):
        if item.masked:
            evaluate(run, item, step, arity)
        else:
            run.loop.item = item
            yield item


@contextmanager
def discarding_effects(run: Any, item: ReplicaBatch) -> Iterator[None]:
    """Keep nothing of what steps in this context do to metrics and buffers; they draw random numbers of their own."""
    metrics, state = run.metrics, run.state
    buffers = list(run.task.buffers())
    # a copy of all buffers for each masked batch: batch norm would count samples that another process has counted
    before, metrics_before = [buffer.detach().clone() for buffer in buffers], metrics.states.snapshot()
    metrics.muted = True  # what the step logs counts in the process whose batch it is
    # numbers of its own: those of the batches that count must not depend on who has masked ones
    seed_generators(mix(state.seed, MASKED, state.global_step, item.replica, item.batch_idx))
    try:
        yield
    finally:
        metrics.muted = False
        metrics.states.restore(metrics_before)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
