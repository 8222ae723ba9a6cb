"""One batch on its way through a pipeline, seen from one of its processes.

    first stage    training_step is called with each piece, as far as the first block: the pipeline's input
    last stage     training_step is called with each piece, from the last block on: its loss, its output, what it logs

Both begin from the same random numbers for a piece, so that what the step draws before the model (mixed samples and
their targets, say) is the same in both places.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....base.errors import TaskError
from ....base.tensors import map_tensors
from ...data.randomness import seed_generators
from ...data.sampling import mix
from ...metrics.reduce import to_floats
from ...metrics.torchmetrics import is_metric
from ...optimization.batch_weights import weight_of
from ...optimization.outputs import losses_of
from ...processes.ranks import Ranks
from ..pieces import combine_losses, split
from .stages import Schedules

if TYPE_CHECKING:
    from ....tasks.task import Task

LogCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""Name and value of what was logged, and the other arguments of `log`."""


class BatchRun:
    """The pieces of a batch, and what training_step makes of them."""

    def __init__(
        self,
        task: "Task",
        arguments: Sequence[Any],
        schedules: Schedules,
        pieces: int,
        together: Ranks,
        is_masked: bool,
    ) -> None:
        """`pieces`: at most so many. `together`: the pipelines that gather parameters, and so do the same, together."""
        self.task, self.schedules, self.interceptor = task, schedules, schedules.interceptor
        batch, *self.others = arguments
        run = task.trainer.current_run
        assert run.loop.step is not None
        samples = task.count_samples(batch)
        count = count_pieces(together.all_gather(torch.tensor(samples)).tolist(), pieces)
        self.sizes = [samples // count] * count
        self.batches = split(batch, self.sizes) if count > 1 else [batch]
        self.step, self.is_masked = run.loop.step, is_masked
        self.precision = task.trainer.strategy.precision
        self.share = run.metrics.samples * run.gradient_scale / run.loop.step.samples / count
        self.kind = (count, tuple(map_shapes(batch)))
        # processes of one pipeline have the same batch; pipelines that shard together must agree, or one would look at
        # shapes (with collectives of its own) while the others train
        self.known = bool(together.all_gather(torch.tensor(self.kind in schedules.made)).all())
        # drawn from the generator that is keyed by step and replica: the same on all processes of the pipeline
        self.key = int(torch.randint(2**62, ()))
        self.outputs: list[Any] = [None] * count
        self.calls: list[list[LogCall]] = [[] for _ in self.sizes]
        """What training_step has logged for each piece."""
        seed_generators(mix(self.key, schedules.place))  # else stages would draw the same masks

    def run(self) -> None:
        """Run forward and backward of all pieces; gradients are added to the parameters of this process's stage."""
        self.schedules.run(self._inputs(), len(self.sizes), self.kind, self._loss, self.known)

    def _inputs(self) -> tuple[Tensor, ...]:
        """Return the input of the pipeline, on its first stage."""
        if not self.schedules.is_first:
            return ()
        found = [self.interceptor.input_of(partial(self._step, index)) for index in range(len(self.sizes))]
        # pieces are cut by the schedule again after they have been joined, so each must have its share of rows
        for tensor in found[0]:
            if len(found) > 1 and (not tensor.ndim or tensor.shape[0] != self.sizes[0]):
                raise TaskError(
                    f"The input of a pipeline is cut along its first dimension; {self.interceptor.blocks[0].name!r} "
                    f"was given a tensor of shape {tuple(tensor.shape)} for {self.sizes[0]} samples. Make it in the "
                    f"block."
                )
        seed_generators(mix(self.key, self.schedules.place))
        return found[0] if len(found) == 1 else tuple(torch.cat(pieces) for pieces in zip(*found, strict=True))

    def _loss(self, output: Tensor, index: int) -> Tensor:
        """Return a piece's part of the batch's loss, weighted by its samples."""
        result = self.interceptor.finish(partial(self._step, index), output)
        self.outputs[index] = result
        losses = losses_of(result, 1)
        if not losses:
            # a loss with a graph all the same: torch's schedule calls backward on each piece
            return output.float().sum() * 0.0
        weight, weights = weight_of(result), self.task.trainer.current_run.optimization.weights
        share = self.share if weight is None else weights.factor(weight, self.step)
        return self.precision.scale(losses[0] * (0.0 if self.is_masked else share))

    def _step(self, index: int) -> Any:
        """Call training_step with a piece of the batch, whose random numbers are the same on all processes."""
        seed_generators(mix(self.key, self.schedules.places, index))
        # in the instance, before the class's method: what is logged is told to the other stages first, which log it as
        # well
        self.task.__dict__["log"] = partial(self._record, index)
        try:
            return self.task.training_step(self.batches[index], *self.others)
        finally:
            del self.task.__dict__["log"]

    def _record(self, index: int, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stand in for `Task.log`. Raises TaskError for a metric object."""
        if is_metric(value):
            raise TaskError(
                f"log({name!r}) in training_step: under a pipeline only the last stage has this metric's values. "
                f"Log numbers there, and metrics in validation."
            )
        value = value.detach() if isinstance(value, Tensor) else value
        self.calls[index].append((name, value, args, {"batch_size": self.sizes[index]} | options))

    def result(self, stages: Ranks) -> Any:
        """Have every process of the pipeline log what the last stage has; return what training_step returned there.

        Elsewhere that is its loss, and the weight beside it.
        """
        output, message, device = None, None, self.schedules.device
        if self.schedules.is_last:
            output = map_tensors(combine_losses(self.outputs, self.sizes, device), Tensor.detach)
            names = ("loss", "weight")
            told = {name: output[name] for name in names if name in output} if isinstance(output, dict) else output
            calls = [call for calls in self.calls for call in calls]
            values = to_floats([value for _, value, _, _ in calls])
            message = (
                map_tensors(told, float),
                [(call[0], value, *call[2:]) for call, value in zip(calls, values, strict=True)],
            )
        told, logged = stages.broadcast(message, source=stages.size - 1)
        for name, value, args, options in logged:
            self.task.log(name, value, *args, **options)
        if self.schedules.is_last:
            return output
        return map_tensors(told, Tensor.to, number=lambda value: torch.tensor(value, device=device))


def count_pieces(samples: Sequence[int], wanted: int) -> int:
    """Return into how many equal pieces, at most `wanted`, batches of so many samples can all be cut."""
    for pieces in range(min(wanted, *samples), 1, -1):
        if not any(count % pieces for count in samples):
            return pieces
    return 1


def map_shapes(batch: Any) -> Iterable[tuple[int, ...]]:
    """Return the shape of every tensor in a batch."""
    shapes: list[tuple[int, ...]] = []
    map_tensors(batch, lambda tensor: shapes.append(tuple(tensor.shape)) or tensor)  # type: ignore[func-returns-value]
    return shapes
