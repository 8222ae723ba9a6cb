"""Recheck: computes a step twice before its update, to detect hardware that silently computes wrong results.

Large runs encounter such silent data corruption about once a week (Gemini, arXiv:2312.11805; Llama 3,
arXiv:2407.21783). Gradients are hashed during the backward pass, before they are summed across ranks, which would
propagate a corrupted gradient to every rank.
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
"""Prefixes of the names of tensors that depend on other ranks. With sharding, each rank has part of the gradient."""
BITS = 2**64 - 1


class Recheck:
    """Recomputes the first step and every n-th step, and checks that the hashes match those of the original step.

    The recomputation logs nothing and restores metrics and generators, so it does not affect the run.
    """

    def __init__(self, trainer: "Trainer", every: int) -> None:
        self.trainer, self.every = trainer, every
        self.step: StepInput | None = None
        """The current step if it is being computed twice."""
        self.batches: list[tuple[Any, Any]] = []
        """The step's batches before their forward passes, and the generator states at that point."""
        self.before: list[tuple[Tensor, Tensor | None]] = []
        """Each parameter and its gradient before the step. The gradient is None unless the task keeps gradients."""
        self.buffers = ReplicaBuffers(None)
        self.hashes: dict[str, Tensor] = {}
        self.hooks: dict[Tensor, Any] = {}
        """Hooks on parameters that hash their gradients."""
        self.names: dict[Tensor, str] = {}
        """Names of parameters, including FSDP's gathered ones."""
        self.clean_at = 0
        """The latest step whose two passes were bitwise identical."""

    def begin_step(self, step: StepInput) -> None:
        """Before the first forward pass, prepare to compute the step twice if a recheck is due."""
        number, task = self.trainer.global_step, self.trainer.task
        self.stop_watching()  # hooks remain if the task left a step early
        self.step, self.batches, self.before, self.buffers = None, [], [], ReplicaBuffers(None)
        # the first step also shows whether the task is repeatable
        is_due = (number + 1) % self.every == 0 or number == self.trainer.current_run.preemption.first_step
        if is_due and step.samples:
            self.step, self.buffers = step, ReplicaBuffers(task)
            self.buffers.open_replica(0)
            self.before = [
                (weight, None if weight.grad is None else weight.grad.clone()) for weight in task.parameters()
            ]

    def open_batch(self, batch: Any, batch_idx: int) -> None:
        """Store a batch, and the generator states after the hooks that run before its forward pass."""
        if self.step is not None:
            self.batches.append((batch, generator_states()))

    def watch(self, loss: Tensor) -> None:
        """Hash a loss and the gradients from its backward pass."""
        if self.step is None:
            return
        self._add("the loss", loss)
        # found in the graph, since FSDP's gathered parameters exist only during forward and backward passes
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
        """Return the hashes from a pass over the step's batches, and remove the hooks."""
        for hook in self.hooks.values():
            hook.remove()
        hashes, self.hashes, self.hooks = self.hashes, {}, {}
        return hashes

    def end_step(self, step: StepInput) -> None:
        """If a recheck is due, recompute the step and compare the hashes.

        All ranks must call this before the update. Raises CorruptionError on all ranks if a hash differs.
        """
        if step is not self.step:
            return
        run, number = self.trainer.current_run, self.trainer.global_step
        # DDP changes its buckets after its first step, which changes the summation order over more than two ranks
        is_settled = number not in (run.preemption.first_step, run.optimization.regrouped_at)
        first = self._end_pass(is_settled)
        kept = [] if is_settled else [(parameter, parameter.grad) for parameter, _ in self.before]
        self._repeat(step)
        self._compare(first, self._end_pass(is_settled))
        for parameter, gradient in kept:
            parameter.grad = gradient
        self.clean_at = number + 1

    def _end_pass(self, is_settled: bool) -> dict[str, Tensor]:
        """Return the hashes from a pass, including those of the gradients and buffers at its end."""
        task = self.trainer.task
        named = task.named_parameters() if is_settled else ()
        left = {MEAN + name: parameter.grad for name, parameter in named if parameter.grad is not None}
        for name, tensor in {**left, **{BUFFER + name: buffer for name, buffer in task.named_buffers()}}.items():
            self._add(name, tensor)
        return self.stop_watching()

    def _repeat(self, step: StepInput) -> None:
        """Rerun the step's forward and backward passes, starting from the state before the first pass."""
        trainer, run = self.trainer, self.trainer.current_run
        hooks, optimization, states = run.hooks, run.optimization, run.metrics.states
        for parameter, gradient in self.before:
            parameter.grad = gradient
        self.buffers.rewind()
        metrics, losses, watching = states.snapshot(), optimization.losses, hooks["on_before_backward"]
        # without callbacks, which only read the loss and would count it twice
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
        wrong = "this hardware computes wrong results. Exclude it, and resume from a checkpoint"
        advice = f"Since both passes of step {self.clean_at} were equal, {wrong} from that step or earlier."
        if not self.clean_at:
            advice = (
                f"Either training_step is not repeatable (it changes its batch, counts calls, or uses its own "
                f"random generator), or {wrong}."
            )
        raise CorruptionError(
            f"The two computations of step {self.trainer.global_step + 1} differ: {told}. The weights were not "
            f"updated. {advice}"
        )


def describe(by_rank: list[tuple[ProcessEntry, list[tuple[str, int, int]]]]) -> str:
    """Describe the differences on the ranks where they originated, because exchanged tensors depend on all ranks."""
    affected = [(entry, rows) for entry, rows in by_rank if rows]
    began = [(entry, rows) for entry, rows in affected if not rows[0][0].startswith((MEAN, BUFFER))]
    told = [
        f"{name} ({first & BITS:016x}, then {second & BITS:016x}) on rank {rank} ({device} of {host})"
        + f", and {len(more)} more" * bool(more)
        for (rank, _, host, device), [(name, first, second), *more] in began or affected
    ]
    return "; ".join(told) + "; the ranks' contributions are equal, so the error is in their sum" * (not began)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a loss's autograd graph, where gradients accumulate."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
            if hasattr(node, "variable"):
                yield node.variable


def use_recheck(call: "Call", optimization: Optimization) -> None:
    """Set up `trainer.recheck_every`. Raises ConfigError if the run's steps cannot be recomputed."""
    every = call.trainer.recheck_every
    if every is None:
        return
    reasons = {
        "kernels may sum in a different order each time. Set trainer.deterministic=true, or reproducible=bitwise": (
            not call.bitwise and call.trainer.deterministic is not True
        ),
        "manual optimization updates weights within the step": not optimization.automatic,
        "the optimizer itself computes the step again with changed weights": optimization.needs_closure,
        "elastic=true repeats a step if a process dies": call.members_change,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ConfigError(f"trainer.recheck_every={every} computes a step twice and compares the bits, but {reason}.")
    optimization.recheck = recheck = Recheck(call.trainer, every)
    optimization.clears_late = False  # clearing within the step would happen twice
    call.hooks["on_train_batch_start"] += (recheck.open_batch,)
    call.hooks["on_before_backward"] += (recheck.watch,)
    call.undo.callback(recheck.stop_watching)
