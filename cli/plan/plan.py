"""`legato plan`: what a run would do on any layout, computed without starting it.

    length, batch size --Deal-->    samples of a step, steps of an epoch, the batches of a rank at a step
    replicas, processes --Layout--> the replicas of each process
    parameters, optimizer ------->  state of a process, size of a checkpoint (state_size.py)

This module is arithmetic without torch. sources.py reads the inputs from config, loader and task; processes.py has the
layout of processes, shares.py the state of each rank of a model that the strategy splits.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...base.errors import ConfigError
from ...base.quantities import format_bytes
from ...trainer.data.sampling import BatchSpan, Deal, EpochIndices, Layout, epoch_key, permutation
from ...trainer.strategies.mesh.sizes import PLACES, Sizes
from .memory import Activations, Traffic, verdict
from .processes import Processes
from .state_size import Share, StateSize

WIDTH = 118  # columns
PLURALS = {"batch": "batches"}


@dataclass(frozen=True)
class Plan:
    """The shape of a run. Raises ConfigError for more processes than replicas, and for numbers out of range."""

    length: int
    """Positions of an epoch: samples, or batches if the loader's batches are kept whole."""
    batch_size: int
    """Positions of a batch."""
    replicas: int
    processes: int
    nodes: int = 1
    accumulate: int = 1
    drop_last: bool = False
    limit: int | float = 1.0
    """Batches per epoch of each replica: a count (int) or a fraction (float)."""
    whole_rounds: bool = False
    """Whether to drop a round in which some replica has no batch, as manual optimization requires."""
    max_epochs: int | None = None
    """None: no limit."""
    max_steps: int | None = None
    """None: no limit."""
    seed: int = 0
    shuffle: bool = True
    """Whether samples are in the order of the keyed permutation, or in dataset order."""
    unit: str = "sample"
    """The meaning of a position: "sample" or "batch"."""
    own_order: Callable[[int], EpochIndices] | None = None
    """Returns the order of an epoch, for a custom sampler."""
    state: StateSize | None = None
    """State of the whole model in one process."""
    parts: tuple[int, int] | None = (1, 1)
    """Number of equal parts into which weights (with gradients) and optimizer state are sharded; None: unknown."""
    shares: tuple[Share, ...] = ()
    """Measured state by rank; takes precedence over `parts`."""
    sizes: Sizes | None = None
    """Axis sizes of the mesh, if any."""
    servers: int = 0
    """Number of processes, the last ones, that hold remote modules and have no samples."""
    activations: Activations | None = None
    traffic: Traffic | None = None
    memory: int | None = None
    """Bytes of a device, to fit into."""

    def __post_init__(self) -> None:
        assert self.layout.processes
        assert self.deal.replicas

    @cached_property
    def ranks(self) -> Processes:
        """The processes and their roles."""
        return Processes(self.processes, self.nodes, self.sizes, self.servers)

    @cached_property
    def layout(self) -> Layout:
        """Assignment of replicas to the processes that share them."""
        return Layout(self.replicas, self.ranks.data_size)

    @cached_property
    def deal(self) -> Deal:
        """Division of an epoch into batches."""
        dealt = self.length, self.batch_size, self.replicas, self.accumulate, self.drop_last
        whole = Deal(*dealt)
        rounds = whole.rounds
        if self.whole_rounds and rounds and not whole.span(rounds - 1, self.replicas - 1):
            rounds -= 1
        return Deal(*dealt, int(rounds * self.limit) if isinstance(self.limit, float) else min(self.limit, rounds))

    @property
    def step_samples(self) -> int:
        """Samples of a step, other than an epoch's last."""
        return self.replicas * self.accumulate * self.batch_size

    @property
    def last_step_samples(self) -> int:
        """Samples of the last step of an epoch."""
        return self.deal.step_samples(self.deal.steps - 1) if self.deal.steps else 0

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if neither epochs nor steps are limited."""
        by_epochs = None if self.max_epochs is None else self.max_epochs * self.deal.steps
        return min((limit for limit in (by_epochs, self.max_steps) if limit is not None), default=None)

    def order(self, epoch: int) -> EpochIndices:
        """Return the order of an epoch, which maps positions to dataset indices."""
        if self.own_order is not None:
            return self.own_order(epoch)
        if not self.shuffle:
            return _same_positions
        key = epoch_key(self.seed, epoch)
        return lambda positions: permutation(positions, self.length, key)

    def batches_at(self, rank: int, step: int, epoch: int) -> list[tuple[BatchSpan, list[Any]]]:
        """Return the batches of a rank at a step of an epoch (both from 0), each with its dataset indices.

        Raises ConfigError for a rank, step or epoch out of range.
        """
        for name, value, count in (
            ("rank", rank, self.processes),
            ("epoch", epoch, self.max_epochs),
            ("step", step, self.deal.steps),
        ):
            if value < 0 or (count is not None and value >= count):
                end = "up" if count is None else f"to {count - 1:,}" if count else "to none: there is no step"
                raise ConfigError(f"{name}={value}: there are 0 {end}{', in each epoch' if name == 'step' else ''}.")
        order = self.order(epoch)
        spans = self.deal.spans(step, self.ranks.owned(rank, self.layout))
        found = ((span, order(np.arange(span.start, span.stop, dtype=np.int64))) for span in spans)
        return [(span, one.tolist() if isinstance(one, np.ndarray) else list(one)) for span, one in found]


def _same_positions(positions: Any) -> Any:
    return positions


def replicas_by_rank(layout: Layout, together: int = 1) -> str:
    """Describe the assignment of replicas: "ranks 0-1: 3 replicas each (0-5), rank 2: 2 replicas (6-7)".

    together: number of consecutive ranks with the same replicas.
    """
    share, longer = divmod(layout.replicas, layout.processes)
    parts = []
    for first, stop, count in ((0, longer, share + 1), (longer, layout.processes, share)):
        if first < stop:
            owned = _range_text(layout.owned(first).start, layout.owned(stop - 1).stop)
            each = " each" if stop - first > 1 else ""
            if together > 1:
                each = f" for every {together}" if each else " together"
            ranks = _ranks(range(first * together, stop * together))
            parts.append(f"{ranks}: {shown_count(count, 'replica')}{each} ({owned})")
    return ", ".join(parts)


def _replicas(plan: Plan) -> str:
    """Describe the assignment of replicas, including ranks with the same replicas or none."""
    ranks = plan.ranks
    text = replicas_by_rank(plan.layout, ranks.together)
    if ranks.pipeline > 1:
        line = plan.processes // ranks.pipeline
        others = _ranks(range(line, plan.processes))
        text += f"; {others}: the same, {line:,} at each further place of the pipeline"
    if ranks.servers:
        text += f"; {_ranks(range(plan.processes - ranks.servers, plan.processes))}: none, servers of remote modules"
    return text


def render(plan: Plan) -> str:
    """Return the plan as text for a terminal."""
    rows = [*_rows(plan), *(_state_rows(plan.state, plan) if plan.state is not None else ())]
    return "\n".join(f"{name:<16}{_wrapped(value, 16)}" for name, value in rows)


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    deal, unit = plan.deal, plan.unit
    where = f" on {plan.nodes:,} nodes, {plan.processes // plan.nodes:,} each" if plan.nodes > 1 else ""
    axes = [] if plan.sizes is None else [(name, getattr(plan.sizes, name)) for name in PLACES]
    mesh = " x ".join(f"{name} {size:,}" for name, size in axes if size > 1)
    who = [f": {mesh}"] if mesh else []
    who += (
        [f": {shown_count(plan.ranks.data_size, 'trainer')}, {shown_count(plan.servers, 'server')}"]
        if plan.servers
        else []
    )
    yield "Processes", f"{plan.processes:,}{where}{''.join(who)}"
    yield "Replicas", f"{plan.replicas:,}: {_replicas(plan)}"
    order = "in the order of the loader" if plan.own_order is not None else "shuffled" if plan.shuffle else "in order"
    left = plan.length - deal.samples
    dropped = f"; an epoch leaves out {shown_count(left, unit)}" if left else ""
    yield "An epoch", f"{shown_count(deal.samples, unit)}, {order}{dropped}"
    batches = f" x {shown_count(plan.accumulate, 'batch')} each" if plan.accumulate > 1 else ""
    of = f" of {plan.batch_size:,}" if unit == "sample" else ""
    yield "A step", f"{shown_count(plan.step_samples, unit)}: {shown_count(plan.replicas, 'replica')}{batches}{of}"
    last = f"; the last has {shown_count(plan.last_step_samples, unit)}" if deal.steps else ""
    yield "Steps an epoch", f"{deal.steps:,}{last}"
    limits = [] if plan.max_epochs is None else [shown_count(plan.max_epochs, "epoch")]
    limits += [] if plan.max_steps is None else [f"at most {shown_count(plan.max_steps, 'step')}"]
    total = plan.total_steps
    yield "Steps in all", "no limit in epochs or steps" if total is None else f"{total:,} ({', '.join(limits)})"


def _state_rows(state: StateSize, plan: Plan) -> Iterator[tuple[str, str]]:
    yield "Parameters", f"{state.parameters:,}"
    title = "State of a rank"
    for share in plan.shares:
        most = "at most " if share.at_most else ""
        where = f" on {_ranks(share.ranks)} ({share.what})" if share.what else ""
        yield title, _shown_state(share.size, most, where)
        title = ""
    if not plan.shares and plan.parts is None:
        yield title, "unknown: parameters= does not tell how many are in remote modules; omit it to measure them"
    elif not plan.shares and plan.parts is not None:
        same = "; the same on every rank" if plan.processes > 1 and plan.parts == (1, 1) else ""
        if plan.sizes is not None and plan.sizes.tensor * plan.sizes.pipeline > 1:
            same = f"; were the model cut into {plan.parts[0]:,} equal parts: parameters= does not say where it is cut"
        yield title, _shown_state(state.of_rank(*plan.parts)) + same
    yield "A checkpoint", f"{format_bytes(state.checkpoint_bytes)}{_unknown(state)}"
    if plan.activations is not None:
        yield "Activations", _shown_activations(plan.activations, plan.batch_size)
    if plan.traffic is not None and plan.traffic.unknown:
        yield "A step sends", f"unknown: {plan.traffic.unknown}"
    elif plan.traffic is not None and plan.traffic.payloads:
        payloads = ", ".join(f"{one.kind} of {format_bytes(one.bytes)}" for one in plan.traffic.payloads)
        sent = format_bytes(sum(one.sent_bytes for one in plan.traffic.payloads))
        yield "A step sends", f"{payloads}; in a ring {sent} from each rank"
        yield "Its buffers", f"{format_bytes(plan.traffic.buffer_bytes)} on each rank"
    if plan.memory is not None:
        yield "Memory", _shown_memory(state, plan, plan.memory)


def _shown_activations(found: Activations, batch_size: int) -> str:
    if found.unknown:
        return f"unknown: {found.unknown}"
    plain = format_bytes(found.plain)
    text = f"{plain} for a batch of {batch_size:,}" + (f", {found.where}" if found.where else "")
    if found.recomputed is None:
        return text
    blocks = f"activation_checkpointing: [{', '.join(found.blocks)}]"
    if found.recomputes:
        return f"{text.replace(plain, format_bytes(found.recomputed))}, with {blocks}; {plain} without"
    return f"{text}; with {blocks} {format_bytes(found.recomputed)}"


def _shown_memory(state: StateSize, plan: Plan, memory: int) -> str:
    """Tell whether the rank that holds most fits into the memory of a device."""
    sizes = [share.size for share in plan.shares]
    if not sizes and plan.parts is not None:
        sizes = [state.of_rank(*plan.parts)]
    lacking = [] if sizes else ["the state"]
    if any(one.optimizer_bytes is None for one in sizes):
        lacking.append("the optimizer's state")
    used = max((one.process_bytes for one in sizes), default=0)
    activations, traffic = plan.activations, plan.traffic
    if activations is None or activations.unknown:
        lacking.append("activations")
    else:
        used += activations.bytes
    if traffic is None or traffic.unknown:
        lacking.append("buffers of communication")
    else:
        used += traffic.buffer_bytes
    without = f", without {' and '.join(lacking)}, unknown here" if lacking else ""
    return f"{format_bytes(used)} of {format_bytes(memory)}{without}: {verdict(used, memory)}"


def _shown_state(state: StateSize, most: str = "", where: str = "") -> str:
    optimizer = "unknown" if state.optimizer_bytes is None else format_bytes(state.optimizer_bytes)
    parts = [f"parameters {format_bytes(state.parameter_bytes)}", f"gradients {format_bytes(state.gradient_bytes)}"]
    parts += [f"buffers {format_bytes(state.buffer_bytes)}"] if state.buffer_bytes else []
    parts += [f"optimizer {optimizer} ({state.optimizer})"]
    return f"{most}{format_bytes(state.process_bytes)}{_unknown(state)}{where}: {', '.join(parts)}"


def _unknown(state: StateSize) -> str:
    return " and the optimizer's" if state.optimizer_bytes is None else ""


def render_batches(plan: Plan, rank: int, step: int, epoch: int) -> str:
    """Return the batches of a rank at a step as text for a terminal."""
    spans = plan.batches_at(rank, step, epoch)
    before = epoch * plan.deal.steps + step
    count = shown_count(sum(span.samples for span, _ in spans), plan.unit)
    count += ", as it is a server" if rank >= plan.processes - plan.servers else ""
    lines = [f"Rank {rank} at step {step:,} of epoch {epoch:,} (global_step {before:,} to {before + 1:,}): {count}"]
    for span, found in spans:
        head = f"  replica {span.replica}, batch {span.round:,}, positions {_range_text(span.start, span.stop)}: "
        lines.append(
            textwrap.fill(head + " ".join(_shown_index(one) for one in found), WIDTH, subsequent_indent="    ")
        )
    return "\n".join(lines)


def _shown_index(index: Any) -> str:
    return (
        f"[{' '.join(map(str, index))}]" if isinstance(index, Iterable) and not isinstance(index, str) else str(index)
    )


def _ranks(ranks: range) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_range_text(ranks.start, ranks.stop)}"


def _range_text(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def shown_count(count: int, word: str) -> str:
    """Return a count with its noun, in the plural where needed."""
    return f"{count:,} {word if count == 1 else PLURALS.get(word, word + 's')}"


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH - indent).replace("\n", "\n" + " " * indent)
