"""Logged values: collected without a host sync, and reduced over batches, replicas and ranks.

`log` only appends to a list; all pending values are read from the device together when a logging point is due. Sums are
kept per replica in float64 and added up in replica order, so a logged mean is the same on any number of processes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...base.errors import DisagreementError, NonFiniteError, TaskError
from ...base.torch_private import is_computed, newest_value_of
from ..processes.ranks import Ranks
from .reduce import (
    BETWEEN_STEPS,
    LOADER_MARK,
    NAME_ONLY,
    ONCE,
    Exchange,
    Reduced,
    Row,
    Series,
    accumulate,
    key_of,
    read_kind,
    sort_out,
    to_floats,
    total,
)
from .torchmetrics import (
    COUNT,
    MetricStates,
    States,
    is_metric,
    load_states,
    merged_in_order,
    updates_within,
    value_of,
)

log = logging.getLogger("legato")

# prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist: see `Task.log`
Options = tuple[bool, bool | None, bool | None, bool | None, Any, bool, bool, bool]

# Weight of a value in its mean; None: the samples of its batch
BatchSize = float | Tensor | None

# (weighted value, weight) by replica
Sums = dict[int, list[float]]

# Maximum number of values, or losses, that wait on the device before they are read even if no logging point is due
PENDING_LIMIT = 1024

NO_STEP = -2
NEVER = float("inf")


class Metrics:
    """All values that the task and callbacks of a run log."""

    shares: ClassVar[bool] = False
    """Whether every rank keeps the training values of all ranks, and they are exchanged before each update."""

    def __init__(self, collectives: Ranks, processes: int, task: nn.Module) -> None:
        self.collectives, self.processes, self.task = collectives, processes, task
        self.exchange = Exchange(collectives)
        self.states = self.make_states([0], by_replica=False)
        # By stage, and by `key_of` the name
        self.stages: dict[str, dict[str, Series]] = {}
        # Those of the stage that is open; None: none is
        self.series: dict[str, Series] | None = None
        self.stage = ""
        self.in_step = False
        # Whether a batch is being processed; False while the hooks after a step's last batch run
        self.in_batch = False
        self.first_replica, self.replica, self.samples = 0, 0, 1
        self.step = NO_STEP  # none has begun; -1 is the step of a series without values
        # Added to names logged by one of several evaluation loaders; `loader` is that loader's index
        self.suffix, self.loader = "", 0
        self.batches: dict[str, int] = {}
        # Returns a description of the current stage, for messages
        self.describe_place: Callable[[], str] = lambda: self.stage
        # Step of the value of each name of `trainer.callback_metrics`
        self.measured_at: dict[str, int] = {}
        # Batches of this training epoch for which training_step returned None
        self.batches_left_out = 0
        # Number of evaluation loaders; 0 when there is one
        self.loaders = 0
        self.loaders_seen: set[int] = set()
        # Evaluation loaders that logged a name without a loader index, by name
        self.loaders_of: dict[str, set[int]] = {}
        # Series, value, weight, replica and step of what is not read yet
        self.pending: list[tuple[Series, Any, Any, int, int]] = []
        # `dropped`: the newest step if it was dropped: values still logged for it are ignored
        self.batches_of_step, self.dropped = 0, -1
        # Whether logged values are ignored, as for masked batches
        self.muted = False
        self.losses: list[tuple[Tensor, int]] = []
        # Paths of the metric objects in the task that were logged
        self.logged: set[str] = set()
        # The state of an epoch that the run ended within, whose metric objects are reset since
        self.state_at_end: dict[str, Any] | None = None
        # The first step of this process with a non-finite loss, and that loss
        self.bad_loss: tuple[int, float] | None = None

    # --- writing: the hot path --------------------------------------------------------------------------------------
    def open(self, stage: str, fresh: bool = True, loaders: int = 1) -> None:
        """Start logging into `stage`; `fresh` drops its values."""
        if self.pending:
            self.flush()
        self.stage, self.in_step = stage, False
        self.leave_batches(1)
        self.loaders, self.loaders_seen, self.loaders_of = loaders if loaders > 1 else 0, set(), {}
        if fresh or stage not in self.stages:
            self.stages[stage], self.batches[stage] = {}, 0
        self.series = self.stages[stage]

    def open_batch(self, replica: int, samples: int) -> None:
        """Attribute the following values to one batch of `replica`."""
        self.replica, self.samples, self.in_step, self.in_batch = replica, samples, True, True
        self.batches[self.stage] += 1
        trains = self.stage == "train"
        self.batches_of_step += trains
        # Not within a training step: if the step is dropped or repeated, its values must not be in the sums yet.
        if len(self.pending) >= PENDING_LIMIT and (self.batches_of_step == 1 or not trains):
            self.flush()
        if self.states.by_path:
            self.states.open_replica(replica)

    def leave_batches(self, samples: int) -> None:
        """Attribute the following values to this process and no batch, as in hooks called once per step or epoch."""
        self.replica, self.samples, self.in_batch = self.first_replica, samples, False

    def return_to_batch(self, replica: int, samples: int) -> None:
        """Attribute the following values to a batch that was opened before."""
        self.replica, self.samples, self.in_batch = replica, samples, True

    def open_loader(self, index: int) -> None:
        """Append the loader's index to the following names, if the evaluation has several loaders."""
        if self.loaders:
            self.suffix, self.loader = f"{LOADER_MARK}{index}", index
            self.loaders_seen.add(index)

    def leave_out_batch(self) -> None:
        """Exclude the current batch from the check that all batches log the same names."""
        if self.muted:
            return
        self.batches[self.stage] -= 1
        self.batches_left_out += 1
        self.batches_of_step -= self.stage == "train"

    def log(self, name: str, value: Any, batch_size: BatchSize, options: Options) -> None:
        """Record one value; see `Task.log`."""
        if self.muted:
            return
        if self.series is None:  # closed by reduce_epoch
            raise TaskError(
                f"log({name!r}) was called outside of any step or epoch, so there is no point to write it to. Log in a "
                f"step, in on_train_batch_*, or in on_*_epoch_start and on_*_epoch_end."
            )
        if options[6] and (self.replica if self.in_step else self.first_replica) != 0:
            return
        if self.suffix and not options[5]:
            self.loaders_of.setdefault(name, set()).add(self.loader)
        try:
            key = name + self.suffix if options[5] else name
            series = self.series.get(key if self.in_step else key + BETWEEN_STEPS)
        except TypeError:
            series = None  # no name
        if series is None:
            series = self._open_series(name, value, options)
        if series.metric is not None:
            if series.metric is value and not series.on_step:
                return
            value = newest_value_of(value) if series.metric is value else value
            if value is None:
                return
        elif isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()
        weight = batch_size if batch_size is not None else self.samples if self.in_step else 1
        # no value.item() here, which would wait for the device in every step
        self.pending.append((series, value, weight, self.replica, self.step))

    def log_dict(self, values: Mapping[str, Any], batch_size: BatchSize, options: Options) -> None:
        """Record several values: equal to `log` for each, in half the time."""
        # Checked once for all: for what is rare, no series is looked up, and each value goes through `log`.
        is_plain = self.in_step and not (self.muted or self.suffix or options[6])
        open_series = self.series if is_plain and self.series is not None else {}
        replica, step, append = self.replica, self.step, self.pending.append
        weight = self.samples if batch_size is None else batch_size
        for name, value in values.items():
            series = open_series.get(name)
            if series is None or series.metric is not None:
                self.log(name, value, batch_size, options)
            elif isinstance(value, Tensor) and value.requires_grad:
                append((series, value.detach(), weight, replica, step))
            else:
                append((series, value, weight, replica, step))

    def _open_series(self, name: str, value: Any, options: Options) -> Series:
        prog_bar, logger, on_step, on_epoch, reduce_fx, add_suffix, rank_zero_only, synced = options
        assert self.series is not None
        if not isinstance(name, str) or not name:
            raise TaskError(f"log() needs a name first, and then the value, as in log('loss', loss); got {name!r:.60}.")
        path = None
        if is_metric(value):
            kind, path = "metric", self._path_of(name, value)
            self.logged.update(self.states.paths_of([value]))
            self._warn_of_shared(name, value)
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
            kind = read_kind(reduce_fx, name)
            kind = ONCE if kind == "sum" and not (self.in_batch or synced) else kind
        else:
            shaped = isinstance(value, Tensor)
            came = f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if shaped else type(value).__name__
            raise TaskError(
                f"log({name!r}) takes a number, a tensor with one value or a torchmetrics.Metric; got {came}."
            )
        if on_step is False and on_epoch is False:
            raise TaskError(f"log({name!r}, on_step=False, on_epoch=False) is not useful: it keeps no value.")
        if self.in_step and self.stage == "train":
            on_step = on_step is not False
            on_epoch = bool(on_epoch) or not on_step
        else:  # in evaluations, and between training steps, there is a value per epoch in any case
            on_step, on_epoch = bool(on_step) and self.in_step and on_epoch is not False, True
        series = Series(
            name + self.suffix if add_suffix else name,
            kind,
            on_step,
            on_epoch,
            prog_bar,
            logger is not False,
            path,
            rank_zero_only,
            self.in_step,
            metric=value if kind == "metric" else None,
            synced=synced,
        )
        self.series[key_of(series.name, self.in_step)] = series
        return series

    def _path_of(self, name: str, metric: Any) -> str:
        """Return the path of a metric in the task."""
        if self.states.path_of(metric) is None:
            self.states.find_metrics()
        path = self.states.path_of(metric)
        if path is None:
            raise TaskError(
                f"log({name!r}): the {type(metric).__name__} is no module of the task, so nobody would move it to a "
                f"device, save it or add it up over processes. Assign it in the task's __init__, as in self.metric = "
                f"metric; several in a torch.nn.ModuleDict."
            )
        return path

    def _warn_of_shared(self, name: str, metric: Any) -> None:
        """Warn of a metric object logged in two open stages: it mixes their samples."""
        for stage, series in self.stages.items():
            if stage != self.stage and any(other.metric is metric for other in series.values()):
                log.warning(
                    "log(%r): the same %s is logged in %s and in %s, which mixes their samples. Give each stage a "
                    "metric of its own (metric.clone()).", name, type(metric).__name__, stage, self.stage,
                )  # fmt: skip

    def watch(self, loss: Tensor) -> None:
        """Record a loss, to check later that it is finite."""
        self.losses.append((loss.detach(), self.step))
        if len(self.losses) >= PENDING_LIMIT:
            self._first_bad_loss()

    # --- reading: at logging steps and at the end of epochs ---------------------------------------------------------
    def flush(self) -> None:
        """Add all pending values to their sums, with one transfer per device and dtype."""
        self.count(self.read_pending())

    def read_pending(self) -> list[Row]:
        """Return all pending values as numbers, without those of a dropped step."""
        pending = self.pending if self.dropped < 0 else [item for item in self.pending if item[4] != self.dropped]
        self.pending, self.dropped = [], -1
        # Of a series that has values of steps alone only the newest step's are read: each takes a microsecond.
        newest = {series: step for series, _, _, _, step in pending}
        pending = [item for item in pending if item[0].keeps_sums or item[4] == newest[item[0]]]
        if not pending:
            return []
        series, values, weights, replicas, steps = zip(*pending, strict=True)
        return list(zip(series, replicas, to_floats(values), to_floats(weights), steps, strict=True))

    def count(self, rows: Iterable[Row]) -> None:
        """Add values to the sums of the epoch and of their step, which is the newest one of its series."""
        for series, replica, value, weight, step in rows:
            if series.keeps_sums:
                accumulate(series.sums, replica, series.kind, value, weight)
            if series.on_step:
                if series.step_at != step:
                    series.step, series.step_at = {}, step
                accumulate(series.step, replica, series.kind, value, weight)

    def drop_step(self) -> None:
        """Ignore all values logged for the newest step, including later ones."""
        self.pending = [item for item in self.pending if item[4] not in (self.step, self.dropped)]
        self.dropped = self.step

    def check_losses(self) -> None:
        """Raise NonFiniteError on every rank, naming the first step with a non-finite loss. Collective."""
        first = self._first_bad_loss()
        if self.processes > 1:
            first = self.collectives.all_reduce(torch.tensor([first], dtype=torch.float64), "min").item()
        self._refuse_bad_loss(first)

    def _first_bad_loss(self) -> float:
        """Read the pending losses; return the first step whose loss is not finite, or NEVER."""
        losses, self.losses = self.losses, []
        for (_, step), value in zip(losses, to_floats([loss for loss, _ in losses]), strict=True):
            if value - value != 0.0 and self.bad_loss is None:
                self.bad_loss = step, value
        return NEVER if self.bad_loss is None else float(self.bad_loss[0])

    def _refuse_bad_loss(self, first: float) -> None:
        if first != NEVER:
            own = self.bad_loss
            came = f"is {own[1]}" if own is not None and own[0] == first else "is not finite on another rank"
            raise NonFiniteError(
                f"The loss of step {int(first) + 1} {came}. Lower the learning rate, clip gradients "
                f"(gradient_clip_val) or look for the cause with detect_anomaly=true; nan=ignore trains on. Earlier "
                f"checkpoints are untouched."
            )

    def running_values(self) -> dict[str, float]:
        """Return training's values of the epoch so far that are for the progress bar, read from the device.

        None on several processes, of which each has its part alone: the bar shows the newest logged values there.
        """
        if self.stage != "train" or self.series is None or self.processes > 1:
            return {}
        self.flush()
        shown = [series for series in self.series.values() if series.prog_bar and series.sums]
        return {series.name: total(series.kind, series.sums) for series in shown}

    def newest_values(self) -> Reduced:
        """Return the newest step's values of the current stage, over all replicas. Collective."""
        return self.log_point(checks_losses=False, extra=())[0]

    def log_point(self, checks_losses: bool, extra: Sequence[float]) -> tuple[Reduced, list[float]]:
        """Return the newest step's values over all replicas, and the maximum over ranks of each number in `extra`.

        Both take one collective, which with `checks_losses` also does the work of `check_losses`.
        """
        # negated, since the exchange takes maxima and the first bad step is a minimum
        extra = [-self._first_bad_loss() if checks_losses else -NEVER, *extra]
        values, maxima = self.gather_step(extra)
        self._refuse_bad_loss(-maxima[0])  # the maximum of the negative is the first step
        return sort_out(values, "_step"), maxima[1:]

    def gather_step(self, extra: Sequence[float]) -> tuple[list[tuple[Series, float]], list[float]]:
        """Return the values of the newest step over all replicas, and the maxima of `extra`. Collective."""
        self.flush()
        own = {series: series.step for series in self.with_values_of_step()}
        gathered, maxima = self._gather(own, self.batches_of_step == 0, extra)
        return [(series, total(series.kind, sums)) for series, sums in gathered.items()], maxima

    def with_values_of_step(self) -> list[Series]:
        """Return the series with values of the newest step."""
        open_series = (self.series or {}).values()
        return [series for series in open_series if series.step_at == self.step and series.step]

    def reduce_epoch(self, keep: bool = False) -> Reduced:
        """Return the current stage's values over the whole epoch; close the stage unless `keep` is set. Collective."""
        assert self.series is not None
        gathered = self.gather_epoch()
        self._read_metrics([series for series in gathered if series.kind == "metric"], keep)
        if not keep:
            self.states.forget(series.metric for series in self.series.values() if series.metric is not None)
            self.stages[self.stage], self.series = {}, None
            self.batches[self.stage] = 0
            self.batches_left_out *= self.stage != "train"
        values = [
            (series, series.value if series.kind == "metric" else total(series.kind, sums))
            for series, sums in gathered.items()
        ]
        return sort_out(values, "_epoch")

    def gather_epoch(self) -> dict[Series, Sums]:
        """Return every series of the epoch with its sums over all replicas. Collective."""
        self.flush()
        reduced = (series for series in (self.series or {}).values() if series.on_epoch)
        own = {series: series.sums for series in reduced if series.sums or series.metric is not None}
        absent = self.batches[self.stage] == 0 or len(self.loaders_seen) < self.loaders
        return self._gather(own, absent)[0]

    def is_complete(self, series: Series) -> bool:
        """Return whether this rank has the values of all ranks, so that they are not exchanged."""
        return series.alone

    def _read_metrics(self, others: list[Series], keep: bool) -> None:
        """Compute torchmetrics objects over all ranks, skipping those without an update since the last time.

        With `keep` their states stay, so that hooks at the end of an epoch can read them.
        """
        stale = torch.tensor([series.read_at != updates_within(series.metric) for series in others], dtype=torch.int32)
        if self.processes > 1 and others:  # reading is collective: all ranks read a metric that any has updated
            self.collectives.all_reduce(stale, "max")
        unread = [series for series, is_stale in zip(others, stale.tolist(), strict=True) if is_stale]
        states = self.states
        if unread:
            states.merge([series.metric for series in unread], self.collectives)
        values = [value_of(series.metric) for series in unread]
        if not states.swaps_states:  # a hook's compute() merges what this rank holds
            states.open_replica(states.replica)
        elif keep:
            states.merge(states.with_states.values(), self.collectives)
        for series, value in zip(unread, values, strict=True):
            series.value, series.read_at = value, updates_within(series.metric)

    def _gather(
        self, own: dict[Series, Sums], absent: bool, extra: Sequence[float] = ()
    ) -> tuple[dict[Series, Sums], list[float]]:
        """Return each series with its sums over all replicas, and the maximum over ranks of each number in `extra`.

        own: the series of this rank with the sums of its replicas.
        absent: this rank had no batch and may have logged fewer names; series that only other ranks have are created
        here.

        Raises DisagreementError, naming ranks and names, when ranks that had batches logged different names.
        """
        if self.processes == 1:
            return own, list(extra)
        rows = [
            (series, replica, value, weight, series.step_at)
            for series, sums in own.items()
            if not self.is_complete(series)
            for replica, (value, weight) in (sums or {NAME_ONLY: [0.0, 0.0]}).items()
        ]
        ranks, extras = self.exchange.gather(rows, [float(absent), *extra])
        self.compare([[row[0] for row in rank] for rank in ranks], [bool(of_rank[0]) for of_rank in extras])
        gathered: dict[Series, Sums] = {}
        descriptions, open_series = self.exchange.descriptions, {} if self.series is None else self.series
        for number, replica, value, weight, _ in (row for rank in ranks for row in rank):
            series = self.find_series(open_series, descriptions[number])
            gathered.setdefault(series, {}).update({} if replica == NAME_ONLY else {replica: [value, weight]})
        for series, of_ranks in gathered.items():
            self._require_equal(series, [value for value, _ in of_ranks.values()])
        return own | gathered, [max(column) for column in zip(*extras, strict=True)][1:]

    def _require_equal(self, series: Series, values: list[float]) -> None:
        """Raise DisagreementError for a sum that counts once and of which the ranks logged different values."""
        if series.kind == ONCE and len(set(map(str, values))) > 1:  # as text, where NaN is NaN
            raise DisagreementError(
                f"log({series.name!r}, reduce_fx='sum') was called in a hook of {self.describe_place()} with "
                f"different values on the ranks: {values}. What a hook logs counts once, so log the same value on "
                f"every rank; or pass sync_dist=True to add up those of all ranks."
            )

    def compare(self, logged: list[list[int]], absent: list[bool]) -> None:
        """Raise DisagreementError unless all ranks logged the same series in the same order; absent ones some of them.

        logged: the numbers of each rank's series.
        """
        descriptions = self.exchange.descriptions
        names = [list(dict.fromkeys(descriptions[number][0] for number in numbers)) for numbers in logged]
        present = {rank: own for rank, own in enumerate(names) if not absent[rank]} or dict(enumerate(names))
        expected = next(iter(present.values()))
        strays = {rank: own for rank, own in enumerate(names) if not set(own) <= set(expected)}
        compared = {**present, **strays}
        if not strays and all(own == expected for own in present.values()):
            return
        common = set.intersection(*map(set, compared.values()))
        told = [
            f"rank {rank} also logged {sorted({*own} - common)}" for rank, own in compared.items() if {*own} - common
        ]
        raise DisagreementError(
            f"The ranks logged different names in {self.describe_place()}: all logged {sorted(common)}, but "
            f"{'; '.join(told) or 'not in the same order'}. Call self.log with the same names in the same order on "
            f"every rank, never under a condition on the rank or on the content of a batch."
        )

    def find_series(self, among: dict[str, Series], description: Sequence[Any]) -> Series:
        """Return the series with a description; create an empty one if there is none."""
        key = key_of(description[0], description[-1])
        if key not in among:
            among[key] = series = Series(*description)
            if series.path is not None and series.path not in self.states.by_path:
                self.states.find_metrics()  # one that another rank has made and logged
            series.metric = self.states.by_path.get(series.path or "")
        return among[key]

    def share(self) -> None:
        """Give every rank the training values of all ranks, where they are shared. Collective."""

    def share_step(self) -> None:
        """Give every rank those of the current step, before the weights are updated, where they are shared."""

    # --- another step, epoch or layout ------------------------------------------------------------------------------
    def rewind(self, step: int) -> None:
        """Discard values logged in `step` and later, so that these steps can be repeated."""
        self.pending = [item for item in self.pending if item[4] < step and item[0].in_step]
        self.losses = [item for item in self.losses if item[1] < step]
        self.step, self.suffix = step - 1 if step else NO_STEP, ""
        for series in self.stages["train"].values():
            if not series.in_step:  # hooks log them again
                series.sums = {}
        self.open("train", fresh=False)

    def forget_epoch(self) -> None:
        """Drop all sums of the training epoch, because it has ended or starts over."""
        self.states.forget(series.metric for series in self.stages["train"].values() if series.metric is not None)
        self.open("train")

    def join(self, collectives: Ranks, replicas: range) -> None:
        """Reduce values with the other ranks from now on; `replicas` are those of this process."""
        self.collectives = collectives
        self.set_layout(collectives.size, replicas)

    def set_layout(self, processes: int, replicas: range) -> None:
        """Set the number of processes and the replicas of this process."""
        self.processes, self.states.replicas = processes, list(replicas)
        self.first_replica = self.replica = replicas.start
        # a rank that joins knows none of the numbers of series, so all agree on them anew
        self.exchange = Exchange(self.collectives)

    def take_states(self, by_replica: bool) -> None:
        """Find the metric objects of the task, which hold what they held before the run on the first rank alone."""
        self.states = self.make_states(self.states.replicas, by_replica)
        if self.first_replica > 0:  # else it would count once a rank
            for metric in self.states.by_path.values():
                metric.reset()

    def make_states(self, replicas: list[int], by_replica: bool) -> MetricStates:
        """Return the states of the task's metrics, for the replicas of this process."""
        return MetricStates(self.task, replicas, by_replica)

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the training epoch's sums so far, over all ranks. Collective.

        Without values that hooks log between steps: a resumed epoch calls these hooks again.
        """
        if self.state_at_end is not None:
            return self.state_at_end
        self.flush()
        saved = self.stages.setdefault("train", {})
        kept = (series for series in saved.values() if series.in_step and series.on_epoch)
        own = {series: series.sums for series in kept if not series.alone}
        # `_gather` looks up other ranks' series in self.series, which is validation's if that saves
        stage, self.series = self.series, saved
        gathered, _ = self._gather(own, absent=not own)
        self.series = stage
        metrics = [series.metric for series in gathered if series.metric is not None]
        return {
            "series": [
                {"description": list(series.description[:-1]), "sums": as_lists(sums)}
                for series, sums in gathered.items()
            ],
            "states": self.gather_states(metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of this process's replicas."""
        owned, before = set(self.states.replicas), self.stages.get("train", {})
        # not in checkpoints: series that only rank 0 logs, and those without values of an epoch
        kept = {key: series for key, series in before.items() if series.alone or not series.on_epoch}
        self.stages["train"], self.pending = kept, []
        for saved in state["series"]:
            self.load_sums(self.find_series(kept, [*saved["description"], True]), saved, owned)
        numbers = [series for series in kept.values() if series.metric is None]
        # 0 if the replicas that this process now owns had no batch in the epoch so far
        self.batches["train"] = sum(bool(series.sums) for series in numbers) if numbers else len(state["series"])
        self.states.load(state["states"])

    def load_sums(self, series: Series, saved: dict[str, Any], owned: set[int]) -> None:
        """Restore the sums of a series, for the replicas of this process."""
        series.sums = {int(replica): sums for replica, *sums in saved["sums"] if replica in owned}
        if series.kind == ONCE and saved["sums"]:
            series.sums = {self.first_replica: saved["sums"][0][1:]}

    def finish(self) -> None:
        """Reset the metric objects of an epoch that the run of one process ends within, for the next fit to begin anew.

        A checkpoint that is saved later has what they held.
        """
        metrics = [series.metric for series in self.stages.get("train", {}).values() if series.metric is not None]
        if metrics and self.processes == 1:
            self.state_at_end = self.state_dict()
            for metric in metrics:
                metric.reset()

    def gather_unlogged(self) -> list[str]:
        """Load the states of all replicas into the metric objects that were never logged. Collective.

        Returns the names of those that were updated but not computed.
        """
        states = self.states
        if not states.by_path or self.processes == len(states.replicas) == 1:
            return []
        computed = {path for path, metric in states.with_states.items() if is_computed(metric)}
        # a rank without a batch has logged nothing, and all must gather the same
        of_ranks = self.gather_objects((self.logged, computed))
        self.logged = set().union(*(logged for logged, _ in of_ranks))
        computed = set.intersection(*(computed for _, computed in of_ranks))
        unlogged = {path: metric for path, metric in states.with_states.items() if path not in self.logged}
        parts = self.gather_states(unlogged.values())
        updated = [path for path in unlogged if any(one[COUNT] for one in parts.get(path, {}).values())]
        for path in updated:
            load_states(unlogged[path], merged_in_order(unlogged[path], parts[path]))
        return [path for path in updated if path not in computed] if self.processes > 1 else []

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value. Collective."""
        return self.collectives.gather_objects(value)

    def gather_states(self, metrics: Iterable[Any]) -> dict[str, dict[int, States]]:
        """Return the states of metrics over all ranks, by path and replica. Collective."""
        return self.states.gather(metrics, self.collectives)


def as_lists(sums: Sums) -> list[list[float]]:
    """Return sums in replica order, as a checkpoint has them."""
    return [[replica, *sums[replica]] for replica in sorted(sums)]
