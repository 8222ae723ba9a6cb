"""Recheck: computes a step twice before its update, to find hardware that computes wrong without an error.

Large runs meet such silent data corruption about once a week (Gemini, arXiv:2312.11805; Llama 3, arXiv:2407.21783).
Gradients are hashed within backward, before those of all ranks are added up: from there on every rank has a wrong one.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import ConfigError, CorruptionError
from .closure import run_again
from .data.randomness import generator_states, kept_generators, set_generators
from .data.steps import StepInput
from .optimization.drift import describe_differing, on_host, sums_of_bits
from .optimization.optimization import Optimization
from .processes.layout import ProcessEntry, entry_of
from .strategies.buffers import ReplicaBuffers

if TYPE_CHECKING:
    from ..base.contracts import Trainer
    from .run import Call

MEAN, BUFFER = "the mean gradient of ", "the buffer "
"""What ranks have exchanged, once their gradients have met; a gradient perhaps in parts."""
BITS = 2**64 - 1


class Recheck:
    """Runs forward and backward of every n-th step, and of the first one, a second time; compares hashes.

    The second time logs nothing, and leaves metrics and generators as they were: the run goes on as without it.
    """

    def __init__(self, trainer: "Trainer", every: int) -> None:
        self.trainer, self.every = trainer, every
        self.step: StepInput | None = None
        """The step under way, where it is computed twice."""
        self.batches: list[tuple[Any, Any]] = []
        """Its batches as they go into forward, and the states of the generators then."""
        self.before: list[tuple[Tensor, Tensor | None]] = []
        """Each parameter and the gradient that it had before the step: None but where nobody clears it."""
        self.buffers = ReplicaBuffers(None)
        self.hashes: dict[str, Tensor] = {}
        self.hooks: dict[Tensor, Any] = {}
        """Those on parameters, which hash their gradients."""
        self.names: dict[Tensor, str] = {}
        """The names of parameters, under FSDP of gathered ones too."""
        self.clean_at = 0
        """The newest step that was computed twice with the same bits."""

    def begin_step(self, step: StepInput) -> None:
        """Prepare for a step before its first forward, where it is due."""
        number, task = self.trainer.global_step, self.trainer.task
        self.stop_watching()  # of a step that a hook has left
        self.step, self.batches, self.before, self.buffers = None, [], [], ReplicaBuffers(None)
        # the first step also shows whether the task computes the same each time
        is_due = (number + 1) % self.every == 0 or number == self.trainer.current_run.preemption.first_step
        if is_due and step.samples:
            self.step, self.buffers = step, ReplicaBuffers(task)
            self.buffers.open_replica(0)
            self.before = [(one, one.grad if one.grad is None else one.grad.clone()) for one in task.parameters()]

    def open_batch(self, batch: Any, batch_idx: int) -> None:
        """Keep a batch as the hooks before its forward have left it."""
        if self.step is not None:
            self.batches.append((batch, generator_states()))

    def watch(self, loss: Tensor) -> None:
        """Hash a loss, and the gradients that its backward brings."""
        if self.step is None:
            return
        self._add("the loss", loss)
        # by its graph, since FSDP's modules have parameters that get gradients within forward and backward alone
        for leaf in leaves_of(loss):
            if leaf not in self.hooks:
                self.hooks[leaf] = leaf.register_hook(partial(self._take_gradient, leaf))

    def _take_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        if leaf not in self.names:
            self.names |= {parameter: name for name, parameter in self.trainer.task.named_parameters()}
        self._add(f"the gradient of {self.names.get(leaf, tuple(leaf.shape))}", gradient)

    def _add(self, name: str, tensor: Tensor) -> None:
        for part in sums_of_bits(tensor):
            self.hashes[name] = self.hashes[name] + part if name in self.hashes else part

    def stop_watching(self) -> dict[str, Tensor]:
        """Return the hashes of a pass over the step's batches, and take the hooks off the parameters."""
        for hook in self.hooks.values():
            hook.remove()
        hashes, self.hashes, self.hooks = self.hashes, {}, {}
        return hashes

    def end_step(self, step: StepInput) -> None:
        """Compute the step again, where it is due, and compare; every rank calls it, before the update.

        Raises CorruptionError, on all ranks, where a hash differs.
        """
        if step is not self.step:
            return
        run, number = self.trainer.current_run, self.trainer.global_step
        # DDP has other buckets after its first step, and adds up more than two ranks in another order
        is_settled = number not in (run.preemption.first_step, run.optimization.regrouped_at)
        first = self._end_pass(is_settled)
        kept = [] if is_settled else [(parameter, parameter.grad) for parameter, _ in self.before]
        self._repeat(step)
        self._compare(first, self._end_pass(is_settled))
        for parameter, gradient in kept:
            parameter.grad = gradient
        self.clean_at = number + 1

    def _end_pass(self, is_settled: bool) -> dict[str, Tensor]:
        """Return the hashes of a pass, with those of what it leaves behind."""
        task = self.trainer.task
        named = task.named_parameters() if is_settled else ()
        left = {MEAN + name: parameter.grad for name, parameter in named if parameter.grad is not None}
        for name, tensor in {**left, **{BUFFER + name: buffer for name, buffer in task.named_buffers()}}.items():
            self._add(name, tensor)
        return self.stop_watching()

    def _repeat(self, step: StepInput) -> None:
        """Run forward and backward of the step's batches again, from where the first time began."""
        trainer, run = self.trainer, self.trainer.current_run
        hooks, optimization, states = run.hooks, run.optimization, run.metrics.states
        for parameter, gradient in self.before:
            parameter.grad = gradient
        self.buffers.rewind()
        metrics, losses, watching = states.snapshot(), optimization.losses, hooks["on_before_backward"]
        # callbacks only look at the loss there, and would count it twice
        optimization.losses, hooks["on_before_backward"] = None, (*hooks.of_task["on_before_backward"], self.watch)
        trainer.metrics.muted = True
        with kept_generators():
            run_again(trainer, step, self._open_again(step))
        trainer.metrics.muted, optimization.losses, hooks["on_before_backward"] = False, losses, watching
        states.restore(metrics)

    def _open_again(self, step: StepInput) -> Iterator[Any]:
        for item, (batch, generators) in zip(step.batches, self.batches, strict=True):
            self.trainer.metrics.return_to_batch(item.replica, item.samples)
            set_generators(generators)
            yield batch

    def _compare(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
        strategy, names, absent = self.trainer.strategy, list({**first, **second}), torch.tensor(0)
        numbers = (on_host([hashes.get(name, absent) for name in names]).tolist() for hashes in (first, second))
        rows = list(zip(names, *numbers, strict=True))
        differing, met = [row for row in rows if row[1] != row[2]], [row for row in rows if row[0].startswith(MEAN)]
        by_rank = strategy.collectives.gather_objects((entry_of(strategy.place, strategy.device), differing))
        told = describe_differing(strategy.weight_ranks, [row[0] for row in met], [row[1] for row in met])
        told = describe(by_rank) if any(rows for _, rows in by_rank) else told
        if not told:
            return
        wrong = "this hardware computes wrong: leave it out of the run, and resume from a checkpoint"
        advice = f"Since step {self.clean_at} had the same bits twice, {wrong} of that step or before."
        if not self.clean_at:
            advice = (
                f"Either training_step cannot be repeated, since it changes its batch, counts, or has a generator of "
                f"its own; or {wrong}."
            )
        raise CorruptionError(
            f"Step {self.trainer.global_step + 1}, computed twice, has other bits: {told}. The weights have not taken "
            f"it. {advice}"
        )


def describe(by_rank: list[tuple[ProcessEntry, list[tuple[str, int, int]]]]) -> str:
    """Describe what differs, on the ranks where it began: what they exchange has the bits of all of them."""
    found = [(entry, rows) for entry, rows in by_rank if rows]
    began = [(entry, rows) for entry, rows in found if not rows[0][0].startswith((MEAN, BUFFER))]
    told = [
        f"{name} ({first & BITS:016x}, then {second & BITS:016x}) on rank {rank} ({device} of {host})"
        + f", and {len(more)} more" * bool(more)
        for (rank, _, host, device), [(name, first, second), *more] in began or found
    ]
    return "; ".join(told) + "; what each rank has brought is the same, so it went wrong on the way" * (not began)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors without a history from which a loss was computed, and which get a gradient."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
            if hasattr(node, "variable"):
                yield node.variable


def use_recheck(call: "Call", optimization: Optimization) -> None:
    """Compute steps twice where `trainer.recheck_every` says so. Raises ConfigError for steps that cannot be."""
    every = call.trainer.recheck_every
    if every is None:
        return
    reasons = {
        "kernels may add up in another order each time. Set trainer.deterministic=true, or reproducible=bitwise": (
            not call.bitwise and call.trainer.deterministic is not True
        ),
        "manual optimization updates weights within the step": not optimization.automatic,
        "the optimizer computes it again itself, with other weights": optimization.needs_closure,
        "elastic=true repeats it where a process dies": call.members_change,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ConfigError(f"trainer.recheck_every={every} computes a step twice and compares bits, but {reason}.")
    optimization.recheck = recheck = Recheck(call.trainer, every)
    optimization.clears_late = False  # gradients that are cleared within the step would be cleared twice
    call.hooks["on_train_batch_start"] += (recheck.open_batch,)
    call.hooks["on_before_backward"] += (recheck.watch,)
    call.undo.callback(recheck.stop_watching)
