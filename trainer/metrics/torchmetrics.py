"""States of logged torchmetrics objects, reduced across ranks with as few collectives as possible.

States reduced by sum, concatenation, maximum or minimum can be merged at any time, so a process stores a single state
for all of its replicas, under its first replica. Other states (dist_reduce_fx "mean", None or a function) can only be
combined by a metric's `compute`. A task with such a metric, and any task under `reproducible: bitwise`, has one state
per replica. The states are swapped into the metric objects in turn and merged in replica order.

States reduced by "mean" are weighted by their number of updates, as in torchmetrics' `forward`. The result matches a
single-process run if all updates have the same size. States that were never updated are ignored.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import TaskError
from ...base.tensors import map_tensors
from ...base.torch_private import reductions_of, set_synced, set_updates
from ..accelerators import widest_float
from ..processes.ranks import Ranks

# torchmetrics reductions whose merged state can be updated further without changing the result
MERGED_EARLY = ("dim_zero_sum", "dim_zero_max", "dim_zero_min")

# The states of one metric by name, and its number of updates
States = dict[str, Any]
COUNT = "_update_count"


def is_metric(value: Any) -> bool:
    """Return whether `value` is a torchmetrics.Metric, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def gather_state(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return every rank's `state`, in rank order, for a metric's `compute()` in a hook. All ranks must call this.

    For a list state that was never updated, torchmetrics sends an empty float vector, and gloo aborts the process if
    other ranks send matrices or integers. To avoid this, states are sent as objects, and empty states are omitted.
    """
    ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
    states = ranks.gather_objects(state.detach().cpu())
    return [item.to(state.device) for item in states if item.numel()] or [state]


class MetricStates:
    """The metrics of a task, and the states of this process's replicas that are not in the metric objects."""

    def __init__(self, task: nn.Module, replicas: Iterable[int], by_replica: bool) -> None:
        """Collect the metrics in `task`.

        Args:
            replicas: this process's replicas.
            by_replica: whether to keep separate states per replica even if they could be merged early.
        """
        self.task, self.replicas, self.by_replica = task, list(replicas), by_replica
        self.by_path: dict[str, Any] = {}
        # Metrics with states; a composition such as a sum of two metrics has none
        self.with_states: dict[str, Any] = {}
        # Whether each replica has separate states; only if needed, as swapping takes time between batches
        self.swaps_states = False
        # States by path and replica; the entry of the replica loaded into the metrics is outdated
        self.kept: dict[str, dict[int, States]] = {}
        # The replica whose states are loaded into the metrics
        self.replica = self.replicas[0]
        # Number of updates, by path, of metrics that contain the merged states of all replicas instead
        self.merged: dict[str, int] = {}
        self.find_metrics()

    def find_metrics(self) -> None:
        """Find the task's metrics. Hooks may have created new ones since the last call."""
        self.by_path = {path: module for path, module in self.task.named_modules() if is_metric(module)}
        self.with_states = {path: metric for path, metric in self.by_path.items() if reductions_of(metric)}
        self.swaps_states |= bool(self.by_path) and (
            self.by_replica or any(map(must_stay_apart, self.by_path.values()))
        )
        for path, metric in self.by_path.items():
            metric.dist_sync_fn = metric.dist_sync_fn or gather_state
            self.kept.setdefault(path, {})

    def path_of(self, metric: Any) -> str | None:
        """Return the module path of a metric in the task, or None."""
        return next((path for path, module in self.by_path.items() if module is metric), None)

    def keeps(self, replica: int) -> bool:
        """Return whether this process stores the states of a replica."""
        return replica in self.replicas

    def open_replica(self, replica: int) -> None:
        """Store the states that the metric objects contain and load those of a replica into the objects."""
        replica = replica if self.swaps_states else self.replicas[0]
        if replica != self.replica or self.merged:
            self.save()
            paths = [*self.merged] if replica == self.replica else [*self.with_states]
            self.replica = replica
            self._load(paths)

    def _load(self, paths: Sequence[str]) -> None:
        """Load the states of the opened replica."""
        with torch.inference_mode(False):  # evaluation runs in inference mode, but training metrics need normal tensors
            for path in paths:
                if self.replica not in self.kept[path]:
                    self.by_path[path].reset()  # before any is loaded: reset may recurse into nested metrics
            for path in paths:
                metric = self.by_path[path]
                if self.replica in self.kept[path]:
                    load_states(metric, self.kept[path][self.replica])
                if self.merged.pop(path, None):
                    # the metric's setting, which the user's code may have switched off
                    set_synced(metric, metric.sync_on_compute)

    def save(self) -> None:
        """Store the states that the metric objects contain.

        Merged states are stored only if a hook has reset or updated them since the merge.
        """
        for path, metric in self.with_states.items():
            count = self.merged.get(path)
            if count is None:
                self.kept[path][self.replica] = held_by(metric)
            elif count and not metric.update_count:
                self.kept[path] = {}
            elif metric.update_count and not count:
                self.kept[path] = {self.replicas[0]: held_by(metric)}

    def snapshot(self) -> dict[str, dict[int, States]]:
        """Return copies of all of this process's states, keyed by path and replica, for use by `restore`."""
        self.save()
        return {path: {r: copied(states) for r, states in self._own(path).items()} for path in self.kept}

    def restore(self, snapshot: dict[str, dict[int, States]]) -> None:
        """Restore states from a `snapshot`."""
        for path, local in snapshot.items():
            remote = {replica: states for replica, states in self.kept[path].items() if replica not in self.replicas}
            self.kept[path] = {**remote, **local}
        self._load([*self.with_states])

    def merge(self, metrics: Iterable[Any], collectives: Ranks) -> None:
        """Load the merged states of all ranks' replicas into these metrics. All ranks must call this.

        The merged states remain loaded until the next batch starts.
        """
        if collectives.size == len(self.replicas) == 1:
            return  # the metrics already hold the only states
        for path, parts in self.gather(metrics, collectives).items():
            metric = self.by_path[path]
            if any(states[COUNT] for states in parts.values()):
                load_states(metric, merged_in_order(metric, parts))
            elif parts:
                metric.reset()  # no batch updated it: discard older states
            self.merged[path] = metric.update_count
            if metric.update_count:
                set_synced(metric, False)  # already merged: torchmetrics' sync would count it once per rank

    def forget(self, metrics: Iterable[Any]) -> None:
        """Reset these metrics for every replica."""
        for metric in metrics_within(metrics):
            metric.reset()
            if (path := self.path_of(metric)) is not None:
                self.kept[path] = {}

    def gather(self, metrics: Iterable[Any], collectives: Ranks) -> dict[str, dict[int, States]]:
        """Return the states of these metrics on all ranks, keyed by path and replica. All ranks must call this."""
        paths = [path for path in self.paths_of(metrics) if path in self.with_states]
        self.save()
        local = {path: {r: on_host(states) for r, states in self._own(path).items()} for path in paths}
        # by pickle, as list states differ in length between ranks
        ranks = collectives.gather_objects(local)
        return {path: {replica: states for rank in ranks for replica, states in rank[path].items()} for path in paths}

    def paths_of(self, metrics: Iterable[Any]) -> list[str]:
        """Return the paths of metrics and their nested metrics in the task. Metrics outside the task are omitted."""
        return [path for path in map(self.path_of, metrics_within(metrics)) if path is not None]

    def _own(self, path: str) -> dict[int, States]:
        return {replica: states for replica, states in self.kept[path].items() if replica in self.replicas}

    def load(self, saved: Mapping[str, Mapping[int, States]]) -> None:
        """Load the states of this process's replicas from the result of `gather` on any number of processes."""
        self.save()
        for path, states_of_all in saved.items():
            local = {replica: states for replica, states in states_of_all.items() if self.keeps(replica)}
            if local and not self.swaps_states:
                local = {self.replicas[0]: merged_in_order(self.by_path[path], local)}
            self.kept[path] = local
        self.replica = self.replicas[0]
        self._load([*self.with_states])


def must_stay_apart(metric: Any) -> bool:
    """Return whether a metric has a state that cannot be updated further once it has been merged across replicas."""
    return any(
        isinstance(getattr(metric, name), Tensor) and getattr(reduction, "__name__", "") not in MERGED_EARLY
        for name, reduction in reductions_of(metric).items()
    )


def metrics_within(metrics: Iterable[Any]) -> list[Any]:
    """Return metrics and the metrics nested in them (compositions, wrappers), without duplicates."""
    every = (module for metric in metrics for module in metric.modules() if is_metric(module))
    return list({id(module): module for module in every}.values())  # by id, as a metric's hash depends on its states


def updates_within(metric: Any) -> int:
    """Return the total number of updates to a metric and its nested metrics."""
    # a program may update a metric directly rather than its wrapper, whose count then stays 0
    return sum(inner.update_count for inner in metrics_within([metric]))


def held_by(metric: Any) -> States:
    """Return the states that a metric contains. Lists are copied, because `reset` empties them in place."""
    held = {name: getattr(metric, name) for name in reductions_of(metric)}
    return {
        **{name: list(state) if isinstance(state, list) else state for name, state in held.items()},
        COUNT: metric.update_count,
    }


def copied(states: States) -> States:
    """Copy states. Lists are copied shallowly, because their tensors are never changed in place."""
    return {
        name: list(value) if isinstance(value, list) else value.clone() if isinstance(value, Tensor) else value
        for name, value in states.items()
    }


def on_host(states: States) -> States:
    """Copy states, including lists, to the host."""
    copies: States = map_tensors(states, lambda tensor: tensor.detach().cpu().clone())
    return copies


def states_of(metric: Any) -> States:
    """Return a copy of a metric's states on the CPU."""
    return on_host(held_by(metric))


def load_states(metric: Any, states: States) -> None:
    """Load states into a metric, on its device."""
    for name in reductions_of(metric):
        value, device = states[name], metric.device
        setattr(metric, name, [item.to(device) for item in value] if isinstance(value, list) else value.to(device))
    set_updates(metric, states[COUNT])


def merged_in_order(metric: Any, by_replica: Mapping[int, States]) -> States:
    """Return the states of multiple replicas, merged in replica order."""
    parts = [by_replica[replica] for replica in sorted(by_replica)]
    if len(parts) == 1:
        return copied(parts[0])  # unchanged: `update` could not continue from the shape of a stacked state
    counts = [part[COUNT] for part in parts]
    merged: States = {
        name: merged_state(reduction, [part[name] for part in parts], counts)
        for name, reduction in reductions_of(metric).items()
    }
    return {**merged, COUNT: sum(counts)}


def merged_state(reduction: Any, values: list[Any], counts: list[int]) -> Any:
    """Merge `values`, in order, into a single state.

    Args:
        counts: the number of updates to each state. A state that was never updated is used only in sums, because it may
            not contain a valid number.
    """
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    operation = getattr(reduction, "__name__", "")
    if operation == "dim_zero_sum":
        return sum(values[1:], values[0].clone())  # one after the other: float addition is not associative
    updated = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    if operation == "dim_zero_mean" and updated:
        weighted = [value.to(widest_float(value.device)) * count for value, count in updated]
        return (sum(weighted[1:], weighted[0]) / sum(counts)).to(values[0].dtype)
    stacked = torch.stack([value for value, _ in updated] or values)
    return stacked if reduction is None else reduction(stacked)


def value_of(metric: Any) -> float:
    """Compute a metric from its current states, which must already be merged across all ranks."""
    # without torchmetrics' sync and its warning on ranks without an update
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
            f"{type(metric).__name__}.compute() returned {type(value).__name__}, not a single number. Log its values "
            f"by name with self.log_dict in on_validation_epoch_end."
        )
    return float(value)
