"""Handling of NaN and infinity: skipped steps, refused checkpoints, and a search for the first bad tensor."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.randomness import seed_generators
from ..data.sampling import mix
from ..errors import ConfigError, NonFiniteError
from ..metrics.log import PENDING_LIMIT
from ..metrics.reduce import Reduced, to_floats
from ..torch_private import local_part, mark_stepped

if TYPE_CHECKING:
    from ..data.steps import ReplicaBatch
    from ..run import JoinedCall, Run
    from .optimization import Optimization

log = logging.getLogger("legato")

SHOWN = 6
"""Number of names listed in a message."""


class StepGuard:
    """Check of the gradients before a step changes the weights."""

    needs_losses = False
    """Whether the losses of the step must be watched."""

    def __init__(self, call: "JoinedCall", optimization: "Optimization") -> None:
        self.trainer, self.optimization = call.trainer, optimization

    def begin_step(self) -> None:
        """Prepare for a step, before its first forward."""

    def drops_step(self) -> bool:
        """Return whether to skip the update, once the gradient of the whole step is complete."""
        raise NotImplementedError

    def report(self, reduced: Reduced) -> None:
        """Add values to a logging point."""


class FirstStepGuard(StepGuard):
    """Checks the first step's loss at once, for `nan: raise`; later losses are checked at logging points."""

    def drops_step(self) -> bool:
        """Return False, or raise NonFiniteError."""
        self.optimization.guard = None  # a check of every step would wait for the device
        self.trainer.current_run.check_losses()
        return False


class SkippingGuard(StepGuard):
    """Skips steps with a non-finite gradient, for `nan: skip`.

    The reduced gradients are the same on every rank, so all ranks skip the same steps without a collective. Buffers,
    torchmetrics states and logged values of a skipped step are rolled back. The step still counts.
    """

    def __init__(self, call: "JoinedCall", optimization: "Optimization") -> None:
        super().__init__(call, optimization)
        if not call.task.automatic_optimization:
            raise ConfigError(
                "trainer.nan=skip skips the update of a step, which manual optimization leaves to training_step: check "
                "the gradients there, before optimizer.step(), or set nan to raise or ignore."
            )
        self.task, self.state, self.strategy, self.metrics = call.task, call.state, call.strategy, call.metrics
        groups = [group for optimizer in optimization.optimizers for group in optimizer.param_groups]
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.buffers: list[Tensor] = []
        self.before: list[Tensor] = []
        self.metrics_before = self.metrics.states.snapshot()
        # A scaled gradient may overflow harmlessly; only a non-finite loss shows a real problem.
        self.needs_losses = self.strategy.precision.scaler is not None

    def begin_step(self) -> None:
        """Snapshot everything that a step changes besides the weights."""
        metrics = self.metrics
        if len(metrics.pending) > PENDING_LIMIT // 2:
            metrics.flush()  # a flush within the step would make its values impossible to drop
        metrics.losses.clear()
        self.metrics_before = metrics.states.snapshot()
        self.buffers = list(self.task.buffers())
        self.before = [buffer.detach().clone() for buffer in self.buffers]

    def drops_step(self) -> bool:
        """Return whether the step is skipped. Raises NonFiniteError after too many in a row."""
        metrics, state = self.metrics, self.state
        if self.strategy.reducer.are_finite(self.parameters) or not self._is_to_blame():
            state.skipped_in_a_row = 0
            return False
        with torch.no_grad():
            for buffer, value in zip(self.buffers, self.before, strict=True):
                buffer.copy_(value)
        metrics.drop_step()
        metrics.states.restore(self.metrics_before)
        for optimizer in self.optimization.optimizers:
            mark_stepped(optimizer)  # else a scheduler warns that it ran before the first optimizer step
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        limit = self.trainer.nan_skips
        if state.skipped_in_a_row > limit:
            step, skipped = state.global_step + 1, state.skipped_in_a_row
            error = NonFiniteError(
                f"{skipped} steps in a row, up to step {step}, had a gradient that is not finite; nan_skips={limit} "
                f"allows {limit}. Lower the learning rate or clip gradients (gradient_clip_val). The weights are those "
                f"of step {step - skipped}."
            )
            raise explained(self.trainer.current_run, error)
        return True

    def _is_to_blame(self) -> bool:
        """Return whether the loss is non-finite, rather than only its scaled gradient."""
        if self.strategy.precision.scaler is None:
            return True
        values = to_floats([loss for loss, _ in self.metrics.losses])
        bad = torch.tensor([float(any(value - value != 0.0 for value in values))])
        return bool(self.strategy.collectives.all_reduce(bad, "max").item())

    def report(self, reduced: Reduced) -> None:
        """Add the number of skipped steps to a logging point."""
        reduced.all["skipped_steps"] = reduced.loggers["skipped_steps"] = float(self.state.skipped_steps)


def make_guard(call: "JoinedCall", optimization: "Optimization") -> StepGuard | None:
    """Return the guard for the argument `nan`, or None."""
    kinds: dict[str, type[StepGuard]] = {"raise": FirstStepGuard, "skip": SkippingGuard}
    return kinds[call.trainer.nan](call, optimization) if call.trainer.nan in kinds else None


def bad_weights(run: "Run") -> list[str]:
    """Return the names of non-finite trained parameters, of this rank or else of another one. Collective.

    Frozen parameters and buffers may be infinite on purpose, as masks are.
    """
    trained = {name: parameter for name, parameter in run.task.named_parameters() if parameter.requires_grad}
    names = [] if are_finite(trained.values()) else [name for name, value in trained.items() if not are_finite([value])]
    if run.strategy.place.world_size == 1:
        return names
    if not run.strategy.collectives.all_reduce(torch.tensor([float(bool(names))]), "max").item():
        return []
    return names or next(names for names in run.strategy.collectives.gather_objects(names) if names)


def require_finite(run: "Run") -> None:
    """Raise NonFiniteError if the weights to save are not finite; with `nan: ignore` only warn. Collective."""
    run.check_losses()
    bad = bad_weights(run)
    if not bad:
        return
    what = f"The weights after step {run.state.global_step} are not finite: {first_names(bad)}."
    if run.trainer.nan != "ignore":
        raise NonFiniteError(
            f"{what} They were not saved; earlier checkpoints are untouched. Resume from one of those with a "
            f"lower learning rate, or with gradient_clip_val."
        )
    if run.trainer.is_global_zero:
        log.warning("%s They are saved all the same (nan=ignore).", what)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of some tensors are finite, with one host sync per device."""
    # of a DTensor only this rank's shard
    local = (local_part(tensor).detach() for tensor in tensors)
    values = [tensor for tensor in local if tensor.is_floating_point() and tensor.numel()]
    values = [value.coalesce().values() if value.is_sparse else value for value in values]
    on_host = [value for value in values if value.is_cpu]
    # A finite sum has finite terms, and on a CPU takes a tenth of a norm's time. It may overflow, so look again.
    sums = [value.sum(dtype=torch.float32 if value.dtype.itemsize < 4 else None) for value in on_host]
    suspects = [value for value, total in zip(on_host, to_floats(sums), strict=True) if total - total != 0.0]
    elsewhere = [value for value in values if not value.is_cpu]
    largest = [nn.utils.get_total_norm(some, float("inf")) for some in (suspects, elsewhere) if some]
    return all(bool(one.isfinite()) for one in largest)


def first_names(names: list[str]) -> str:
    """Join the first names, and say how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def explained(run: "Run", error: NonFiniteError) -> NonFiniteError:
    """Return the error extended by a diagnosis of the newest batch and the task. Collective.

    The diagnosis comes from the first rank with a non-finite loss, else from the first rank with findings.
    """
    try:
        findings = [*diagnose_forward(run), *diagnose_task(run.task)]
    except Exception as problem:  # must not hide the error that it explains
        findings = [f"The diagnosis failed with {type(problem).__name__}: {problem}."]
    first = 2**62 if run.metrics.bad_loss is None else run.metrics.bad_loss[0]
    ranks = run.strategy.collectives.gather_objects((first, not findings, run.strategy.place.rank, findings))
    _, _, rank, findings = min(ranks, key=lambda one: one[:3])
    if not findings:
        return error
    head = f"Rank {rank}: " if len(ranks) > 1 else ""
    return NonFiniteError(f"{error} {head}{' '.join(findings)}")


def diagnose_task(task: nn.Module) -> list[str]:
    """List the non-finite parameters, gradients and buffers."""
    gradients = [(name, parameter.grad) for name, parameter in task.named_parameters() if parameter.grad is not None]
    found = []
    for what, tensors in (
        ("parameters", list(task.named_parameters())),
        ("gradients", gradients),
        ("buffers", list(task.named_buffers())),
    ):
        bad = [name for name, tensor in tensors if not are_finite([tensor])]
        if bad:
            found.append(f"{len(bad)} of {len(tensors)} {what} ({first_names(bad)})")
    findings = [f"Not finite are {'; '.join(found)}."] if found else []
    if not are_finite(task.parameters()):
        findings.append(
            "To see where it began, go on from the newest checkpoint with nan=skip and nan_skips=0: the same steps "
            "come again, and the run ends at the first bad one, with its weights as they were."
        )
    return findings


def diagnose_forward(run: "Run") -> list[str]:
    """Re-run the newest batch and describe the first module with a non-finite output."""
    turns = run.loop.step.turns if run.loop.step is not None else []
    # A forward may be collective (SyncBatchNorm, all_gather), so either all ranks run it or none.
    able = torch.tensor([float(bool(turns) and run.optimization.automatic)])
    if not run.strategy.collectives.all_reduce(able, "min").item():
        return []
    turn = turns[-1]
    batch = turn.batch if run.transfer is None else run.transfer(turn.batch, 0)
    bad = [place for place, tensor in named_tensors(batch) if not are_finite([tensor])]
    # likewise if any rank's batch is bad already
    if run.strategy.collectives.all_reduce(torch.tensor([float(bool(bad))]), "max").item() and not bad:
        return []
    if bad:
        return [f"The newest batch (batch_idx {turn.batch_idx}) is not finite itself: {first_names(bad)}."]
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


def first_bad_module(run: "Run", turn: "ReplicaBatch", batch: Any) -> tuple[str, nn.Module, bool] | None:
    """Re-run training_step on a batch; return the first module with a NaN output, else with an infinite one.

    The bool tells whether that module's input was finite.
    """
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
        if run.data.keys_forward:
            seed_generators(mix(run.state.seed, run.metrics.step, turn.replica, turn.batch_idx))
        # it may fail on such numbers; the hooks' findings until then count
        with suppress(Exception):
            run.strategy.repeat_step((batch, turn.batch_idx)[: run.arity])
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
