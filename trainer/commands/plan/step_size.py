"""Measures the activations of a task's step, and finds what its strategy gathers and sends.

Activations are what autograd keeps of a forward of the real task. Its parameters and its batch are fake: they have
shapes and types, and no memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...data.transfer import map_tensors
from ...hooks import count_arguments
from ...optimization.kernels import Recomputing, modules_named
from ...strategies.mesh.dtensors import replace
from ...torch_private import faking_tensors
from .memory import Activations, Traffic

if TYPE_CHECKING:
    from ....tasks.task import Task
    from .processes import Processes
    from .state_size import StateSize


class SavedBytes:
    """Counts the bytes of tensors that autograd saves, each memory once, but for those of given tensors."""

    def __init__(self, but: Iterable[Tensor]) -> None:
        # kept alive, so that ids stay unique
        self.known = {id(one): one for one in map(Tensor.untyped_storage, but)}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that is saved."""
        storage = tensor.untyped_storage()
        if id(storage) not in self.known:
            self.known[id(storage)] = storage
            self.bytes += storage.nbytes()
        return tensor


def measure_activations(task: "Task", batch: Any, blocks: tuple[str, ...], mixed: bool = False) -> Activations:
    """Return the activations of a batch of the task, which is on the meta device.

    blocks: the classes to recompute; (): the class of most blocks.
    mixed: in 16 bits, where autocast takes them.

    Raises whatever training_step raises: it may need values, or a run.
    """
    with _fake_parts(task, batch) as (step, fake):
        half = mixed and fake.device != "meta"
        with torch.autocast(fake.device, torch.bfloat16) if half else nullcontext():
            blocks = blocks or find_blocks(task)
            plain, largest = _saved(task, step, fake.tensors, modules_named(task, blocks, "blocks") if blocks else [])
            if not blocks:
                return Activations(plain)
            recomputing = Recomputing(task, blocks)
            try:
                kept, _ = _saved(task, step, fake.tensors, [])
            finally:
                recomputing.undo()
    return Activations(plain, kept + largest, blocks)


@dataclass
class _Fake:
    device: str
    tensors: list[Tensor]


@contextmanager
def _fake_parts(task: "Task", batch: Any) -> Iterator[tuple[Callable[[], Any], _Fake]]:
    """Give a task fake parameters and no log within this context; yield its step on a fake batch, and the latter."""
    arity, kept = count_arguments(task, "training_step"), list[Tensor]()
    before: dict[int, Tensor] = {}
    width = next((one.dtype for one in task.parameters() if one.is_floating_point()), torch.float32)

    with faking_tensors() as device:

        def change(tensor: Tensor) -> Tensor:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            kept.append(nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new)
            before[id(kept[-1])] = tensor
            return kept[-1]

        def fake(tensor: Tensor) -> Tensor:
            dtype = width if tensor.is_floating_point() else tensor.dtype
            found.tensors.append(torch.empty(tensor.shape, dtype=dtype, device=device))
            return found.tensors[-1]

        found = _Fake(device, [])
        fake_batch = map_tensors(batch, fake)
        replace(task, change)
        task.__dict__["log"] = task.__dict__["log_dict"] = lambda *_, **__: None
        try:
            yield lambda: task.training_step(*(fake_batch, 0)[:arity]), found
        finally:
            del task.__dict__["log"], task.__dict__["log_dict"]
            replace(task, lambda tensor: before[id(tensor)])


def _saved(
    task: nn.Module, step: Callable[[], Any], batch: list[Tensor], blocks: Sequence[nn.Module]
) -> tuple[int, int]:
    """Return the bytes of the batch and of what a forward saves, and the most that one of the blocks saves."""
    saved, largest = SavedBytes([*task.parameters(), *task.buffers(), *batch]), 0
    entered: list[tuple[int, list[torch.UntypedStorage]]] = []

    def enter(_: nn.Module, inputs: Any) -> None:
        new: list[torch.UntypedStorage] = []
        map_tensors(inputs, lambda one: new.append(one.untyped_storage()))
        entered.append((saved.bytes, [one for one in new if id(one) not in saved.known]))

    def leave(*_: Any) -> None:
        nonlocal largest
        before, inputs = entered.pop()
        kept = sum(one.nbytes() for one in inputs if id(one) in saved.known)  # recomputing keeps them, too
        largest = max(largest, saved.bytes - before - kept)

    hooks = [
        hook
        for block in blocks
        for hook in (block.register_forward_pre_hook(enter), block.register_forward_hook(leave))
    ]
    try:
        with torch.enable_grad(), saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            kept = step()
        del kept
    finally:
        for hook in hooks:
            hook.remove()
    return saved.bytes + sum(one.untyped_storage().nbytes() for one in batch), largest


def find_blocks(task: nn.Module) -> tuple[str, ...]:
    """Return the class that is most often the child of a list or sequence of modules, if it has parts of its own."""
    counts: Counter[str] = Counter()
    for module in task.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts.update(type(one).__name__ for one in module if any(True for _ in one.children()))
    return tuple(name for name, count in counts.most_common(1) if count > 1)


def traffic_of(
    task: "Task", name: str, options: Mapping[str, Any], processes: "Processes", state: "StateSize", batches: int
) -> Traffic | None:
    """Return the traffic of a strategy; None where it is not known, since the model is cut or the strategy another.

    batches: of a step on each process.
    """
    sizes = processes.sizes
    buffers = state.buffer_bytes if options.get("broadcast_buffers", True) else 0
    if processes.count == 1:
        return Traffic()
    if sizes is not None and sizes.tensor * sizes.pipeline == 1:
        return _of_mesh(task, options, sizes.shard, sizes.data, state, batches)
    if sizes is not None or name not in ("auto", "ddp", "zero1"):
        return None
    copies = 0 if options.get("gradient_as_bucket_view") else state.gradient_bytes
    payloads = [("all_reduce", state.gradient_bytes), ("broadcast", buffers)]
    if name == "zero1":
        payloads[1] = "broadcast", buffers + state.parameter_bytes  # by the rank that updates them
    return Traffic(copies, tuple(one for one in payloads if one[1]))


def _of_mesh(
    task: "Task", options: Mapping[str, Any], shard: int, data: int, state: "StateSize", batches: int
) -> Traffic:
    """Return the traffic of fsdp: blocks are gathered for forward, dropped, and gathered again for backward."""
    from ...strategies.mesh.sharding import find_sharded_blocks

    if shard == 1:
        return Traffic(state.gradient_bytes, (("all_reduce", state.gradient_bytes),))
    blocks = find_sharded_blocks(task, options.get("shard_blocks", 1_000_000))
    taken: set[int] = set()
    sizes = [_own_bytes(module, taken) for module in (*blocks, task)]
    again, root = options.get("reshard_after_forward"), sizes[-1]
    gathered = sum(sizes) + (0 if again is False else sum(sizes[:-1])) + (root if again is True else 0)
    payloads = [("all_gather", gathered * batches), ("reduce_scatter", state.gradient_bytes)]
    if data > 1:
        payloads.append(("all_reduce", -(-state.gradient_bytes // shard)))
    payloads += [("broadcast", state.buffer_bytes)] if state.buffer_bytes else []
    # One block is computed while the next is gathered and the gradient of another is scattered; the gradients of all
    # but the last batch of a step are added up whole.
    buffers = sum(sorted(sizes)[-2:]) + max(sizes) + (state.gradient_bytes if batches > 1 else 0)
    return Traffic(buffers, tuple(payloads))


def _own_bytes(module: nn.Module, taken: set[int]) -> int:
    own = {id(one): one.nbytes for one in module.parameters() if id(one) not in taken}
    taken.update(own)
    return sum(own.values())
