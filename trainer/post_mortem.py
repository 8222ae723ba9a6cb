"""What can be said of a run whose numbers are not finite: the module, the parameters and the batch where it shows."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .data.sampling import mix
from .errors import NonFiniteError
from .finite import are_finite, few
from .randomness import seed_generators

if TYPE_CHECKING:
    from .data.steps import Turn
    from .run import Run


def explained(run: "Run", error: NonFiniteError) -> NonFiniteError:
    """Return the error with what one more forward of the newest batch and a look over the task tell about it.

    Every rank calls it, at the same moment. What is told is of the first rank whose loss was not finite, else of the
    first one that has something to tell.
    """
    try:
        findings = [*look_at_forward(run), *look_at_task(run.task)]
    except Exception as problem:  # the error that is being explained matters more
        findings = [f"The post mortem failed with {type(problem).__name__}: {problem}."]
    first = 2**62 if run.metrics.bad_loss is None else run.metrics.bad_loss[0]
    ranks = run.strategy.gather_objects((first, not findings, run.strategy.place.rank, findings))
    _, _, rank, told = min(ranks, key=lambda one: one[:3])
    if not told:
        return error
    head = f"Rank {rank}: " if len(ranks) > 1 else ""
    return NonFiniteError(f"{error} {head}{' '.join(told)}")


def look_at_task(task: nn.Module) -> list[str]:
    """Say which parameters, gradients and buffers are not finite."""
    gradients = [(name, parameter.grad) for name, parameter in task.named_parameters() if parameter.grad is not None]
    found = []
    for what, tensors in (
        ("parameters", list(task.named_parameters())),
        ("gradients", gradients),
        ("buffers", list(task.named_buffers())),
    ):
        bad = [name for name, tensor in tensors if not are_finite([tensor])]
        if bad:
            found.append(f"{len(bad)} of {len(tensors)} {what} ({few(bad)})")
    told = [f"Not finite are {'; '.join(found)}."] if found else []
    if not are_finite(task.parameters()):
        told.append(
            "To see where it began, go on from the newest checkpoint with nan=skip and nan_skips=0: the same steps "
            "come again, and the run ends at the first bad one, with its weights as they were."
        )
    return told


def look_at_forward(run: "Run") -> list[str]:
    """Run the newest batch once more, and say where it first stops being finite."""
    turns = run.step.turns if run.step is not None else []
    # Forwards may meet other ranks (SyncBatchNorm, all_gather), so all ranks have one more or none has.
    able = torch.tensor([float(bool(turns) and run.optimization.automatic)])
    if not run.strategy.all_reduce(able, "min").item():
        return []
    turn = turns[-1]
    batch = turn.batch if run.transfer is None else run.transfer(turn.batch, 0)
    bad = [place for place, tensor in named_tensors(batch) if not are_finite([tensor])]
    # nor where one has nothing to look for in it
    if run.strategy.all_reduce(torch.tensor([float(bool(bad))]), "max").item() and not bad:
        return []
    if bad:
        return [f"The newest batch (batch_idx {turn.batch_idx}) is not finite itself: {few(bad)}."]
    found = first_bad_module(run, turn, batch)
    if found is None:
        return []
    name, module, input_is_finite = found
    what = f"{name or 'the task'} ({type(module).__name__})"
    if not are_finite(module.parameters(recurse=False)):
        why = "whose parameters are not finite"
    else:
        why = "from finite input" if input_is_finite else "from input that was not finite before any module saw it"
    where = f"In the newest batch (batch_idx {turn.batch_idx})"
    return [f"{where} the first output that is not finite is that of {what}, {why}."]


def first_bad_module(run: "Run", turn: "Turn", batch: Any) -> tuple[str, nn.Module, bool] | None:
    """Return the first module whose output is NaN, else infinite, in one more training_step of a batch."""
    by_kind: dict[bool, tuple[str, nn.Module, bool]] = {}

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [tensor for _, tensor in named_tensors(output)]
        if not are_finite(tensors):
            is_nan = any(bool(tensor.isnan().any()) for tensor in tensors)
            given = [tensor for _, tensor in named_tensors(inputs)]
            by_kind.setdefault(is_nan, (name, module, are_finite(given)))

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: look(name, module, inputs, output))
        for name, module in run.task.named_modules()
    ]
    try:
        if run.keys_forward:
            seed_generators(mix(run.state.seed, run.metrics.step, turn.replica, turn.batch_idx))
        # it may fail in its own way with such numbers; what the hooks saw until then counts
        with suppress(Exception):
            run.strategy.repeat_step((batch, turn.batch_idx)[: run.arity])
    finally:
        for handle in handles:
            handle.remove()
    return by_kind.get(True, by_kind.get(False))


def named_tensors(value: Any, place: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating point tensors of a batch or an output, each with its place in it."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{place}[{index}]")
    elif is_dataclass(value):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name), f"{place}.{field.name}")
