"""torchmetrics: the states of every logged metric, reduced over ranks together instead of each by itself.

Where not one bit may depend on the number of processes, every replica has states of its own, which take turns in the
metric objects and are merged in the order of the replicas. So it is, for the rest of an epoch, where a run goes on with
several states that no single one can stand for (dist_reduce_fx=None): only a metric's `compute` can merge those.

States reduced by "mean" are weighted by how often each was updated, as torchmetrics' own `forward` merges a batch into
an epoch: that is the value of one process where each update counts as much as another. Where updates weigh by their
samples it cannot be; torchmetrics' own metrics keep a sum and a count for that. Who had no update has no part in it.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import TaskError
from ..torch_private import reductions_of, set_synced, set_updates, updates_of

if TYPE_CHECKING:
    from ..processes.collectives import Collectives

REDUCTION_NAMES = {"dim_zero_sum": "sum", "dim_zero_mean": "mean", "dim_zero_max": "max", "dim_zero_min": "min"}
MERGED_EARLY = ("sum", "max", "min")
"""The operations after whose result updates may go on as if there had been one state from the beginning."""

States = dict[str, Any]
"""The states of one metric by name, and how often it was updated."""
COUNT = "_update_count"


def is_metric(value: Any) -> bool:
    """Return whether `value` is a torchmetrics.Metric, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


class MetricStates:
    """The metrics of a task. With `by_replica` each replica has states of its own, which take turns in the metrics."""

    def __init__(self, task: nn.Module, replicas: Iterable[int], by_replica: bool, shared: bool = False) -> None:
        """`replicas` are those of this process; with `shared` it also keeps what others told it of theirs."""
        self.by_path = {path: module for path, module in task.named_modules() if is_metric(module)}
        self.replicas, self.by_replica, self.shared = list(replicas), by_replica, shared
        self.taking_turns = by_replica and bool(self.by_path)
        self.apart: set[str] = set()
        """The metrics for whose sake all take turns until those are read, also without `by_replica`."""
        self.kept: dict[str, dict[int, States]] = {path: {} for path in self.by_path}
        self.told: set[str] = set()
        """The metrics of which others were told, where they are."""
        self.replica: int | None = None
        self.together: dict[str, int] = {}
        """While metrics stand for all replicas: how many updates each one stands for."""

    @cached_property
    def with_states(self) -> dict[str, Any]:
        """The metrics with states of their own: a sum of two has none, and its `reset` is that of both."""
        return {path: metric for path, metric in self.by_path.items() if reductions_of(metric)}

    def path_of(self, metric: Any) -> str | None:
        """Return under which name the task holds a metric; None where it does not."""
        return next((path for path, module in self.by_path.items() if module is metric), None)

    def open_replica(self, replica: int) -> None:
        """Put the states of `replica` into the metrics, and those that were there aside."""
        if replica == self.replica:
            return
        self.put_aside()
        with torch.inference_mode(False):  # an evaluation's turns also pass through the metrics of the training
            for path, metric in self.with_states.items():
                if replica not in self.kept[path]:
                    metric.reset()  # before others are loaded: it may reset those that it is made of
            for path, metric in self.with_states.items():
                if replica in self.kept[path]:
                    load_states(metric, self.kept[path][replica])
        self.replica = replica

    def put_aside(self) -> None:
        """Take the states of the replica whose turn it is out of the metrics."""
        self._part()
        if self.replica is not None:
            with torch.inference_mode(False):
                for path, metric in self.with_states.items():
                    self.kept[path][self.replica] = states_of(metric)
        self.replica = None

    def snapshot(self) -> dict[str, dict[int, States]]:
        """Return copies of all states of this process, by path and replica, which `restore` takes back."""
        if self.taking_turns:
            self.put_aside()
            return {path: {r: copied(kept[r]) for r in kept if r in self.replicas} for path, kept in self.kept.items()}
        found: dict[str, dict[int, States]] = {}
        for path, metric in self.with_states.items():
            own = {name: getattr(metric, name) for name in reductions_of(metric)}
            found[path] = {0: copied({**own, COUNT: updates_of(metric)})}
        return found

    def restore(self, snapshot: dict[str, dict[int, States]]) -> None:
        """Put the states back that `snapshot` returned."""
        if self.taking_turns:
            self._part()
            for path, own in snapshot.items():
                others = {
                    replica: states for replica, states in self.kept[path].items() if replica not in self.replicas
                }
                self.kept[path] = {**others, **own}
            self.replica = None
            return
        for path, metric in self.with_states.items():
            load_states(metric, snapshot[path][0])

    def merge(self, metrics: Iterable[Any], collectives: "Collectives") -> None:
        """Give these metrics the states of all replicas of all ranks, merged in order."""
        gathered = {path: parts for path, parts in self.gather(metrics, collectives).items() if parts}
        updated = [path for path, parts in gathered.items() if any(states[COUNT] for states in parts.values())]
        for path in gathered.keys() - set(updated):
            self.by_path[path].reset()  # no turn had anything for it; a hook may have, which it takes as it is
        for path in updated:
            load_states(self.by_path[path], merged_in_order(self.by_path[path], gathered[path]))

    def stand_together(self, collectives: "Collectives") -> None:
        """Let every metric stand for all replicas of all ranks until the next turn, so that hooks may compute it."""
        self.merge(self.with_states.values(), collectives)
        for path, metric in self.with_states.items():
            self.together[path] = updates_of(metric)
            if updates_of(metric):
                set_synced(metric, False)  # or torchmetrics would count all of it once for each rank

    def _part(self) -> None:
        """Let metrics stand for one replica again; what a hook has reset begins anew, what it alone updated stays."""
        for path, count in self.together.items():
            metric = self.by_path[path]
            set_synced(metric, metric.sync_on_compute)
            if count and not updates_of(metric):
                self.kept[path] = {}
            elif updates_of(metric) and not count:
                with torch.inference_mode(False):
                    self.kept[path] = {self.replicas[0]: states_of(metric)}
        self.together = {}

    def forget(self, metrics: Iterable[Any]) -> None:
        """Let these metrics begin anew for every replica."""
        for metric in metrics_within(metrics):
            path = self.path_of(metric)
            if path is not None:
                self.kept[path] = {}
                self.apart.discard(path)
        if self.taking_turns and not (self.by_replica or self.apart):
            self._end_turns()

    def _end_turns(self) -> None:
        """Let every metric stand for all replicas of this process again."""
        self.put_aside()
        self.taking_turns = False
        with torch.inference_mode(False):
            for path, metric in self.with_states.items():
                if self.kept[path]:
                    load_states(metric, merged_in_order(metric, self.kept[path]))
                    self.kept[path] = {}

    def gather(self, metrics: Iterable[Any], collectives: "Collectives") -> dict[str, dict[int, States]]:
        """Return the states of these metrics over all ranks, by path and replica; else by a rank's first replica."""
        found = map(self.path_of, metrics_within(metrics))
        paths = [path for path in found if path is not None and path in self.with_states]
        if self.taking_turns:
            self.put_aside()
            own = {path: self._own(path) for path in paths}
        else:
            own = {path: {self.replicas[0]: states_of(self.by_path[path])} for path in paths}
        ranks = collectives.gather_objects(own)
        return {path: {replica: states for rank in ranks for replica, states in rank[path].items()} for path in paths}

    def _own(self, path: str) -> dict[int, States]:
        return {replica: states for replica, states in self.kept[path].items() if replica in self.replicas}

    def own(self) -> dict[str, dict[int, States]]:
        """Return the states of this process's replicas, of every metric that has some or had some; turns go on."""
        if not self.taking_turns:
            return {}
        replica = self.replica
        self.put_aside()
        self.replica = replica
        found = {path: self._own(path) for path in self.kept}
        self.told |= {path for path, own in found.items() if any(states[COUNT] for states in own.values())}
        return {path: own for path, own in found.items() if path in self.told}

    def accept(self, states: Mapping[str, Mapping[int, States]]) -> None:
        """Keep what another process told of its replicas, or this one of its own."""
        for path, others in states.items():
            self.kept[path] |= {replica: own for replica, own in others.items() if replica not in self.replicas}

    def all(self) -> dict[str, dict[int, States]]:
        """Return what is known of every replica's states, by path and replica."""
        replica = self.replica
        self.put_aside()
        self.replica = replica
        return {path: dict(kept) for path, kept in self.kept.items() if any(states[COUNT] for states in kept.values())}

    def load(self, saved: Mapping[str, Mapping[int, States]]) -> None:
        """Take over this process's part of what `gather` returned, on any number of processes.

        All processes are given the same, and so agree on whether metrics take turns from now on.
        """
        self.apart = {
            path
            for path, parts in saved.items()
            if len(parts) > 1 and not are_merged_early(self.by_path[path], parts.values())
        }
        if self.taking_turns and not (self.by_replica or self.apart):
            self._end_turns()
        self.taking_turns |= bool(self.apart)
        for path, states_of_all in saved.items():
            metric = self.by_path[path]
            own = {r: states for r, states in states_of_all.items() if self.shared or r in self.replicas}
            if self.taking_turns:
                self.kept[path] = own
            elif own:
                load_states(metric, merged_in_order(metric, own))
            else:
                metric.reset()


def metrics_within(metrics: Iterable[Any]) -> list[Any]:
    """Return metrics and those that they are made of (a sum of two, a wrapper), each once."""
    every = (module for metric in metrics for module in metric.modules() if is_metric(module))
    return list({id(one): one for one in every}.values())


def updates_within(metric: Any) -> int:
    """Return how often a metric, and those that it is made of, were updated."""
    return sum(map(updates_of, metrics_within([metric])))


def copied(states: States) -> States:
    """Return states that do not change with their metric; the tensors in a list are never changed."""
    kept: States = {}
    for name, value in states.items():
        kept[name] = list(value) if isinstance(value, list) else value.clone() if isinstance(value, Tensor) else value
    return kept


def states_of(metric: Any) -> States:
    """Return a metric's states, on the host."""
    return {**{name: _on_host(getattr(metric, name)) for name in reductions_of(metric)}, COUNT: updates_of(metric)}


def load_states(metric: Any, states: States) -> None:
    """Put states into a metric, on its device."""
    for name in reductions_of(metric):
        value = states[name]
        moved = [tensor.to(metric.device) for tensor in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
    set_updates(metric, states[COUNT])


def are_merged_early(metric: Any, parts: Iterable[States]) -> bool:
    """Return whether a metric may go on from one state that stands for all of `parts`."""
    reductions = [(name, getattr(reduction, "__name__", "")) for name, reduction in reductions_of(metric).items()]
    return all(
        isinstance(part[name], list) or REDUCTION_NAMES.get(reduction) in MERGED_EARLY
        for part in parts
        for name, reduction in reductions
    )


def merged_in_order(metric: Any, by_replica: Mapping[int, States]) -> States:
    """Return states that stand for those of all these replicas, merged in their order."""
    parts = [by_replica[replica] for replica in sorted(by_replica)]
    if len(parts) == 1:
        return copied(parts[0])  # as it is: to stack it would give it a form from which no update can go on
    counts = [part[COUNT] for part in parts]
    found: States = {
        name: merged_state(metric, name, [part[name] for part in parts], counts) for name in reductions_of(metric)
    }
    found[COUNT] = sum(counts)
    return found


def merged_state(metric: Any, name: str, values: list[Any], counts: list[int]) -> Any:
    """Return one state that stands for all of `values`, added up from the first to the last.

    counts: how often each was updated. Those that never were stay out of all but sums: they may stand for no number.
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


def read_metrics(metrics: list[Any], collectives: "Collectives", world: int, keep: bool = False) -> list[float]:
    """Return each metric's value over all ranks; reset it, or with `keep` leave this rank's states as they were.

    States that are summed, averaged or compared travel in one collective for each operation and type; lists of
    tensors (and states with a reduction of their own) in one more.
    """
    parts = metrics_within(metrics)
    before = [states_of(part) for part in parts] if keep else []
    fixed: dict[tuple[str, torch.dtype], list[tuple[Any, str]]] = {}
    loose: list[tuple[Any, str]] = []
    for metric in parts if world > 1 else []:
        for name, reduction in reductions_of(metric).items():
            operation = REDUCTION_NAMES.get(getattr(reduction, "__name__", ""))
            state = getattr(metric, name)
            if operation is None or not isinstance(state, Tensor):
                loose.append((metric, name))
            else:
                wide = torch.float64 if state.is_floating_point() or operation == "mean" else torch.int64
                fixed.setdefault((operation, wide), []).append((metric, name))
    for (operation, wide), states in fixed.items():
        _reduce_together(states, operation, wide, collectives)
    if loose:
        _gather_together(loose, collectives)
    values = [_compute(metric) for metric in metrics]
    for part in parts:
        part.reset()
    for part, states_before in zip(parts, before, strict=bool(before)):
        load_states(part, states_before)
    return values


def _reduce_together(
    states: list[tuple[Any, str]], operation: str, wide: torch.dtype, collectives: "Collectives"
) -> None:
    tensors = [getattr(metric, name) for metric, name in states]
    parts = [tensor.detach().reshape(-1).to("cpu", wide) for tensor in tensors]
    if operation == "mean":
        counts = [updates_of(metric) for metric, _ in states]
        # not a product: a state without an update may be infinite
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


def _gather_together(states: list[tuple[Any, str]], collectives: "Collectives") -> None:
    own = [(_on_host(getattr(metric, name)), updates_of(metric)) for metric, name in states]
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
    # the states are those of all ranks already, and a rank without a batch has them too
    parts = metrics_within([metric])
    before = [(set_synced(part, False), updates_of(part)) for part in parts]
    for part in parts:
        set_updates(part, max(1, updates_of(part)))
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
