"""The stages of a pipeline and their schedules, built on torch.distributed.pipelining.

A process alternates between forward and backward passes, which limits the number of micro-batches in flight ("1F1B" in
PipeDream: Narayanan et al., 2019, https://arxiv.org/abs/1806.03377). If a batch has fewer micro-batches than there are
stages, all forward passes run before the backward passes (GPipe: Huang et al., 2019, https://arxiv.org/abs/1811.06965).

In torch, the first run of a schedule fixes the activation shapes. So each batch shape has its own schedule. For
example, a shorter last batch needs its own.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ....base.errors import TaskError
from ...processes.ranks import Ranks
from ..model_parallel.parts import PartBlock, tensors_of
from .intercept import BlockInterceptor

KEPT_SHAPES = 8
"""Maximum number of cached schedules; each has buffers for the activations that it receives."""
PieceLoss = Callable[[Tensor, int], Tensor]
"""Receives the output and the index of a micro-batch, and returns the micro-batch's share of the batch's loss."""


class Stage(nn.Module):
    """Module that runs consecutive blocks. The input of each block is the output of the previous block."""

    def __init__(self, blocks: Sequence[PartBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block.module for block in blocks)
        self.names = [block.name for block in blocks]
        self.calls = 0
        """Number of calls under the current schedule. The first call only infers shapes and must not change buffers."""

    def forward(self, *inputs: Any) -> Any:
        """Return the output of the last block."""
        self.calls += 1
        buffers = list(self.buffers()) if self.calls == 1 else []
        before = [buffer.clone() for buffer in buffers]
        for name, block in zip(self.names, self.blocks, strict=True):
            try:
                inputs = (block(*inputs),)
            except (TypeError, AttributeError) as error:
                raise TaskError(
                    f"{name!r} failed ({type(error).__name__}: {error}). In a pipeline, the only argument of a block "
                    f"is the output of the previous block. Transformer layers also need masks and rotary embeddings, "
                    f"which their model computes between blocks. A pipeline does not support this. Replace "
                    f"pipeline with tensor, or use strategy=fsdp or ddp_model_parallel."
                ) from error
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # .data, because autograd may have saved the buffer for backward
        if self.calls == 1:
            torch.clear_autocast_cache()  # up to torch 2.11 it keeps weights that were cast without a gradient
        output = inputs[0]
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
            # torch 2.12 sends gradients to the output of a stage even if the stage is frozen
            return output if output.requires_grad else output.detach().requires_grad_()
        return output


class StageOwners:
    """Maps each parameter and buffer of a task to the stage that owns it."""

    def __init__(self, tensors: Sequence[Tensor], stages: Sequence[Sequence[PartBlock]], place: int) -> None:
        """Map the tensors of a task to stages.

        Args:
            place: index of this process's stage.
        """
        self.tensors, self.place, self.last = tensors, place, len(stages) - 1  # kept alive, so that no id is reused
        self.by_id = {
            id(tensor): place
            for place, blocks in enumerate(stages)
            for block in blocks
            for tensor in tensors_of(block.module)
        }

    def place_of(self, tensor: Tensor) -> int:
        """Return the index of the stage that owns `tensor`. The last stage owns tensors outside of all blocks."""
        return self.by_id.get(id(tensor), self.last)

    def own_tensors(self) -> list[Tensor]:
        """Return the parameters and buffers that this process owns."""
        return [tensor for tensor in self.tensors if self.place_of(tensor) == self.place]

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a parameter of another stage."""
        return isinstance(tensor, nn.Parameter) and self.place_of(tensor) != self.place


class Schedules:
    """Cache of the schedules that run this process's stage, with one schedule per batch shape."""

    def __init__(self, stage: Stage, interceptor: BlockInterceptor, device: torch.device, ranks: Ranks) -> None:
        """Create an empty cache.

        Args:
            ranks: the processes in the pipeline, in stage order.
        """
        self.stage, self.interceptor, self.device, self.group = stage, interceptor, device, ranks.group
        self.place, self.places = ranks.rank, ranks.size
        self.made: dict[Any, Any] = {}
        """The cached schedules, keyed by kind of batch; the newest is last."""
        self.loss: PieceLoss | None = None
        """Computes the loss of the current batch."""

    @property
    def is_first(self) -> bool:
        """True if this process receives the pipeline's input."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """True if this process computes the pipeline's output."""
        return self.place == self.places - 1

    def run(self, inputs: tuple[Tensor, ...], pieces: int, kind: Any, loss: PieceLoss, cached: bool) -> None:
        """Run the forward and backward passes of a batch. Gradients accumulate in this stage's parameters.

        Args:
            inputs: the pipeline's input on the first stage; empty on other stages.
            kind: key that identifies the shapes in the batch. It is the same on all processes in the pipeline.
            cached: True if all processes have already created a schedule for `kind`.
        """
        # both conditions: another process may have dropped its schedule for this kind, and creating one is a collective
        old = self.made.pop(kind, None)
        schedule = old if cached and old is not None else self._make_schedule(pieces)
        self.made[kind] = schedule
        if len(self.made) > KEPT_SHAPES:
            del self.made[next(iter(self.made))]
        before = [] if cached else self._put_gradients_aside()
        self.stage.calls, self.loss = int(cached), loss
        # the target is the index of the micro-batch, from which BatchRun finds the rest
        target = torch.arange(pieces) if self.is_last else None
        with self.interceptor.computing():
            schedule.step(*inputs, target=target, **LEAN)
        self.loss = None
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _put_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove and return the gradients of earlier batches.

        Otherwise, the first run of a schedule would drop the gradients of sharded parameters.
        """
        gradients = []
        for parameter in self.stage.parameters():
            if parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None
        return gradients

    def _make_schedule(self, pieces: int) -> Any:
        stage: Any = PipelineStage(self.stage, self.place, self.places, self.device, group=self.group)
        options: dict[str, Any] = {"n_microbatches": pieces, "loss_fn": self._compute_loss, "scale_grads": False}
        if pieces >= self.places:  # torch requires as many micro-batches as stages
            return Schedule1F1B(stage, **options)
        # torch 2.10 and 2.11 require this here, too, although GPipe does not
        stage.num_stages = pieces
        schedule = ScheduleGPipe(stage, **options)
        stage.num_stages = self.places
        return schedule

    def _compute_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.stage.calls == 1:  # torch only infers shapes, without the task's step
            return output.float().sum()
        assert self.loss is not None
        return self.loss(output, int(target))


LEAN = {"return_outputs": False} if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters else {}
"""Option that disables the collection of outputs if this version of torch has the option."""
