"""States of logged torchmetrics objects, reduced over ranks in as few collectives as possible.

With `reproducible: bitwise` every replica has its own states, which are swapped into the metric objects in turn and
merged in replica order. The same holds for the rest of an epoch after a resume with several states that cannot be
merged early (dist_reduce_fx=None): only a metric's `compute` can combine those.

States reduced by "mean" are weighted by their number of updates, as torchmetrics' own `forward` does; that equals the
single-process value when updates have equal sizes. torchmetrics' own metrics keep a sum and a count instead. States
without an update are ignored.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import DisagreementError, TaskError
from ...base.torch_private import reductions_of, set_synced, set_updates
from ..processes.ranks import Ranks

REDUCTION_NAMES = {"dim_zero_sum": "sum", "dim_zero_mean": "mean", "dim_zero_max": "max", "dim_zero_min": "min"}
MERGED_EARLY = ("sum", "max", "min")
"""Reductions whose merged state can be updated further with the same result."""

States = dict[str, Any]
"""The states of one metric by name, and its number of updates."""
COUNT = "_update_count"


def is_metric(value: Any) -> bool:
    """Return whether `value` is a torchmetrics.Metric, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def gather_state(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return every rank's `state`, by rank: what a metric's `compute()` calls in a hook. Collective.

    torchmetrics sends an empty float vector for a list state without an update. If the other ranks hold matrices or
    integers, gloo aborts the process. The empty tensor takes their dtype and dimensions here.

    Raises DisagreementError, on every rank, if states that are not empty differ in dtype or number of dimensions.
    """
    ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
    layouts = ranks.gather_objects((state.numel(), state.dtype, tuple(state.shape)))
    updated = [(rank, dtype, shape) for rank, (size, dtype, shape) in enumerate(layouts) if size]
    if updated:
        first, dtype, shape = updated[0]
        for rank, other_dtype, other_shape in updated:
            if (other_dtype, len(other_shape)) != (dtype, len(shape)):
                raise DisagreementError(
                    f"A state of a torchmetrics object has shape {shape} and {dtype} on rank {first}, but shape "
                    f"{other_shape} and {other_dtype} on rank {rank}. Ranks may differ in sizes only: update the "
                    f"metric with tensors of one dtype and one number of dimensions."
                )
        if len(updated) < len(layouts):
            state = torch.atleast_1d(state) if state.numel() else state.new_empty((0, *shape[1:]), dtype=dtype)
    gathered: list[Tensor] = sys.modules["torchmetrics"].utilities.distributed.gather_all_tensors(state, group)
    return gathered


class MetricStates:
    """The metrics of a task and their states; with `by_replica` each replica has its own states."""

    def __init__(self, task: nn.Module, replicas: Iterable[int], by_replica: bool, shared: bool = False) -> None:
        """Collect the metrics in `task`.

        replicas: those of this process.
        shared: also keep the states of other processes' replicas (elastic runs).
        """
        self.by_path = {path: module for path, module in task.named_modules() if is_metric(module)}
        for metric in self.by_path.values():
            metric.dist_sync_fn = metric.dist_sync_fn or gather_state
        self.replicas, self.by_replica, self.shared = list(replicas), by_replica, shared
        self.swaps_states = by_replica and bool(self.by_path)
        self.unmerged: set[str] = set()
        """Paths of metrics with unmerged states, which keep all metrics per replica until they are computed."""
        self.kept: dict[str, dict[int, States]] = {path: {} for path in self.by_path}
        self.sent: set[str] = set()
        """Paths of metrics whose states were sent to other processes."""
        self.replica: int | None = None
        self.merged_updates: dict[str, int] = {}
        """While metrics hold the merged states of all replicas: their numbers of updates, by path."""

    @cached_property
    def with_states(self) -> dict[str, Any]:
        """The metrics that own states; a composition such as a sum of two metrics has none."""
        return {path: metric for path, metric in self.by_path.items() if reductions_of(metric)}

    def path_of(self, metric: Any) -> str | None:
        """Return the module path of a metric in the task, or None."""
        return next((path for path, module in self.by_path.items() if module is metric), None)

    def open_replica(self, replica: int) -> None:
        """Store the loaded states and load those of `replica` into the metrics."""
        if replica == self.replica:
            return
        self.store_replica()
        with torch.inference_mode(False):  # evaluation runs in inference mode, but training metrics need normal tensors
            for path, metric in self.with_states.items():
                if replica not in self.kept[path]:
                    metric.reset()  # before any is loaded: reset may recurse into nested metrics
            for path, metric in self.with_states.items():
                if replica in self.kept[path]:
                    load_states(metric, self.kept[path][replica])
        self.replica = replica

    def store_replica(self) -> None:
        """Move the states of the loaded replica out of the metrics."""
        self._leave_merged()
        if self.replica is not None:
            with torch.inference_mode(False):
                for path, metric in self.with_states.items():
                    self.kept[path][self.replica] = states_of(metric)
        self.replica = None

    def snapshot(self) -> dict[str, dict[int, States]]:
        """Return copies of all states of this process by path and replica, for `restore`."""
        if self.swaps_states:
            self.store_replica()
            return {path: {r: copied(kept[r]) for r in kept if r in self.replicas} for path, kept in self.kept.items()}
        found: dict[str, dict[int, States]] = {}
        for path, metric in self.with_states.items():
            own = {name: getattr(metric, name) for name in reductions_of(metric)}
            found[path] = {0: copied({**own, COUNT: metric.update_count})}
        return found

    def restore(self, snapshot: dict[str, dict[int, States]]) -> None:
        """Restore states from a `snapshot`."""
        if self.swaps_states:
            self._leave_merged()
            for path, own in snapshot.items():
                remote = {
                    replica: states for replica, states in self.kept[path].items() if replica not in self.replicas
                }
                self.kept[path] = {**remote, **own}
            self.replica = None
            return
        for path, metric in self.with_states.items():
            load_states(metric, snapshot[path][0])

    def merge(self, metrics: Iterable[Any], collectives: "Ranks") -> None:
        """Load the states of all replicas of all ranks, merged in order, into these metrics. Collective."""
        gathered = {path: parts for path, parts in self.gather(metrics, collectives).items() if parts}
        updated = [path for path, parts in gathered.items() if any(states[COUNT] for states in parts.values())]
        for path in gathered.keys() - set(updated):
            self.by_path[path].reset()  # no batch updated it; drop states from before
        for path in updated:
            load_states(self.by_path[path], merged_in_order(self.by_path[path], gathered[path]))

    def load_merged(self, collectives: "Ranks") -> None:
        """Load merged states into every metric until the next batch, so that hooks can compute them. Collective."""
        self.merge(self.with_states.values(), collectives)
        for path, metric in self.with_states.items():
            self.merged_updates[path] = metric.update_count
            if metric.update_count:
                set_synced(metric, False)  # merged already: torchmetrics' own sync would count it once per rank

    def _leave_merged(self) -> None:
        """Return to states per replica; keep what a hook has reset or updated in the meantime."""
        for path, count in self.merged_updates.items():
            metric = self.by_path[path]
            set_synced(metric, metric.sync_on_compute)
            if count and not metric.update_count:
                self.kept[path] = {}
            elif metric.update_count and not count:
                with torch.inference_mode(False):
                    self.kept[path] = {self.replicas[0]: states_of(metric)}
        self.merged_updates = {}

    def forget(self, metrics: Iterable[Any]) -> None:
        """Reset these metrics for every replica."""
        for metric in metrics_within(metrics):
            path = self.path_of(metric)
            if path is not None:
                self.kept[path] = {}
                self.unmerged.discard(path)
        if self.swaps_states and not (self.by_replica or self.unmerged):
            self._merge_replicas()

    def _merge_replicas(self) -> None:
        self.store_replica()
        self.swaps_states = False
        with torch.inference_mode(False):
            for path, metric in self.with_states.items():
                if self.kept[path]:
                    load_states(metric, merged_in_order(metric, self.kept[path]))
                    self.kept[path] = {}

    def gather(self, metrics: Iterable[Any], collectives: "Ranks") -> dict[str, dict[int, States]]:
        """Return the states of these metrics over all ranks, by path and replica. Collective.

        Without states per replica, a rank's states are those of its first replica.
        """
        found = map(self.path_of, metrics_within(metrics))
        paths = [path for path in found if path is not None and path in self.with_states]
        if self.swaps_states:
            self.store_replica()
            own = {path: self._own(path) for path in paths}
        else:
            own = {path: {self.replicas[0]: states_of(self.by_path[path])} for path in paths}
        # by pickle: list states differ in length from rank to rank
        ranks = collectives.gather_objects(own)
        return {path: {replica: states for rank in ranks for replica, states in rank[path].items()} for path in paths}

    def _own(self, path: str) -> dict[int, States]:
        return {replica: states for replica, states in self.kept[path].items() if replica in self.replicas}

    def own_states(self) -> dict[str, dict[int, States]]:
        """Return the states of this process's replicas for every metric that has or had updates."""
        if not self.swaps_states:
            return {}
        replica = self.replica
        self.store_replica()
        self.replica = replica
        found = {path: self._own(path) for path in self.kept}
        # also when it has none any more: other ranks must hear of a reset
        self.sent |= {path for path, own in found.items() if any(states[COUNT] for states in own.values())}
        return {path: own for path, own in found.items() if path in self.sent}

    def add_remote(self, states: Mapping[str, Mapping[int, States]]) -> None:
        """Store the states of other processes' replicas."""
        for path, remote in states.items():
            self.kept[path] |= {replica: own for replica, own in remote.items() if replica not in self.replicas}

    def all(self) -> dict[str, dict[int, States]]:
        """Return the known states of all replicas, by path and replica."""
        replica = self.replica
        self.store_replica()
        self.replica = replica
        return {path: dict(kept) for path, kept in self.kept.items() if any(states[COUNT] for states in kept.values())}

    def load(self, saved: Mapping[str, Mapping[int, States]]) -> None:
        """Load this process's part of what `gather` returned, on any number of processes.

        All processes pass the same value, and so agree on whether states are kept per replica.
        """
        self.unmerged = {
            path
            for path, parts in saved.items()
            if len(parts) > 1 and not are_merged_early(self.by_path[path], parts.values())
        }
        if self.swaps_states and not (self.by_replica or self.unmerged):
            self._merge_replicas()
        self.swaps_states |= bool(self.unmerged)
        for path, states_of_all in saved.items():
            metric = self.by_path[path]
            own = {r: states for r, states in states_of_all.items() if self.shared or r in self.replicas}
            if self.swaps_states:
                self.kept[path] = own
            elif own:
                load_states(metric, merged_in_order(metric, own))
            else:
                metric.reset()


def metrics_within(metrics: Iterable[Any]) -> list[Any]:
    """Return metrics and the metrics nested in them (compositions, wrappers), each once."""
    every = (module for metric in metrics for module in metric.modules() if is_metric(module))
    return list({id(one): one for one in every}.values())


def updates_within(metric: Any) -> int:
    """Return the number of updates of a metric and its nested metrics."""
    return sum(inner.update_count for inner in metrics_within([metric]))


def copied(states: States) -> States:
    """Copy states; list states are copied shallowly, since their tensors are never changed in place."""
    kept: States = {}
    for name, value in states.items():
        kept[name] = list(value) if isinstance(value, list) else value.clone() if isinstance(value, Tensor) else value
    return kept


def states_of(metric: Any) -> States:
    """Return a copy of a metric's states, on the CPU."""
    return {**{name: _on_host(getattr(metric, name)) for name in reductions_of(metric)}, COUNT: metric.update_count}


def load_states(metric: Any, states: States) -> None:
    """Load states into a metric, on its device."""
    for name in reductions_of(metric):
        value = states[name]
        moved = [tensor.to(metric.device) for tensor in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
    set_updates(metric, states[COUNT])


def are_merged_early(metric: Any, parts: Iterable[States]) -> bool:
    """Return whether `parts` can be merged into one state that is then updated further."""
    reductions = [(name, getattr(reduction, "__name__", "")) for name, reduction in reductions_of(metric).items()]
    return all(
        isinstance(part[name], list) or REDUCTION_NAMES.get(reduction) in MERGED_EARLY
        for part in parts
        for name, reduction in reductions
    )


def merged_in_order(metric: Any, by_replica: Mapping[int, States]) -> States:
    """Return the states of all these replicas merged in replica order."""
    parts = [by_replica[replica] for replica in sorted(by_replica)]
    if len(parts) == 1:
        return copied(parts[0])  # unchanged: a stacked state has a shape that `update` cannot continue from
    counts = [part[COUNT] for part in parts]
    found: States = {
        name: merged_state(metric, name, [part[name] for part in parts], counts) for name in reductions_of(metric)
    }
    found[COUNT] = sum(counts)
    return found


def merged_state(metric: Any, name: str, values: list[Any], counts: list[int]) -> Any:
    """Return one state merged from `values`, in order.

    counts: the number of updates of each. Without an update a state only counts in sums, because it may hold no valid
    number.
    """
    reduction = reductions_of(metric)[name]
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    operation = REDUCTION_NAMES.get(getattr(reduction, "__name__", ""))
    if operation == "mean" and any(counts):
        weighted = [value.double() * count for value, count in zip(values, counts, strict=True) if count]
        return (sum(weighted[1:], weighted[0]) / sum(counts)).to(values[0].dtype)
    if operation != "sum":
        updated = [value for value, count in zip(values, counts, strict=True) if count] or values
        return torch.stack(updated) if reduction is None else reduction(torch.stack(updated))
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def read_values(metrics: list[Any], collectives: "Ranks", world: int, keep: bool = False) -> list[float]:
    """Compute each metric over all ranks, then reset it, or with `keep` restore this rank's states.

    States that are summed, averaged, min'ed or max'ed take one collective per operation and dtype; list states and
    custom reductions one more.
    """
    parts = metrics_within(metrics)
    before = [states_of(part) for part in parts] if keep else []
    fixed: dict[tuple[str, torch.dtype], list[tuple[Any, str]]] = {}
    gathered: list[tuple[Any, str]] = []
    for metric in parts if world > 1 else []:
        for name, reduction in reductions_of(metric).items():
            operation = REDUCTION_NAMES.get(getattr(reduction, "__name__", ""))
            state = getattr(metric, name)
            if operation is None or not isinstance(state, Tensor):
                gathered.append((metric, name))
            else:
                # Counts may exceed 2^24, above which float32 skips integers; all states of one kind then travel
                # together.
                wide = torch.float64 if state.is_floating_point() or operation == "mean" else torch.int64
                fixed.setdefault((operation, wide), []).append((metric, name))
    for (operation, wide), states in fixed.items():
        _reduce_together(states, operation, wide, collectives)
    if gathered:
        _gather_together(gathered, collectives)
    values = [_compute(metric) for metric in metrics]
    for part in parts:
        part.reset()
    for part, states_before in zip(parts, before, strict=bool(before)):
        load_states(part, states_before)
    return values


def _reduce_together(states: list[tuple[Any, str]], operation: str, wide: torch.dtype, collectives: "Ranks") -> None:
    tensors = [getattr(metric, name) for metric, name in states]
    parts = [tensor.detach().reshape(-1).to("cpu", wide) for tensor in tensors]
    if operation == "mean":
        counts = [metric.update_count for metric, _ in states]
        # zeros instead of a product: a state without an update may be infinite
        parts = [part * count if count else torch.zeros_like(part) for part, count in zip(parts, counts, strict=True)]
        parts.append(torch.tensor(counts, dtype=wide))
    flat = torch.cat(parts)
    collectives.all_reduce(flat, "sum" if operation == "mean" else operation)
    reduced = list(flat.split([part.numel() for part in parts]))
    if operation == "mean":
        updates = reduced.pop().tolist()
        reduced = [
            part / count if count else tensor.detach().reshape(-1).cpu()
            for part, tensor, count in zip(reduced, tensors, updates, strict=True)
        ]
    for (metric, name), tensor, part in zip(states, tensors, reduced, strict=True):
        setattr(metric, name, part.reshape(tensor.shape).to(tensor.device, tensor.dtype))


def _gather_together(states: list[tuple[Any, str]], collectives: "Ranks") -> None:
    own = [(_on_host(getattr(metric, name)), metric.update_count) for metric, name in states]
    ranks = collectives.gather_objects(own)
    for index, (metric, name) in enumerate(states):
        whole = merged_state(metric, name, [rank[index][0] for rank in ranks], [rank[index][1] for rank in ranks])
        moved = [tensor.to(metric.device) for tensor in whole] if isinstance(whole, list) else whole.to(metric.device)
        setattr(metric, name, moved)


def _on_host(state: Any) -> Any:
    if isinstance(state, list):
        return [tensor.detach().cpu().clone() for tensor in state]
    return state.detach().cpu().clone()


def _compute(metric: Any) -> float:
    # States are already reduced over ranks: disable torchmetrics' sync, and its warning on ranks without an update.
    parts = metrics_within([metric])
    before = [(set_synced(part, False), part.update_count) for part in parts]
    for part in parts:
        set_updates(part, max(1, part.update_count))
    try:
        value = metric.compute()
    finally:
        for part, (synced, updates) in zip(parts, before, strict=True):
            set_synced(part, synced)
            set_updates(part, updates)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TaskError(
            f"{type(metric).__name__}.compute() returned {type(value).__name__}, not one number; log its parts by name "
            f"with self.log_dict in on_validation_epoch_end."
        )
    return float(value)
