"""Stages: the parts of a pipeline on their processes, and the order of their work: torch.distributed.pipelining.

A process does one forward and one backward in turn, so that few pieces wait ("1F1B", PipeDream: Narayanan et al., 2019,
https://arxiv.org/abs/1806.03377). A batch of fewer pieces than stages goes forward whole, then backward (GPipe: Huang
et al., 2019, https://arxiv.org/abs/1811.06965).

torch fixes the shapes that travel when a schedule first runs. There is a schedule for each shape of batch, so that a
short last batch goes through one of its own.
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
"""Schedules that are kept, each with room for the activations that it receives."""
PieceLoss = Callable[[Tensor, int], Tensor]
"""Takes the output of the pipeline for a piece, and which piece it is; returns its part of the batch's loss."""


class Stage(nn.Module):
    """Runs some blocks, one after the other; each is given what the one before has returned."""

    def __init__(self, blocks: Sequence[PartBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block.module for block in blocks)
        self.names = [block.name for block in blocks]
        self.calls = 0
        """Since its schedule is new. The first is torch's, which looks at shapes: it must leave no trace in buffers."""

    def forward(self, *given: Any) -> Any:
        """Return the output of the last block."""
        self.calls += 1
        buffers = list(self.buffers()) if self.calls == 1 else []
        before = [buffer.clone() for buffer in buffers]
        for name, block in zip(self.names, self.blocks, strict=True):
            try:
                given = (block(*given),)
            except (TypeError, AttributeError) as error:
                raise TaskError(
                    f"{name!r} failed with what a pipeline gives to a block: what the block before has returned, by "
                    f"position, and nothing else ({type(error).__name__}: {error}). Layers of transformers also want "
                    f"masks and rotary embeddings, which their model makes between its blocks, where a process of a "
                    f"pipeline has no value. Use strategy fsdp, tensor in place of pipeline, or ddp_model_parallel."
                ) from error
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # past autograd, which may have kept the buffer for backward
        if self.calls == 1:
            torch.clear_autocast_cache()  # until torch 2.11 it keeps weights that were cast without a gradient
        output = given[0]
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
            # of a frozen stage: torch 2.12 wants a gradient to be sent to it all the same
            return output if output.requires_grad else output.detach().requires_grad_()
        return output


class StageOwners:
    """Owner of each parameter and buffer of a task: its place on the axis `pipeline`."""

    def __init__(self, tensors: Sequence[Tensor], stages: Sequence[Sequence[PartBlock]], own: int) -> None:
        """`own`: this process's place."""
        self.tensors, self.own, self.last = tensors, own, len(stages) - 1  # kept alive, so that no id is used twice
        self.by_id = {
            id(tensor): place
            for place, blocks in enumerate(stages)
            for block in blocks
            for tensor in tensors_of(block.module)
        }

    def place_of(self, tensor: Tensor) -> int:
        """Return the owner's place; what is in no block is owned by the last stage, where the loss is computed."""
        return self.by_id.get(id(tensor), self.last)

    def own_tensors(self) -> list[Tensor]:
        """Return what this process holds: its parameters, and every buffer that is not another's."""
        return [tensor for tensor in self.tensors if self.place_of(tensor) == self.own]

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether this is a parameter of another process's stage."""
        return isinstance(tensor, nn.Parameter) and self.place_of(tensor) != self.own


class Schedules:
    """The schedules that run this process's stage, one for each shape of batch."""

    def __init__(self, stage: Stage, interceptor: BlockInterceptor, device: torch.device, ranks: Ranks) -> None:
        """`ranks`: the processes of the pipeline, each with the stage of its rank there."""
        self.stage, self.interceptor, self.device, self.group = stage, interceptor, device, ranks.group
        self.place, self.places = ranks.rank, ranks.size
        self.made: dict[Any, Any] = {}
        self.loss: PieceLoss | None = None
        """Computes the loss of the batch under way."""

    @property
    def is_first(self) -> bool:
        """Whether the input comes in here."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """Whether the output comes out here."""
        return self.place == self.places - 1

    def run(self, inputs: tuple[Tensor, ...], pieces: int, kind: Any, loss: PieceLoss, known: bool) -> None:
        """Run forward and backward of a batch; gradients are added to the parameters of this process's stage.

        `inputs`: of the pipeline, on the first stage. `kind`: the same on all processes, and other for batches of other
        shapes. `known`: whether there is a schedule for this kind.
        """
        # Both must hold: another process may have dropped its schedule for this kind, and making one is collective
        old = self.made.pop(kind, None)
        schedule = old if known and old is not None else self._make_schedule(pieces)
        self.made[kind] = schedule  # the newest last
        if len(self.made) > KEPT_SHAPES:
            del self.made[next(iter(self.made))]
        before = [] if known else self._put_gradients_aside()
        self.stage.calls, self.loss = int(known), loss
        # the loss gets the piece's number for a target, and fetches what belongs to it (BatchRun.loss)
        target = torch.arange(pieces) if self.is_last else None
        with self.interceptor.computing():
            schedule.step(*inputs, target=target, **LEAN)
        self.loss = None
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _put_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take away gradients of earlier batches: torch drops those of sharded parameters when it looks at shapes."""
        gradients = []
        for parameter in self.stage.parameters():
            if parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None
        return gradients

    def _make_schedule(self, pieces: int) -> Any:
        stage: Any = PipelineStage(self.stage, self.place, self.places, self.device, group=self.group)
        options: dict[str, Any] = {"n_microbatches": pieces, "loss_fn": self._compute_loss, "scale_grads": False}
        if pieces >= self.places:  # torch wants as many pieces as stages
            return Schedule1F1B(stage, **options)
        # torch 2.10 and 2.11 want as many pieces as stages here too, which this schedule has no need of
        stage.num_stages = pieces
        schedule = ScheduleGPipe(stage, **options)
        stage.num_stages = self.places
        return schedule

    def _compute_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.stage.calls == 1:  # torch only looks at shapes yet, and the task's step must not see that
            return output.float().sum()
        assert self.loss is not None
        return self.loss(output, int(target))


LEAN = {"return_outputs": False} if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters else {}
"""The outputs of all pieces are not needed."""
