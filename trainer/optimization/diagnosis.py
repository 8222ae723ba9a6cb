"""Searches for NaN and infinite values: in weights before they are saved, and in the latest batch's tensors."""

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
    """Return the names of this rank's non-finite trainable parameters, or another rank's if this rank has none.

    All ranks must call this.

    Frozen parameters and buffers are not checked, because they may be infinite on purpose, as in masks.
    """
    named, ranks = trainer.task.named_parameters(), trainer.strategy.collectives
    names = bad_names({name: parameter for name, parameter in named if parameter.requires_grad})
    # names are gathered only if some rank has any, since every save runs this and one number is cheaper
    return next(filter(None, [names, *ranks.gather_objects(names)])) if ranks.any(bool(names)) else []


def require_finite(trainer: "Trainer") -> None:
    """Raise NonFiniteError if the weights to save are not finite. With `nan: ignore`, only warn.

    All ranks must call this.
    """
    # losses first: their error identifies the step that went wrong, which bad weights don't show
    trainer.current_run.check_losses()
    bad = bad_weights(trainer)
    if not bad:
        return
    problem = f"The weights after step {trainer.global_step} are not finite: {first_names(bad)}."
    if trainer.nan != "ignore":
        raise NonFiniteError(
            f"{problem} They were not saved, and earlier checkpoints are untouched. Resume from an earlier checkpoint "
            f"with a lower learning rate or with gradient_clip_val set."
        )
    if trainer.is_global_zero:
        log.warning("%s They are saved anyway (nan=ignore).", problem)


def explained(trainer: "Trainer", error: NonFiniteError) -> NonFiniteError:
    """Return the error, extended with a diagnosis of the latest batch and the task. All ranks must call this.

    The diagnosis comes from the rank with the earliest non-finite loss. If all losses are finite, it comes from the
    first rank with findings.
    """
    try:
        findings = [*diagnose_forward(trainer), *diagnose_task(trainer.task)]
    except Exception as problem:  # must not hide the original error
        findings = [f"The diagnosis failed with {type(problem).__name__}: {problem}."]
    # 2**62, after every step: a rank with finite losses reports only if no rank had a bad loss
    bad_loss = trainer.metrics.bad_loss
    first = 2**62 if bad_loss is None else bad_loss[0]
    ranks = trainer.strategy.collectives.gather_objects((first, not findings, trainer.global_rank, findings))
    # the earliest bad loss, then a rank with findings, then the lowest rank: all ranks make the same choice
    _, _, rank, findings = min(ranks, key=lambda report: report[:3])
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
    findings = [f"Not finite: {'; '.join(parts)}."] if parts else []
    if "parameters" in bad:
        findings.append(
            "To find the origin, resume from the newest checkpoint with nan=skip and nan_skips=0. The run repeats the "
            "same steps and ends before the first update with a non-finite gradient."
        )
    return findings


def diagnose_forward(trainer: "Trainer") -> list[str]:
    """Rerun the latest batch and describe the first module with a non-finite output."""
    run, ranks = trainer.current_run, trainer.strategy.collectives
    batches = run.loop.step.batches if run.loop.step is not None else []
    # a forward pass may be collective (SyncBatchNorm, all_gather), so either all ranks run it or none
    if ranks.any(not batches or not run.optimization.automatic):
        return []
    item = batches[-1]
    batch = item.batch if run.transfer is None else run.transfer(item.batch, 0)
    bad = bad_names(dict(named_tensors(batch)))
    # also skipped on all ranks if any rank's batch is already bad
    if ranks.any(bool(bad)):
        place = f"The latest batch (batch_idx {item.batch_idx})"
        return [f"{place} itself contains non-finite values: {first_names(bad)}."] if bad else []
    culprit = first_bad_module(trainer, item, batch)
    if culprit is None:
        return []
    name, module, input_is_finite = culprit
    label = f"{name or 'the task'} ({type(module).__name__})"
    if not are_finite(module.parameters(recurse=False)):
        reason = "whose parameters are not finite"
    else:
        reason = "given finite input" if input_is_finite else "given non-finite input that no module produced"
    place = f"In the latest batch (batch_idx {item.batch_idx})"
    return [f"{place}, the first non-finite output came from {label}, {reason}."]


def first_bad_module(trainer: "Trainer", item: ReplicaBatch, batch: Any) -> tuple[str, nn.Module, bool] | None:
    """Rerun training_step on a batch. Return the first module whose output contains NaN or, failing that, infinity.

    The returned bool is True if this module's input was finite.
    """
    run = trainer.current_run
    by_kind: dict[bool, tuple[str, nn.Module, bool]] = {}

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = dict(named_tensors(output))
        if bad_names(outputs):
            is_nan = any(bool(tensor.isnan().any()) for tensor in outputs.values())
            # a NaN takes precedence over an earlier infinity, which may come from a mask
            by_kind.setdefault(is_nan, (name, module, not bad_names(dict(named_tensors(inputs)))))

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: look(name, module, inputs, output))
        for name, module in run.task.named_modules()
    ]
    try:
        if run.data.keys_forward:
            # the batch's step: state.global_step may be larger by now, and would change dropout
            seed_generators(mix(run.state.seed, run.metrics.step, item.replica, item.batch_idx))
        # the step may raise on such numbers; the hooks have seen the modules before that
        with suppress(Exception):
            run.strategy.evaluation_step("training_step", (batch, item.batch_idx)[: run.arity])
    finally:
        for handle in handles:
            handle.remove()
    return by_kind.get(True, by_kind.get(False))


def named_tensors(value: Any, place: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each floating-point tensor in a batch or in a step's output."""
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
