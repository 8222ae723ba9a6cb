"""Runs a batch on one of a pipeline's processes.

    first stage   runs training_step on each micro-batch up to the first block, whose arguments are the pipeline's input
    last stage    runs training_step on each micro-batch, and computes the loss, the output and the logged values

Both stages start each micro-batch from the same random state. Random numbers that training_step draws before it calls
the model, for example for mixup, are therefore the same on both stages.
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
"""Name, value and other arguments of a call to `log`."""


class BatchRun:
    """Runs the micro-batches of a batch and collects the outputs of training_step."""

    def __init__(
        self,
        task: "Task",
        arguments: Sequence[Any],
        schedules: Schedules,
        pieces: int,
        together: Ranks,
        is_masked: bool,
    ) -> None:
        """Prepare to run a batch.

        Args:
            pieces: maximum number of micro-batches.
            together: ranks in the pipelines that run in lockstep with this pipeline.
        """
        self.task, self.schedules, self.interceptor = task, schedules, schedules.interceptor
        batch, *self.arguments = arguments
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
        # Processes in a pipeline have the same batch. Pipelines that shard together must agree, because torch infers
        # shapes with collectives.
        self.cached = bool(together.all_gather(torch.tensor(self.kind in schedules.made)).all())
        # from the generator keyed by step and replica, so equal on all processes of the pipeline
        self.key = int(torch.randint(2**62, ()))
        self.outputs: list[Any] = [None] * count
        self.calls: list[list[LogCall]] = [[] for _ in self.sizes]
        """The calls to `log` in training_step for each micro-batch."""
        seed_generators(mix(self.key, schedules.place))  # otherwise stages would draw the same dropout masks

    def run(self) -> None:
        """Run the forward and backward passes of the batch. Gradients accumulate in this stage's parameters."""
        self.schedules.run(self._inputs(), len(self.sizes), self.kind, self._loss, self.cached)

    def _inputs(self) -> tuple[Tensor, ...]:
        """Return the pipeline's input on the first stage, and an empty tuple on other stages."""
        if not self.schedules.is_first:
            return ()
        inputs = [self.interceptor.input_of(partial(self._step, index)) for index in range(len(self.sizes))]
        # the schedule splits the concatenated input again, so each micro-batch must have the expected number of rows
        for tensor in inputs[0]:
            if len(inputs) > 1 and (not tensor.ndim or tensor.shape[0] != self.sizes[0]):
                raise TaskError(
                    f"The input of a pipeline is split along its first dimension, but "
                    f"{self.interceptor.blocks[0].name!r} received a tensor of shape {tuple(tensor.shape)} for "
                    f"{self.sizes[0]} samples. Create this tensor in the block."
                )
        # again, because `_step` has seeded the generators with a key that is the same on all stages
        seed_generators(mix(self.key, self.schedules.place))
        return inputs[0] if len(inputs) == 1 else tuple(torch.cat(pieces) for pieces in zip(*inputs, strict=True))

    def _loss(self, output: Tensor, index: int) -> Tensor:
        """Return a micro-batch's share of the batch's loss, weighted by its number of samples."""
        result = self.interceptor.finish(partial(self._step, index), output)
        self.outputs[index] = result
        losses = losses_of(result, 1)
        if not losses:
            # a zero loss with a graph, because torch's schedule calls backward for each micro-batch
            return output.float().sum() * 0.0
        weight, weights = weight_of(result), self.task.trainer.current_run.optimization.weights
        share = self.share if weight is None else weights.factor(weight, self.step)
        return self.precision.scale(losses[0] * (0.0 if self.is_masked else share))

    def _step(self, index: int) -> Any:
        """Call training_step with a micro-batch, starting from the same random state on all processes."""
        seed_generators(mix(self.key, self.schedules.places, index))
        # set on the instance, to override the class's method: `result` sends the calls to all stages, which log them
        self.task.__dict__["log"] = partial(self._record, index)
        try:
            return self.task.training_step(self.batches[index], *self.arguments)
        finally:
            del self.task.__dict__["log"]

    def _record(self, index: int, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Record a call to `Task.log`. Raises TaskError if the value is a metric object."""
        if is_metric(value):
            raise TaskError(
                f"log({name!r}) received a metric object in training_step, but only the last stage of a pipeline has "
                f"the metric's values. Log numbers in training_step, and metric objects in validation_step."
            )
        value = value.detach() if isinstance(value, Tensor) else value
        self.calls[index].append((name, value, args, {"batch_size": self.sizes[index]} | options))

    def result(self, stages: Ranks) -> Any:
        """Log the last stage's values on every process in the pipeline. Return the output of training_step.

        On stages other than the last, the output contains only the loss and, if there is one, the weight.
        """
        output, message, device = None, None, self.schedules.device
        if self.schedules.is_last:
            output = map_tensors(combine_losses(self.outputs, self.sizes, device), Tensor.detach)
            names = ("loss", "weight")
            losses = {name: output[name] for name in names if name in output} if isinstance(output, dict) else output
            calls = [call for calls in self.calls for call in calls]
            values = to_floats([value for _, value, _, _ in calls])
            message = (
                map_tensors(losses, float),
                [(call[0], value, *call[2:]) for call, value in zip(calls, values, strict=True)],
            )
        losses, logged = stages.broadcast(message, source=stages.size - 1)
        for name, value, args, options in logged:
            self.task.log(name, value, *args, **options)
        if self.schedules.is_last:
            return output
        return map_tensors(losses, Tensor.to, number=lambda value: torch.tensor(value, device=device))


def count_pieces(samples: Sequence[int], limit: int) -> int:
    """Return the largest number of micro-batches, up to `limit`, that divides all batch sizes in `samples`."""
    for pieces in range(min(limit, *samples), 1, -1):
        if not any(count % pieces for count in samples):
            return pieces
    return 1


def map_shapes(batch: Any) -> Iterable[tuple[int, ...]]:
    """Return the shape of every tensor in a batch."""
    shapes: list[tuple[int, ...]] = []
    map_tensors(batch, lambda tensor: shapes.append(tuple(tensor.shape)) or tensor)  # type: ignore[func-returns-value]
    return shapes
