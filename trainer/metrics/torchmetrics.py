"""States of logged torchmetrics objects, reduced over ranks in as few collectives as possible.

States that are summed, concatenated or taken the maximum or minimum of can be merged at any time, so a process holds
one for all of its replicas. Others (dist_reduce_fx "mean", None or a function) can only be combined by a metric's
`compute`. A task with such a metric, and any task under `reproducible: bitwise`, has states per replica, which are
swapped into the metric objects in turn and merged in replica order.

States reduced by "mean" are weighted by their number of updates, as torchmetrics' own `forward` does; that equals the
single-process value when updates have equal sizes. States without an update are ignored.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import TaskError
from ...base.torch_private import reductions_of, set_synced, set_updates
from ..processes.ranks import Ranks

REDUCTION_NAMES = {"dim_zero_sum": "sum", "dim_zero_mean": "mean", "dim_zero_max": "max", "dim_zero_min": "min"}

# Reductions whose merged state can be updated further with the same result
MERGED_EARLY = ("sum", "max", "min")

# The states of one metric by name, and its number of updates
States = dict[str, Any]
COUNT = "_update_count"


def is_metric(value: Any) -> bool:
    """Return whether `value` is a torchmetrics.Metric, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def gather_state(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return every rank's `state`, by rank: what a metric's `compute()` calls in a hook. Collective.

    torchmetrics sends an empty float vector for a list state without an update, at which gloo aborts the process where
    the other ranks hold matrices or integers. So states are sent as objects, and empty ones are left out.
    """
    ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
    states = ranks.gather_objects(state.detach().cpu())
    return [one.to(state.device) for one in states if one.numel()] or [state]


class MetricStates:
    """The metrics of a task and their states, for each replica of this process where they cannot be merged early."""

    def __init__(self, task: nn.Module, replicas: Iterable[int], by_replica: bool) -> None:
        """Collect the metrics in `task`.

        replicas: those of this process.
        by_replica: give each replica its own states also where they could be merged early.
        """
        self.by_path = {path: module for path, module in task.named_modules() if is_metric(module)}
        for metric in self.by_path.values():
            metric.dist_sync_fn = metric.dist_sync_fn or gather_state
        self.replicas = list(replicas)
        # swapping copies states between batches, so it is left out where every state can be merged early
        self.swaps_states = bool(self.by_path) and (by_replica or any(map(must_stay_apart, self.by_path.values())))
        # States of the replicas that are not loaded into the metrics, by path
        self.kept: dict[str, dict[int, States]] = {path: {} for path in self.by_path}
        self.replica: int | None = None
        # While metrics hold the merged states of all replicas: their numbers of updates, by path
        self.merged_updates: dict[str, int] = {}

    @cached_property
    def with_states(self) -> dict[str, Any]:
        """The metrics that own states; a composition such as a sum of two metrics has none."""
        return {path: metric for path, metric in self.by_path.items() if reductions_of(metric)}

    def path_of(self, metric: Any) -> str | None:
        """Return the module path of a metric in the task, or None."""
        return next((path for path, module in self.by_path.items() if module is metric), None)

    def keeps(self, replica: int) -> bool:
        """Return whether this process holds the states of a replica."""
        return replica in self.replicas

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
            return {path: {r: copied(states) for r, states in self._own(path).items()} for path in self.kept}
        return {
            path: {0: copied({**_tensors_of(metric), COUNT: metric.update_count})}
            for path, metric in self.with_states.items()
        }

    def restore(self, snapshot: dict[str, dict[int, States]]) -> None:
        """Restore states from a `snapshot`."""
        if self.swaps_states:
            self._leave_merged()
            for path, own in snapshot.items():
                others = {
                    replica: states for replica, states in self.kept[path].items() if replica not in self.replicas
                }
                self.kept[path] = {**others, **own}
            self.replica = None
            return
        for path, metric in self.with_states.items():
            load_states(metric, snapshot[path][0])

    def merge(self, metrics: Iterable[Any], collectives: Ranks) -> None:
        """Load the states of all replicas of all ranks, merged in order, into these metrics. Collective."""
        for path, parts in self.gather(metrics, collectives).items():
            if any(states[COUNT] for states in parts.values()):
                load_states(self.by_path[path], merged_in_order(self.by_path[path], parts))
            elif parts:
                self.by_path[path].reset()  # no batch updated it; drop states from before

    def load_merged(self, collectives: Ranks) -> None:
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
            # back to what the metric was made with, which a program may have switched off
            set_synced(metric, metric.sync_on_compute)
            if count and not metric.update_count:
                self.kept[path] = {}
            elif metric.update_count and not count:
                with torch.inference_mode(False):
                    self.kept[path] = {self.replicas[0]: states_of(metric)}
        self.merged_updates = {}

    def forget(self, metrics: Iterable[Any]) -> None:
        """Reset these metrics for every replica."""
        for path in self.paths_of(metrics):
            self.kept[path] = {}

    def gather(self, metrics: Iterable[Any], collectives: Ranks) -> dict[str, dict[int, States]]:
        """Return the states of these metrics over all ranks, by path and replica. Collective.

        Without states per replica, a rank's states are those of its first replica.
        """
        paths = [path for path in self.paths_of(metrics) if path in self.with_states]
        if self.swaps_states:
            self.store_replica()
            own = {path: self._own(path) for path in paths}
        else:
            # one state for all replicas of the process goes under the first of them, which no other process has
            own = {path: {self.replicas[0]: states_of(self.by_path[path])} for path in paths}
        # by pickle: list states differ in length from rank to rank
        ranks = collectives.gather_objects(own)
        return {path: {replica: states for rank in ranks for replica, states in rank[path].items()} for path in paths}

    def paths_of(self, metrics: Iterable[Any]) -> list[str]:
        """Return the module paths of metrics and of those nested in them, where they are the task's."""
        return [path for path in map(self.path_of, metrics_within(metrics)) if path is not None]

    def _own(self, path: str) -> dict[int, States]:
        return {replica: states for replica, states in self.kept[path].items() if replica in self.replicas}

    def load(self, saved: Mapping[str, Mapping[int, States]]) -> None:
        """Load this process's part of what `gather` returned, on any number of processes."""
        for path, states_of_all in saved.items():
            metric = self.by_path[path]
            own = {replica: states for replica, states in states_of_all.items() if self.keeps(replica)}
            if self.swaps_states:
                self.kept[path] = own
            elif own:
                load_states(metric, merged_in_order(metric, own))
            else:
                metric.reset()


def must_stay_apart(metric: Any) -> bool:
    """Return whether a metric has a state that, once merged over replicas, cannot be updated further."""
    return any(
        isinstance(getattr(metric, name), Tensor) and operation_of(reduction) not in MERGED_EARLY
        for name, reduction in reductions_of(metric).items()
    )


def operation_of(reduction: Any) -> str | None:
    """Return the word for a state's reduction; None for a function of the user's own, and for no reduction."""
    return REDUCTION_NAMES.get(getattr(reduction, "__name__", ""))


def metrics_within(metrics: Iterable[Any]) -> list[Any]:
    """Return metrics and the metrics nested in them (compositions, wrappers), each once."""
    every = (module for metric in metrics for module in metric.modules() if is_metric(module))
    return list({id(module): module for module in every}.values())  # by id: the hash of a metric is that of its states


def updates_within(metric: Any) -> int:
    """Return the number of updates of a metric and its nested metrics."""
    # a program may update a metric past its wrapper, which then counts nothing
    return sum(inner.update_count for inner in metrics_within([metric]))


def _tensors_of(metric: Any) -> States:
    return {name: getattr(metric, name) for name in reductions_of(metric)}


def copied(states: States) -> States:
    """Copy states; list states are copied shallowly, since their tensors are never changed in place."""
    return {
        name: list(value) if isinstance(value, list) else value.clone() if isinstance(value, Tensor) else value
        for name, value in states.items()
    }


def states_of(metric: Any) -> States:
    """Return a copy of a metric's states, on the CPU."""
    return {**{name: _on_host(state) for name, state in _tensors_of(metric).items()}, COUNT: metric.update_count}


def load_states(metric: Any, states: States) -> None:
    """Load states into a metric, on its device."""
    for name in reductions_of(metric):
        value, device = states[name], metric.device
        setattr(metric, name, [part.to(device) for part in value] if isinstance(value, list) else value.to(device))
    set_updates(metric, states[COUNT])


def merged_in_order(metric: Any, by_replica: Mapping[int, States]) -> States:
    """Return the states of all these replicas merged in replica order."""
    parts = [by_replica[replica] for replica in sorted(by_replica)]
    if len(parts) == 1:
        return copied(parts[0])  # unchanged: a stacked state has a shape that `update` cannot continue from
    counts = [part[COUNT] for part in parts]
    merged: States = {
        name: merged_state(reduction, [part[name] for part in parts], counts)
        for name, reduction in reductions_of(metric).items()
    }
    return {**merged, COUNT: sum(counts)}


def merged_state(reduction: Any, values: list[Any], counts: list[int]) -> Any:
    """Return one state merged from `values`, in order.

    counts: the number of updates of each. Without an update a state only counts in sums, because it may hold no valid
    number.
    """
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    operation = operation_of(reduction)
    if operation == "sum":
        return sum(values[1:], values[0].clone())  # one after the other: float addition is not associative
    updated = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    if operation == "mean" and updated:
        weighted = [value.double() * count for value, count in updated]
        return (sum(weighted[1:], weighted[0]) / sum(counts)).to(values[0].dtype)
    stacked = torch.stack([value for value, _ in updated] or values)
    return stacked if reduction is None else reduction(stacked)


def read_values(metrics: list[Any], collectives: Ranks, is_merged: bool, keep: bool = False) -> list[float]:
    """Compute each metric over all ranks, then reset it, or with `keep` restore this rank's states.

    is_merged: the metrics hold the states of all ranks.
    """
    parts = metrics_within(metrics)
    before = [states_of(part) for part in parts] if keep else []
    if not is_merged:
        of_ranks = collectives.gather_objects([states_of(part) for part in parts])
        for part, *states in zip(parts, *of_ranks, strict=True):
            if any(one[COUNT] for one in states):
                load_states(part, merged_in_order(part, dict(enumerate(states))))
    values = [_compute(metric) for metric in metrics]
    for part in parts:
        part.reset()
    for part, states_before in zip(parts, before, strict=bool(before)):
        load_states(part, states_before)
    return values


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
