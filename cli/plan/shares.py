"""State of each rank when the strategy splits the model, measured on the meta device with the strategy's own functions.

    strategies/model_parallel/parts.py      blocks of a pipeline stage
    strategies/mesh/tensor_plan.py          layers split along the axis tensor
    strategies/ddp_rpc/remote_modules.py    modules on each server

Parameters are replaced by ones of a rank's shapes, for which the optimizers then create their state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...trainer.strategies.ddp_rpc.remote_modules import dealt, named_modules, options_of, refuse_remote_optimizers
from ...trainer.strategies.mesh.dtensors import replace
from ...trainer.strategies.mesh.sizes import Sizes, stages_each
from ...trainer.strategies.mesh.tensor_plan import SEQUENCE, cut_dimensions, read_plan
from ...trainer.strategies.model_parallel.parts import PartBlock, cut_task, refuse_idle, stage_places
from .processes import Processes
from .state_size import Share, StateSize, measure

if TYPE_CHECKING:
    from ...tasks.task import Task

MakeOptimizers = Callable[[], tuple[Sequence[Optimizer], str]]
"""Returns a task's optimizers for its current parameters, or none and the reason."""


def measure_shares(
    task: "Task", processes: Processes, options: Mapping[str, Any], make_optimizers: MakeOptimizers
) -> tuple[Share, ...]:
    """Return the state by rank; () if every rank holds everything.

    `options` are the strategy's. Raises ConfigError if it cannot split the task, as it would in a run.
    """
    if processes.servers:
        return _of_trainers_and_servers(task, processes, make_optimizers)
    sizes = processes.sizes
    if sizes is None or sizes.shard * sizes.tensor * sizes.pipeline == 1:
        return ()
    cut = _Cut.of(task, sizes, options)
    return tuple(cut.share(place, make_optimizers) for place in range(sizes.pipeline))


@dataclass(frozen=True)
class _Cut:
    """A task on a mesh: the stage and the shape of each parameter."""

    task: "Task"
    sizes: Sizes
    stages: list[list[PartBlock]]
    """Blocks of each pipeline stage; empty without a pipeline."""
    cuts: dict[int, int]
    """Dimension, by parameter id, that is split along the axis tensor."""

    @classmethod
    def of(cls, task: "Task", sizes: Sizes, options: Mapping[str, Any]) -> "_Cut":
        """Split a task as the strategy does in `place_task`."""
        stages: list[list[PartBlock]] = []
        if sizes.pipeline > 1:
            count = sizes.pipeline * stages_each(options.get("schedule", "1f1b"))
            stages = cut_task(task, count, options.get("split", "auto"))
            refuse_idle(stages, sizes.pipeline)
        return cls(
            task, sizes, stages, cut_dimensions(task, task.tensor_plan(), sizes.tensor) if sizes.tensor > 1 else {}
        )

    def share(self, place: int, make_optimizers: MakeOptimizers) -> Share:
        """Return the state of the ranks at a place of the pipeline."""
        home, last = stage_places(self.stages, self.sizes.pipeline), self.sizes.pipeline - 1
        own: set[int] = set()
        uneven: list[bool] = []

        def change(tensor: Tensor) -> Tensor:
            """Return a parameter in the shape of its largest shard at this place."""
            if not isinstance(tensor, nn.Parameter):
                return tensor
            shape = [*tensor.shape]
            if id(tensor) in self.cuts:
                shape[self.cuts[id(tensor)]] //= self.sizes.tensor
            # Stages are sharded one by one, so parameters outside of all blocks are not; without stages everything is.
            is_sharded = home.get(id(tensor)) == place if self.stages else True
            if is_sharded and shape:
                uneven.append(shape[0] % self.sizes.shard > 0)
                shape[0] = -(-shape[0] // self.sizes.shard)
            part = tensor
            if shape != [*tensor.shape]:
                part = nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)
            if home.get(id(tensor), last) == place:  # parameters outside of all blocks belong to the last stage
                own.add(id(part))
            return part

        with _replaced_tensors(self.task, change):
            size = measure(self.task, *make_optimizers(), own)
        each = prod(self.sizes) // self.sizes.pipeline
        return Share(range(place * each, (place + 1) * each), self._describe(place), size, any(uneven))

    def _describe(self, place: int) -> str:
        parts = []
        for number in range(place, len(self.stages), self.sizes.pipeline):
            first, last = self.stages[number][0].name, self.stages[number][-1].name
            parts.append(f"stage {number}: {first if first == last else f'{first} .. {last}'}")
        return "; ".join(parts)


@contextmanager
def _replaced_tensors(task: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace each parameter and buffer by `change(tensor)` within this context."""
    before: dict[int, Tensor] = {}
    made: list[Tensor] = []  # keep references, so that ids stay unique

    def note(tensor: Tensor) -> Tensor:
        made.append(change(tensor))
        before[id(made[-1])] = tensor
        return made[-1]

    replace(task, note)
    try:
        yield
    finally:
        replace(task, lambda tensor: before[id(tensor)])


@contextmanager
def cut_stream(task: "Task", parts: int) -> Iterator[None]:
    """Give the layers of a task a rank's part of the sequence within this context, where its tensor_plan cuts that."""
    plan = read_plan(task, task.tensor_plan(), parts) if parts > 1 else {}

    def join(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.cat([inputs[0]] * parts, SEQUENCE), *inputs[1:]

    def deal(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.chunk(parts, SEQUENCE)[0].contiguous()

    hooks = []
    for name, word in plan.items() if "sequence" in plan.values() else ():
        module = task.get_submodule(name)
        if word in ("column", "gather"):
            hooks.append(module.register_forward_pre_hook(join))
        elif word in ("row", "split"):
            hooks.append(module.register_forward_hook(deal))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def cut_layers(task: "Task", parts: int) -> Iterator[None]:
    """Give a task the parameters of one rank of the axis tensor within this context."""
    cuts = cut_dimensions(task, task.tensor_plan(), parts) if parts > 1 else {}

    def change(tensor: Tensor) -> Tensor:
        if id(tensor) not in cuts:
            return tensor
        shape = [*tensor.shape]
        shape[cuts[id(tensor)]] //= parts
        return nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)

    with _replaced_tensors(task, change):
        yield


def _of_trainers_and_servers(task: "Task", processes: Processes, make_optimizers: MakeOptimizers) -> tuple[Share, ...]:
    names = list(named_modules(task))
    modules = {name: task.get_submodule(name) for name in names}
    for name in names:
        setattr(task, name, nn.Module())  # trainers hold no parameters of remote modules
    try:
        optimizers, unknown = make_optimizers()
        if optimizers:
            refuse_remote_optimizers(task, optimizers)
        trainers = processes.data_size
        found = [Share(range(trainers), "trainers", measure(task, optimizers, unknown))]
    finally:
        for name, module in modules.items():
            setattr(task, name, module)
    for index, own in enumerate(dealt(names, processes.servers)):
        held = nn.ModuleList(modules[name] for name in own)
        what = f"server {index}: {', '.join(own) or 'nothing, there are more servers than remote modules'}"
        found.append(Share(range(trainers + index, trainers + index + 1), what, _on_server(held, optimizers, unknown)))
    return tuple(found)


def _on_server(held: nn.Module, optimizers: Sequence[Optimizer], unknown: str) -> StateSize:
    """Return the state of a server, whose optimizers have the trainers' settings."""
    parameters = list(held.parameters())
    if not parameters:
        return measure(held, ())
    return measure(held, [type(one)(parameters, **options_of(one)) for one in optimizers], unknown)
