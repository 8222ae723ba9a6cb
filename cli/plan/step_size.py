"""Measures the activations of a task's step.

Activations are what autograd keeps of a forward of the real task. Its parameters and its batch are fake: they have
shapes and types, and no memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...base.torch_private import faking_tensors
from ...trainer.data.transfer import map_tensors
from ...trainer.hooks import count_arguments
from ...trainer.optimization.kernels import Recomputing, find_blocks, modules_named
from ...trainer.strategies.mesh.dtensors import replace
from .memory import Activations

if TYPE_CHECKING:
    from ...tasks.task import Task


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

    def run(
        self,
        step: Callable[[], Any],
        spans: Sequence[tuple[nn.Module, nn.Module]] = (),
        enter: Callable[..., None] | None = None,
        leave: Callable[..., None] | None = None,
    ) -> None:
        """Count what a step saves; call `enter` before the first module of each span, and `leave` after the last."""
        hooks = [first.register_forward_pre_hook(enter) for first, _ in spans if enter]
        hooks += [last.register_forward_hook(leave) for _, last in spans if leave]
        try:
            with saved_tensors_hooks(self.pack, lambda tensor: tensor):
                kept = step()
            del kept
        finally:
            for hook in hooks:
                hook.remove()


Counted = Callable[["Task", Callable[[], Any], list[Tensor]], Activations]
"""Returns the activations of a task's step on a batch of these tensors."""


def measure_activations(
    task: "Task", batch: Any, blocks: tuple[str, ...], mixed: bool = False, count: Counted | None = None
) -> Activations:
    """Return the activations of a batch of the task, which is on the meta device.

    blocks: the classes to recompute; (): the class of most blocks.
    mixed: in 16 bits, where autocast takes them.
    count: returns those of a step; by default all that it saves.

    Raises whatever training_step raises: it may need values, or a run.
    """
    count = count or _count_all
    with fake_step(task, batch, mixed) as (step, tensors):
        blocks, plain = blocks or find_blocks(task), count(task, step, tensors)
        if not blocks:
            return plain
        largest = _largest(task, step, tensors, modules_named(task, blocks, "blocks"))
        recomputing = Recomputing(task, blocks)
        try:
            kept = count(task, step, tensors)
        finally:
            recomputing.undo()
    return replace_fields(plain, recomputed=kept.plain + largest, blocks=blocks)


@contextmanager
def fake_step(task: "Task", batch: Any, mixed: bool) -> Iterator[tuple[Callable[[], Any], list[Tensor]]]:
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
            found.append(torch.empty(tensor.shape, dtype=dtype, device=device))
            return found[-1]

        found = list[Tensor]()
        half = mixed and device != "meta"
        fake_batch = map_tensors(batch, fake)
        replace(task, change)
        task.__dict__["log"] = task.__dict__["log_dict"] = lambda *_, **__: None
        try:
            with torch.enable_grad(), torch.autocast(device, torch.bfloat16) if half else nullcontext():
                yield lambda: task.training_step(*(fake_batch, 0)[:arity]), found
        finally:
            del task.__dict__["log"], task.__dict__["log_dict"]
            replace(task, lambda tensor: before[id(tensor)])


def run_recomputing(task: "Task", step: Callable[[], Any], names: tuple[str, ...]) -> None:
    """Run a step and its backward, which computes again the blocks of these classes."""
    recomputing = Recomputing(task, names)
    try:
        output = step()
        loss = output["loss"] if isinstance(output, Mapping) else output
        torch.autograd.backward(loss if isinstance(loss, list | tuple) else (loss,))
    finally:
        recomputing.undo()


def _count_all(task: "Task", step: Callable[[], Any], batch: list[Tensor]) -> Activations:
    saved = SavedBytes([*task.parameters(), *task.buffers(), *batch])
    saved.run(step)
    return Activations(saved.bytes + sum(one.untyped_storage().nbytes() for one in batch))


def _largest(task: nn.Module, step: Callable[[], Any], batch: list[Tensor], blocks: Sequence[nn.Module]) -> int:
    """Return the most bytes that one of the blocks saves."""
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

    saved.run(step, [(block, block) for block in blocks], enter, leave)
    return largest
