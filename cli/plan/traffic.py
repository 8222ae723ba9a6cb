"""Finds what a strategy sends in a step, and the memory for that, from the code by which it sends.

Gradients are counted by parameters. What is an activation is measured on a forward of the task without memory, as
step_size.py measures it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...base.errors import ConfigError
from ...trainer.data.sampling import Layout
from ...trainer.data.transfer import map_tensors
from ...trainer.strategies.bitwise.tree import BUCKET_ELEMENTS, make_buckets, partial_nodes
from ...trainer.strategies.ddp_rpc.remote_modules import named_modules
from ...trainer.strategies.mesh.sharding import find_sharded_blocks
from ...trainer.strategies.mesh.sizes import stages_each
from ...trainer.strategies.mesh.tensor_plan import REPLICATED, read_plan
from ...trainer.strategies.model_parallel.parts import cut_task
from .memory import Payload, Traffic
from .state_size import sum_bytes

if TYPE_CHECKING:
    from ...tasks.task import Task
    from .processes import Processes
    from .state_size import Share


@dataclass(frozen=True)
class PlannedStep:
    """All that the traffic of a step depends on."""

    task: "Task"
    name: str
    """The strategy's."""
    options: Mapping[str, Any]
    processes: "Processes"
    layout: Layout
    shares: Sequence["Share"]
    batches: int
    """Batches of a process in a step."""
    one_order: bool
    """Whether gradients meet in Legato's tree."""
    run_step: Callable[[], Any]
    """Runs training_step on a batch without memory; raises ConfigError where that cannot be."""
    run_again: Callable[[], Any] | None
    """Does so with backward, which computes blocks again; None: it computes none."""

    @property
    def nodes(self) -> int:
        """Subtrees of gradients that a process sends, at most."""
        return max(len(partial_nodes(self.layout.owned(rank))) for rank in range(self.layout.processes))


def traffic_of(step: PlannedStep) -> Traffic:
    """Return the traffic of a step; raises ConfigError, with the reason, where it is unknown."""
    sizes, count = step.processes.sizes, step.processes.count
    if count == 1:
        return Traffic()
    if step.processes.servers:
        return _of_trainers(step)
    if sizes is None:
        return _of_gradients(step, count)
    if sizes.pipeline > 1:
        return _of_pipeline(step)
    return _of_layers(step) if sizes.tensor > 1 else _of_mesh(step)


def _of_gradients(step: PlannedStep, ranks: int) -> Traffic:
    """Return the traffic of ddp and what derives from it."""
    gradients = sum_bytes(_trained(step.task))
    buffers = sum_bytes(step.task.buffers()) if step.options.get("broadcast_buffers", True) else 0
    weights = sum_bytes(step.task.parameters()) if step.name == "zero1" else 0  # by the rank that updates them
    if not step.one_order:
        copies = 0 if step.options.get("gradient_as_bucket_view") else gradients
        return _traffic(copies, ("all_reduce", gradients, ranks), ("broadcast", buffers + weights, ranks))
    room = given = handed_out = 0
    for bucket in make_buckets(_trained(step.task), step.layout, 0, BUCKET_ELEMENTS):
        share = bucket.share * bucket.parameters[0].element_size()
        given, handed_out = given + ranks * step.nodes * share, handed_out + ranks * share
        room += (ranks * (step.nodes + (step.nodes > 1)) + sum(map(len, bucket.nodes_of))) * share
    buffers = sum_bytes(step.task.buffers()) + weights
    return _traffic(
        room, ("all_to_all", given, ranks), ("all_gather", handed_out, ranks), ("broadcast", buffers, ranks)
    )


def _of_trainers(step: PlannedStep) -> Traffic:
    """Return the traffic of ddp_rpc: dense gradients among trainers, calls of modules on servers and their answers."""
    count, dense = step.processes.data_size, step.shares[0].size.gradient_bytes
    modules = {name: step.task.get_submodule(name) for name in named_modules(step.task)}
    there = sum(one.given + one.given_gradients + 2 * one.returned for one in _calls(modules, step.run_step).values())
    # the gradients of all batches but the last meet by themselves
    passes = 2 if step.batches > 1 else 1
    reduced = ("all_reduce", passes * dense, count) if count > 1 else ("all_reduce", 0, 1)
    return _traffic(dense if count > 1 else 0, reduced, ("remote call", there * step.batches, 2))


def _of_mesh(step: PlannedStep) -> Traffic:
    """Return the traffic of fsdp: blocks are gathered for forward, dropped, and gathered again for backward."""
    assert step.processes.sizes is not None
    shard, data = step.processes.sizes.shard, step.processes.sizes.data
    gradients, buffers = sum_bytes(_trained(step.task)), sum_bytes(step.task.buffers())
    handed_out = "broadcast", buffers, step.processes.count
    if shard == 1:
        reduced = ("all_reduce", gradients, data) if data > 1 else ("all_reduce", 0, 1)
        return _traffic(gradients if data > 1 else 0, reduced, handed_out)
    taken: set[int] = set()
    blocks = find_sharded_blocks(step.task, step.options.get("shard_blocks", 1_000_000))
    sizes = [_own_bytes(module, taken) for module in (*blocks, step.task)]
    again, root = step.options.get("reshard_after_forward"), sizes[-1]
    gathered = sum(sizes) + (0 if again is False else sum(sizes[:-1])) + (root if again is True else 0)
    # One block is computed while the next is gathered and the gradient of another is scattered; the gradients of all
    # but the last batch of a step are added up whole.
    room = sum(sorted(sizes)[-2:]) + max(sizes) + (gradients if step.batches > 1 else 0)
    scattered = ("reduce_scatter", gradients, shard)
    if step.one_order:
        scattered, room = ("all_to_all", step.nodes * gradients, shard), room + step.nodes * max(sizes)
    reduced = ("all_reduce", -(-gradients // shard), data) if data > 1 else ("all_reduce", 0, 1)
    return _traffic(room, ("all_gather", gathered * step.batches, shard), scattered, reduced, handed_out)


def _of_layers(step: PlannedStep) -> Traffic:
    """Return the traffic of layers cut over the axis tensor: sums of a row's output, and of a column's input gradient.

    Where the stream between them is cut along the sequence, each sum is dealt out in parts; what columns take in and
    the gradient of what rows hand out are put together. The task's parameters are a rank's.
    """
    assert step.processes.sizes is not None
    parts = step.processes.sizes.tensor
    plan = read_plan(step.task, step.task.tensor_plan(), parts)
    modules = {name: step.task.get_submodule(name) for name in plan}
    calls = _calls(modules, step.run_step)
    # What is computed again ends with the last tensor that backward needs, perhaps before a block's last row.
    forwards = calls if step.run_again is None else _calls(modules, step.run_again)

    def total(kind: str, *words: str, of: Mapping[str, _Call] = calls) -> int:
        return sum(getattr(of[name], kind) for name in plan if plan[name] in words)

    summed = (total("returned", "row", of=forwards) + total("given_gradients", "column")) * step.batches
    replicated = nn.ModuleList(modules[name] for name in plan if plan[name] == REPLICATED)
    layers = [Payload("all_reduce", summed + sum_bytes(_trained(replicated)), parts)]
    if "sequence" in plan.values():
        gathered = total("given", "column", "gather", of=forwards) + total("returned", "row", "split")
        # of which a rank sees a part
        norms = nn.ModuleList(modules[name] for name in plan if plan[name] in ("sequence", REPLICATED))
        layers = [
            Payload("all_gather", gathered * step.batches, parts), Payload("reduce_scatter", summed, parts),
            Payload("all_reduce", sum_bytes(_trained(norms)), parts),
        ]  # fmt: skip
    rest = _of_mesh(step)
    most = max((one.returned if plan[name] == "row" else one.given_gradients for name, one in calls.items()), default=0)
    return Traffic(rest.buffer_bytes + most, tuple(one for one in (*layers, *rest.payloads) if one.bytes))


def _of_pipeline(step: PlannedStep) -> Traffic:
    """Return the traffic of a pipeline: activations from stage to stage, and their gradients back."""
    sizes = step.processes.sizes
    assert sizes is not None
    if sizes.shard * sizes.tensor > 1:
        raise ConfigError("stages that are cut once more send as often as torch's schedule runs them")
    options = step.options
    stages = cut_task(
        step.task, sizes.pipeline * stages_each(options.get("schedule", "1f1b")), options.get("split", "auto")
    )
    calls = _calls({str(number): stage[-1].module for number, stage in enumerate(stages[:-1])}, step.run_step)
    after = [calls[str(number)].returned for number in range(len(stages) - 1)]
    sends = [0] * sizes.pipeline
    for number, size in enumerate(after):
        for stage in (number, number + 1):  # the activations from the one, their gradients from the other
            sends[stage % sizes.pipeline] += size
    moved = ("send", max(sends) * step.batches, 2)
    if sizes.data == 1:
        return _traffic(max(sends), moved)
    most = max((share.size for share in step.shares), key=lambda size: size.gradient_bytes)
    return _traffic(max(sends), moved, ("all_reduce", most.gradient_bytes, sizes.data))


def _traffic(room: int, *payloads: tuple[str, int, int]) -> Traffic:
    return Traffic(room, tuple(Payload(*one) for one in payloads if one[1]))


@dataclass
class _Call:
    """Bytes that a module is given and returns in a step on one batch."""

    given: int = 0
    given_gradients: int = 0
    """Bytes of the inputs for which it returns a gradient."""
    returned: int = 0


def _calls(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[str, _Call]:
    """Return what each of the modules is given and returns while a step runs."""
    found = {name: _Call() for name in modules}

    def note(call: _Call, given: Any, output: Any) -> None:
        inputs, outputs = list[Tensor](), list[Tensor]()
        map_tensors(given, inputs.append)
        map_tensors(output, outputs.append)
        call.given += sum_bytes(inputs)
        call.given_gradients += sum_bytes(one for one in inputs if one.requires_grad)
        call.returned += sum_bytes(outputs)

    hooks = [
        module.register_forward_hook(lambda _, given, output, call=found[name]: note(call, given, output))
        for name, module in modules.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _trained(task: nn.Module) -> list[nn.Parameter]:
    return [one for one in task.parameters() if one.requires_grad]


def _own_bytes(module: nn.Module, taken: set[int]) -> int:
    own = {id(one): one.nbytes for one in module.parameters() if id(one) not in taken}
    taken.update(own)
    return sum(own.values())
