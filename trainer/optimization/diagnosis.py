"""Search for NaN and infinity in a run: refused checkpoints, and the first bad tensor of the newest batch."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...base.errors import NonFiniteError, first_names
from ..data.randomness import seed_generators
from ..data.sampling import mix
from ..data.steps import ReplicaBatch
from .finite import are_finite, bad_names

if TYPE_CHECKING:
    from ...base.contracts import Trainer

log = logging.getLogger("legato")


def bad_weights(trainer: "Trainer") -> list[str]:
    """Return the names of non-finite trained parameters, of this rank or else of another one. Collective.

    Frozen parameters and buffers may be infinite on purpose, as masks are.
    """
    named, ranks = trainer.task.named_parameters(), trainer.strategy.collectives
    names = bad_names({name: parameter for name, parameter in named if parameter.requires_grad})
    # names are gathered only where some rank has any: one number is cheaper in each save
    return next(filter(None, [names, *ranks.gather_objects(names)])) if ranks.any(bool(names)) else []


def require_finite(trainer: "Trainer") -> None:
    """Raise NonFiniteError if the weights to save are not finite; with `nan: ignore` only warn. Collective."""
    # losses first: their error names the step that went wrong, which weights that are bad by now do not tell
    trainer.current_run.check_losses()
    bad = bad_weights(trainer)
    if not bad:
        return
    what = f"The weights after step {trainer.global_step} are not finite: {first_names(bad)}."
    if trainer.nan != "ignore":
        raise NonFiniteError(
            f"{what} They were not saved; earlier checkpoints are untouched. Resume from one of those with a "
            f"lower learning rate, or with gradient_clip_val."
        )
    if trainer.is_global_zero:
        log.warning("%s They are saved all the same (nan=ignore).", what)


def explained(trainer: "Trainer", error: NonFiniteError) -> NonFiniteError:
    """Return the error extended by a diagnosis of the newest batch and the task. Collective.

    The diagnosis comes from the first rank with a non-finite loss, else from the first rank with findings.
    """
    try:
        findings = [*diagnose_forward(trainer), *diagnose_task(trainer.task)]
    except Exception as problem:  # must not hide the error that it explains
        findings = [f"The diagnosis failed with {type(problem).__name__}: {problem}."]
    # after every step: a rank whose own losses were finite speaks only where all ranks' were
    bad_loss = trainer.metrics.bad_loss
    first = 2**62 if bad_loss is None else bad_loss[0]
    ranks = trainer.strategy.collectives.gather_objects((first, not findings, trainer.global_rank, findings))
    # the earliest bad loss, then a rank with findings, then the lowest: all ranks choose the same
    _, _, rank, findings = min(ranks, key=lambda one: one[:3])
    if not findings:
        return error
    head = f"Rank {rank}: " if len(ranks) > 1 else ""
    return NonFiniteError(f"{error} {head}{' '.join(findings)}")


def diagnose_task(task: nn.Module) -> list[str]:
    """List the non-finite parameters, gradients and buffers."""
    parameters = dict(task.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    buffers = dict(task.named_buffers())
    kinds: dict[str, Mapping[str, Tensor]] = {"parameters": parameters, "gradients": gradients, "buffers": buffers}
    bad = {kind: names for kind, tensors in kinds.items() if (names := bad_names(tensors))}
    parts = [f"{len(names)} of {len(kinds[kind])} {kind} ({first_names(names)})" for kind, names in bad.items()]
    findings = [f"Not finite are {'; '.join(parts)}."] if parts else []
    if "parameters" in bad:
        findings.append(
            "To see where it began, go on from the newest checkpoint with nan=skip and nan_skips=0: the same steps "
            "come again, and the run ends at the first bad one, with its weights as they were."
        )
    return findings


def diagnose_forward(trainer: "Trainer") -> list[str]:
    """Re-run the newest batch and describe the first module with a non-finite output."""
    run, ranks = trainer.current_run, trainer.strategy.collectives
    batches = run.loop.step.batches if run.loop.step is not None else []
    # A forward may be collective (SyncBatchNorm, all_gather), so either all ranks run it or none.
    if ranks.any(not batches or not run.optimization.automatic):
        return []
    item = batches[-1]
    batch = item.batch if run.transfer is None else run.transfer(item.batch, 0)
    bad = bad_names(dict(named_tensors(batch)))
    # Also skipped on all ranks if any rank's batch is bad already.
    if ranks.any(bool(bad)):
        place = f"The newest batch (batch_idx {item.batch_idx})"
        return [f"{place} is not finite itself: {first_names(bad)}."] if bad else []
    found = first_bad_module(trainer, item, batch)
    if found is None:
        return []
    name, module, input_is_finite = found
    what = f"{name or 'the task'} ({type(module).__name__})"
    if not are_finite(module.parameters(recurse=False)):
        why = "whose parameters are not finite"
    else:
        why = "from finite input" if input_is_finite else "from input that was not finite before any module saw it"
    where = f"In the newest batch (batch_idx {item.batch_idx})"
    return [f"{where} the first output that is not finite is that of {what}, {why}."]


def first_bad_module(trainer: "Trainer", item: ReplicaBatch, batch: Any) -> tuple[str, nn.Module, bool] | None:
    """Re-run training_step on a batch; return the first module with a NaN output, else with an infinite one.

    The bool tells whether that module's input was finite.
    """
    run = trainer.current_run
    by_kind: dict[bool, tuple[str, nn.Module, bool]] = {}

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = dict(named_tensors(output))
        if bad_names(outputs):
            is_nan = any(bool(tensor.isnan().any()) for tensor in outputs.values())
            # the first NaN is blamed before an earlier infinity, which a mask may hold on purpose
            by_kind.setdefault(is_nan, (name, module, not bad_names(dict(named_tensors(inputs)))))

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: look(name, module, inputs, output))
        for name, module in run.task.named_modules()
    ]
    try:
        if run.data.keys_forward:
            # the batch's own step: the state may have counted on since, and dropout would leave out other values
            seed_generators(mix(run.state.seed, run.metrics.step, item.replica, item.batch_idx))
        # it may fail on such numbers; the hooks' findings until then count
        with suppress(Exception):
            run.strategy.evaluation_step("training_step", (batch, item.batch_idx)[: run.arity])
    finally:
        for handle in handles:
            handle.remove()
    return by_kind.get(True, by_kind.get(False))


def named_tensors(value: Any, place: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating point tensors of a batch or an output, each with its path."""
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
