"""Masked batches: copies of another process's batches, so that all processes run the same number of passes.

A forward pass that gathers parameters (FSDP) is a collective, so a process with fewer batches must still take part. It
runs a batch from the process with the most batches and discards the results: the loss is multiplied by zero, logged
values are dropped, buffers and metrics are restored, and no batch hooks are called.
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
"""Key that separates the random numbers of masked batches from those of unmasked batches."""


def begin_step(run: Any, step: StepInput) -> None:
    """Run a step's masked batches. If no unmasked batch follows, leave the last masked batch to `stand_in`."""
    if run.optimization.automatic:
        # after gradients are cleared, since these backward passes may add other processes' gradients to this shard
        train(run, step.masked if step.batches else step.masked[:-1], last=False)


def stand_in(run: Any, step: StepInput) -> None:
    """Take part in a step for which this process has no unmasked batch."""
    if run.strategy.lockstep:
        train(run, step.masked[-1:], last=True)
    else:
        run.strategy.leave_out(last=True, after_forward=False)


def train(run: Any, batches: Sequence[ReplicaBatch], last: bool) -> None:
    """Run the forward and backward passes for masked batches. If `last` is true, the last one reduces gradients."""
    strategy, inputs = run.strategy, run.optimization.loss_inputs
    for left, item in zip(reversed(range(len(batches))), batches, strict=True):
        reduces = last and left == 0
        with discarding_effects(run, item):
            batch = item.batch if run.transfer is None else run.transfer(item.batch, 0)
            output = strategy.training_step((batch, item.batch_idx)[: run.arity], None, reduces)
            losses = losses_of(output, len(inputs))
            for index, loss in enumerate(losses):
                # multiplied by zero rather than skipped: FSDP's backward pass gathers and reduces on all ranks
                parameters = None if len(losses) == 1 else inputs[index]
                strategy.backward(loss * 0.0, reduces, parameters, index + 1 < len(losses))


def evaluate(run: Any, item: ReplicaBatch, step: str, arity: int) -> None:
    """Run an evaluation step on a masked batch."""
    with discarding_effects(run, item):
        batch = item.batch if run.transfer is None else run.transfer(item.batch, item.dataloader_idx)
        run.strategy.evaluation_step(step, (batch, item.batch_idx, item.dataloader_idx)[:arity])


def counted(run: Any, batches: Iterable[ReplicaBatch], step: str, arity: int) -> Iterator[ReplicaBatch]:
    """Yield an evaluation's unmasked batches and run its masked ones. Stop if the run is preempted."""
    for item in run.preemption.until_preempted(batches):
        if item.masked:
            evaluate(run, item, step, arity)
        else:
            run.loop.item = item
            yield item


@contextmanager
def discarding_effects(run: Any, item: ReplicaBatch) -> Iterator[None]:
    """Within this context, use separate random numbers and revert any changes made to metrics and buffers."""
    metrics, state = run.metrics, run.state
    buffers = list(run.task.buffers())
    # buffers are copied for each masked batch, since another process counts the samples in batch norm
    before, metrics_before = [buffer.detach().clone() for buffer in buffers], metrics.states.snapshot()
    was_muted, metrics.muted = metrics.muted, True  # the process that owns the batch logs its values
    # separate keys: unmasked batches must draw the same random numbers whichever process has masked ones
    seed_generators(mix(state.seed, MASKED, state.global_step, item.replica, item.batch_idx))
    try:
        yield
    finally:
        metrics.muted = was_muted  # a step that is computed again logs nothing
        metrics.states.restore(metrics_before)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
