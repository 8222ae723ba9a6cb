"""Logged values of an elastic run. Every rank stores the values of all ranks, so no values are lost if a rank dies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ..metrics.log import Metrics, Sums, as_lists
from ..metrics.reduce import Reduced, Row, Series, sort_out, total
from ..metrics.torchmetrics import COUNT, MetricStates, States, on_host

# Replica index of values that a hook logs once per process. Only the first process's values count, because the number
# of processes may change.
ONCE_PER_PROCESS = -2


class SharedStates(MetricStates):
    """The metric states of each replica, including the latest states from other processes."""

    def __init__(self, task: nn.Module, replicas: Iterable[int], by_replica: bool) -> None:
        super().__init__(task, replicas, by_replica)
        # Paths of the metrics whose states were sent to other processes
        self.sent: set[str] = set()

    def keeps(self, replica: int) -> bool:
        """Return True, because every process stores the states of all replicas."""
        return True

    def own_states(self) -> dict[str, dict[int, States]]:
        """Return the states of this process's replicas, keyed by path and replica.

        All metrics that have been updated are included, even if they were reset after the update.
        """
        self.save()
        local = {path: {r: on_host(states) for r, states in self._own(path).items()} for path in self.kept}
        # also after a reset, because other ranks must reset the metric, too
        self.sent |= {path for path, replicas in local.items() if any(states[COUNT] for states in replicas.values())}
        return {path: replicas for path, replicas in local.items() if path in self.sent}

    def add_remote(self, states: Mapping[str, Mapping[int, States]]) -> None:
        """Store the states of other processes' replicas."""
        for path, remote in states.items():
            self.kept[path] |= {replica: state for replica, state in remote.items() if replica not in self.replicas}

    def all(self) -> dict[str, dict[int, States]]:
        """Return the states of all replicas for each updated metric, keyed by path and replica."""
        self.save()
        updated = (path for path, kept in self.kept.items() if any(states[COUNT] for states in kept.values()))
        return {path: {r: on_host(states) for r, states in self.kept[path].items()} for path in updated}


class SharedMetrics(Metrics):
    """Logged values of all ranks, available on every rank.

    Before each weight update, the ranks exchange their new values and count them.
    """

    shares: ClassVar[bool] = True
    states: SharedStates

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Training values that have not been sent to other ranks yet
        self.unshared: list[Row] = []
        # Number of exchanges; of two ranks at the same step, the rank with more exchanges is ahead
        self.exchanges = 0

    def open(self, stage: str, fresh: bool = True, loaders: int = 1) -> None:
        """Start logging values for `stage`. If `fresh` is True, drop the stage's earlier values."""
        super().open(stage, fresh, loaders)
        if fresh and stage == "train":
            self.unshared = []

    def make_states(self, replicas: list[int], by_replica: bool) -> SharedStates:
        """Return the states of the task's metrics, keyed by replica."""
        return SharedStates(self.task, replicas, by_replica=True)

    def leave_batches(self, samples: int) -> None:
        """Count values from subsequent log() calls per process, not per batch."""
        super().leave_batches(samples)
        if self.first_replica and self.stage == "train":
            self.replica = ONCE_PER_PROCESS

    def flush(self) -> None:
        """Read all pending values. Training values are not counted until the next exchange.

        Otherwise, the values from an interrupted step would be counted twice, because the step is repeated.
        """
        if self.stage == "train":
            self.unshared += self.read_pending()
        else:
            super().flush()

    def drop_step(self) -> None:
        """Ignore all values from the latest step, including values logged after this call."""
        self.unshared = [row for row in self.unshared if row[4] not in (self.step, self.dropped)]
        super().drop_step()

    def rewind(self, step: int) -> None:
        """Discard values logged in `step` and later, so that these steps can be repeated."""
        self.unshared = [row for row in self.unshared if row[4] < step and row[0].in_step]
        super().rewind(step)

    # --- exchanges --------------------------------------------------------------------------------------------------
    def share_step(self) -> None:
        """Exchange the current step's values among all ranks before the weights are updated.

        All ranks must call this.

        Because of the exchange, no values from a finished step are lost if a rank dies. Values logged later in the
        step are sent with the next step's values or at the next logging point.
        """
        self._share((), names=True)

    def share(self) -> None:
        """Send the values logged since the last exchange to all other ranks. All ranks must call this."""
        self._share(())

    def _share(self, extra: Sequence[float], names: bool = False) -> list[float]:
        """Exchange values among ranks. Return the maximum over ranks of each entry in `extra`.

        If the exchange fails, this rank's values are left unchanged.

        Args:
            names: whether to compare the names that ranks logged in the latest step.
        """
        if self.stage == "train":
            self.flush()
        if self.processes == 1:
            self.count(self.unshared)
            self.unshared, self.exchanges = [], self.exchanges + 1
            return list(extra)
        trained, states = self.stages.setdefault("train", {}), self.states.own_states()
        absent = self.batches_of_step == 0
        ranks, extras = self.exchange.gather(self.unshared, [float(bool(states)), float(absent), *extra])
        if names:
            self.compare([self._logged_in_step(rows) for rows in ranks], [bool(of_rank[1]) for of_rank in extras])
        states_of_all = self.collectives.gather_objects(states) if any(of_rank[0] for of_rank in extras) else []
        descriptions = self.exchange.descriptions
        self.count(
            (self.find_series(trained, descriptions[number]), replica, value, weight, step)
            for number, replica, value, weight, step in (row for rows in ranks for row in rows)
            if replica != ONCE_PER_PROCESS
        )
        for remote in states_of_all:
            self.states.add_remote(remote)
        self.unshared, self.exchanges = [], self.exchanges + 1
        return [max(column) for column in zip(*extras, strict=True)][2:]

    def _logged_in_step(self, rows: list[tuple[int, int, float, float, int]]) -> list[int]:
        """Return the indices of the series with values in the latest step, excluding series that only rank 0 logs."""
        alone = {number for number, description in enumerate(self.exchange.descriptions) if Series(*description).alone}
        return [number for number, *_, step in rows if step == self.step and number not in alone]

    # --- reading ----------------------------------------------------------------------------------------------------
    def running_values(self) -> dict[str, float]:
        """Return an empty dict, because the step may still be repeated."""
        return {}

    def newest_values(self) -> Reduced:
        """Return the latest step's values. Every rank already has them, so this is not a collective call."""
        return sort_out(self._totals_of_step(), "_step")

    def gather_step(self, extra: Sequence[float]) -> tuple[list[tuple[Series, float]], list[float]]:
        """Return the latest step's values over all replicas, and the maximum over ranks of each entry in `extra`.

        All ranks must call this.
        """
        if self.stage != "train":
            return super().gather_step(extra)
        maxima = self._share(extra)
        return self._totals_of_step(), maxima

    def _totals_of_step(self) -> list[tuple[Series, float]]:
        return [(series, total(series.kind, series.step)) for series in self.with_values_of_step()]

    def gather_epoch(self) -> dict[Series, Sums]:
        """Return all of the epoch's series with their sums over all replicas. All ranks must call this."""
        if self.stage == "train":
            self._share(())
        return super().gather_epoch()

    def is_complete(self, series: Series) -> bool:
        """Return whether this rank already has the values of all ranks."""
        # all ranks have all training sums, but a rank without a batch may not have logged every metric object
        shared = self.stage == "train" and (series.kind != "metric" or not self.states.by_path)
        return series.alone or shared

    # --- checkpoints, without a collective: the state at the last exchange ------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the sums for the training epoch so far."""
        series = [
            {
                "description": list(series.description[:-1]),
                "sums": as_lists(series.sums),
                "step": as_lists(series.step),
                "at": series.step_at,
            }
            for series in self.stages.setdefault("train", {}).values()
            if series.in_step
        ]
        return {"series": series, "states": self.states.all()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of all replicas."""
        self.unshared = []
        super().load_state_dict(state)

    def load_sums(self, series: Series, saved: dict[str, Any], owned: set[int]) -> None:
        """Restore the sums of a series, for all replicas."""
        series.sums = {int(replica): sums for replica, *sums in saved["sums"]}
        if "step" in saved:
            series.step_at, series.step = saved["at"], {int(replica): sums for replica, *sums in saved["step"]}

    def gather_objects(self, value: Any) -> list[Any]:
        """Return only this rank's value, because at the end of a run, other ranks may already have exited."""
        return [value]

    def gather_states(self, metrics: Iterable[Any]) -> dict[str, dict[int, States]]:
        """Return the states of all metrics, keyed by path and replica."""
        return self.states.all()
