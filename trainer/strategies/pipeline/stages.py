"""Stages: the parts of a pipeline on their processes, and the order of their work: torch.distributed.pipelining.

    gpipe          all pieces forward, then all backward (Huang et al., 2019, https://arxiv.org/abs/1811.06965)
    1f1b           one forward, one backward in turn, so that fewer pieces wait (PipeDream: Narayanan et al., 2019)
    interleaved    the same with two stages a process, which idle less (Narayanan et al., 2021,
                   https://arxiv.org/abs/2104.04473)

torch fixes the shapes that travel when a schedule first runs. There is a schedule for each shape of batch, so that a
short last batch goes through one of its own.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ..mesh.sizes import Schedule
from ..model_parallel.parts import PartBlock, stage_places
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
        self.calls = 0
        """Since its schedule is new. The first is torch's, which looks at shapes: it must leave no trace in buffers."""

    def forward(self, *given: Any) -> Any:
        """Return the output of the last block."""
        self.calls += 1
        buffers = list(self.buffers()) if self.calls == 1 else []
        before = [buffer.clone() for buffer in buffers]
        for block in self.blocks:
            given = (block(*given),)
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

    def __init__(self, tensors: Sequence[Tensor], stages: Sequence[Sequence[PartBlock]], places: int, own: int) -> None:
        """`own`: this process's place."""
        self.tensors, self.own, self.last = tensors, own, places - 1  # kept alive, so that no id is used twice
        self.by_id = stage_places(stages, places)

    def place_of(self, tensor: Tensor) -> int:
        """Return the owner's place; what is in no block is owned by the last stage, where the loss is computed."""
        return self.by_id.get(id(tensor), self.last)

    def own_tensors(self) -> list[Tensor]:
        """Return what this process holds: its parameters, and every buffer that is not another's."""
        return [tensor for tensor in self.tensors if self.place_of(tensor) == self.own]

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether this is a parameter of another process's stages."""
        return isinstance(tensor, nn.Parameter) and self.place_of(tensor) != self.own


class Stages:
    """The stages of this process, and the schedules that run them."""

    def __init__(
        self,
        schedule: Schedule,
        modules: dict[int, Stage],
        count: int,
        interceptor: BlockInterceptor,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """`modules`: the stages of this process, by number; `count`: how many the pipeline has."""
        self.schedule, self.modules, self.count = schedule, modules, count
        self.interceptor, self.device, self.group = interceptor, device, group
        self.ready: dict[Any, _Ready] = {}

    @property
    def has_first(self) -> bool:
        """Whether the input comes in here."""
        return 0 in self.modules

    @property
    def has_last(self) -> bool:
        """Whether the output comes out here."""
        return self.count - 1 in self.modules

    def run(self, given: tuple[Tensor, ...], pieces: int, kind: Any, loss: PieceLoss, known: bool) -> None:
        """Run forward and backward of a batch; gradients are added to the parameters of this process's stages.

        `given`: the input, on the first stage. `kind`: the same on all processes, and other for batches of other
        shapes. `known`: whether there is a schedule for this kind.
        """
        # Both must hold: another process may have dropped its schedule for this kind, and making one is collective
        old = self.ready.pop(kind, None)
        ready = self.ready[kind] = old if known and old is not None else self._make_ready(pieces)  # the newest last
        if len(self.ready) > KEPT_SHAPES:
            del self.ready[next(iter(self.ready))]
        before = [] if known else self._put_gradients_aside()
        for module in self.modules.values():
            module.calls = 1 if known else 0
        ready.loss = loss
        # the loss gets the piece's number for a target, and fetches what belongs to it (BatchRun.loss)
        target = torch.arange(pieces) if self.has_last else None
        with self.interceptor.computing():
            ready.schedule.step(*given, target=target, **LEAN)
        ready.loss = None
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _put_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take away gradients of earlier batches: torch drops those of sharded parameters when it looks at shapes."""
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in found:
            parameter.grad = None
        return found

    def _make_ready(self, pieces: int) -> "_Ready":
        stages: list[Any] = [
            PipelineStage(module, index, self.count, self.device, group=self.group)
            for index, module in self.modules.items()
        ]
        ready = _Ready(self.modules.get(self.count - 1))
        options: dict[str, Any] = {"n_microbatches": pieces, "loss_fn": ready.compute_loss, "scale_grads": False}
        if self.schedule == "interleaved":
            ready.schedule = ScheduleInterleaved1F1B(stages, **options)
        elif self.schedule == "1f1b" and pieces >= self.count:  # torch wants as many pieces as stages
            ready.schedule = Schedule1F1B(stages[0], **options)
        else:
            # torch 2.10 and 2.11 want as many pieces as stages here too, which this schedule has no need of
            stages[0].num_stages = min(pieces, self.count)
            ready.schedule = ScheduleGPipe(stages[0], **options)
            stages[0].num_stages = self.count
        return ready


LEAN = {"return_outputs": False} if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters else {}
"""The outputs of all pieces are not needed."""


class _Ready:
    """A schedule, and what computes its losses."""

    def __init__(self, last: Stage | None) -> None:
        self.last = last
        self.loss: PieceLoss | None = None
        self.schedule: Any = None

    def compute_loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self.loss is not None
        assert self.last is not None
        if self.last.calls == 1:  # torch only looks at shapes yet, and the task's step must not see that
            return output.float().sum()
        return self.loss(output, int(target))
