"""Logged values: collected without a host sync, and reduced over batches, replicas and ranks.

`log` only appends to a list. All pending values are read from the device together at a logging point. Sums are kept per
replica in float64 and combined in replica order, so a logged mean is the same for any number of processes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...base.errors import DisagreementError, NonFiniteError, TaskError, correction
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

# Weight of a value in its mean; None: the number of samples in its batch
BatchSize = float | Tensor | None

# (weighted value, weight) by replica
Sums = dict[int, list[float]]

# Maximum number of values, or losses, kept on the device; beyond it, they are read without waiting for a logging point
PENDING_LIMIT = 1024

NO_STEP = -2
NEVER = float("inf")


class Metrics:
    """All values that a run's task and callbacks log."""

    shares: ClassVar[bool] = False
    """Whether ranks exchange training values before each update, so that every rank has the values of all ranks."""

    def __init__(self, collectives: Ranks, processes: int, task: nn.Module) -> None:
        self.collectives, self.processes, self.task = collectives, processes, task
        self.exchange = Exchange(collectives)
        self.states = self.make_states([0], by_replica=False)
        # Series by stage, then by `key_of` their name
        self.stages: dict[str, dict[str, Series]] = {}
        # Series of the open stage; None: no stage is open
        self.series: dict[str, Series] | None = None
        self.stage = ""
        self.in_step = False
        # Whether a batch is being processed; False while the hooks after a step's last batch run
        self.in_batch = False
        self.first_replica, self.replica, self.samples = 0, 0, 1
        self.step = NO_STEP  # before the first step; -1 is the step of a series without values
        # `suffix`: added to names logged for one of multiple evaluation loaders; `loader`: that loader's index
        self.suffix, self.loader = "", 0
        self.batches: dict[str, int] = {}
        # Returns a description of the current stage, for messages
        self.describe_place: Callable[[], str] = lambda: self.stage
        # Step at which each value in `trainer.callback_metrics` was measured
        self.measured_at: dict[str, int] = {}
        # Batches of this training epoch for which training_step returned None
        self.batches_left_out = 0
        # Number of evaluation loaders; 0 for a single one
        self.loaders = 0
        self.loaders_seen: set[int] = set()
        # Evaluation loaders that logged a name without a loader index, by name
        self.loaders_of: dict[str, set[int]] = {}
        # Series, value, weight, replica and step of each value that has not been read yet
        self.pending: list[tuple[Series, Any, Any, int, int]] = []
        # `dropped`: the latest step, if it was dropped; its later values are ignored too
        self.batches_of_step, self.dropped = 0, -1
        # Whether to ignore logged values, as for masked batches
        self.muted = False
        self.losses: list[tuple[Tensor, int]] = []
        # Paths of the task's metric objects that were logged
        self.logged: set[str] = set()
        # State of the epoch in which the run ended, kept because the metric objects were reset after it
        self.state_at_end: dict[str, Any] | None = None
        # The first step of this process with a non-finite loss, and that loss
        self.bad_loss: tuple[int, float] | None = None

    # --- writing: the hot path --------------------------------------------------------------------------------------
    def open(self, stage: str, fresh: bool = True, loaders: int = 1) -> None:
        """Start logging values for `stage`. If `fresh` is true, discard the stage's earlier values."""
        if self.pending:
            self.flush()
        self.stage, self.in_step = stage, False
        self.leave_batches(1)
        self.loaders, self.loaders_seen, self.loaders_of = loaders if loaders > 1 else 0, set(), {}
        if fresh or stage not in self.stages:
            self.stages[stage], self.batches[stage] = {}, 0
        self.series = self.stages[stage]

    def open_batch(self, replica: int, samples: int) -> None:
        """Attribute subsequent values to one batch of `replica`."""
        self.replica, self.samples, self.in_step, self.in_batch = replica, samples, True, True
        self.batches[self.stage] += 1
        trains = self.stage == "train"
        self.batches_of_step += trains
        # not within a training step: if the step is dropped or repeated, its values must not be in the sums yet
        if len(self.pending) >= PENDING_LIMIT and (self.batches_of_step == 1 or not trains):
            self.flush()
        if self.states.by_path:
            self.states.open_replica(replica)

    def leave_batches(self, samples: int) -> None:
        """Count subsequent values per process rather than per batch, as in hooks called once per step or epoch."""
        self.replica, self.samples, self.in_batch = self.first_replica, samples, False

    def return_to_batch(self, replica: int, samples: int) -> None:
        """Attribute subsequent values to a batch that was opened earlier."""
        self.replica, self.samples, self.in_batch = replica, samples, True

    def open_loader(self, index: int) -> None:
        """Append the loader's index to subsequent names if the evaluation has multiple loaders."""
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
                f"log({name!r}) was called outside any step or epoch, so there is no step or epoch to log it for. "
                f"Call it in a step, in on_train_batch_*, or in on_*_epoch_start and on_*_epoch_end."
            )
        if options[6] and (self.replica if self.in_step else self.first_replica) != 0:
            return
        if self.suffix and not options[5]:
            self.loaders_of.setdefault(name, set()).add(self.loader)
        try:
            key = name + self.suffix if options[5] else name
            series = self.series.get(key if self.in_step else key + BETWEEN_STEPS)
        except TypeError:
            series = None  # the name is not a string
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
        # no value.item(), which would wait for the device in every step
        self.pending.append((series, value, weight, self.replica, self.step))

    def log_dict(self, values: Mapping[str, Any], batch_size: BatchSize, options: Options) -> None:
        """Log multiple values in half the time separate calls to `log` would take."""
        # Checked once for all values: in rarer cases no series is looked up here, and each value goes through `log`.
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
            example = correction('self.log(loss, "loss")', 'self.log("loss", loss)')
            raise TaskError(
                f"log() expects a name followed by a value, as in log('loss', loss); got {name!r:.60}.{example}"
            )
        path = None
        if is_metric(value):
            kind, path = "metric", self._path_of(name, value)
            self.logged.update(self.states.paths_of([value]))
            self._warn_of_shared(name, value)
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
            kind = read_kind(reduce_fx, name)
            kind = ONCE if kind == "sum" and not (self.in_batch or synced) else kind
        else:
            is_tensor = isinstance(value, Tensor)
            kind = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise TaskError(
                f"log({name!r}) expects a number, a tensor with one value or a torchmetrics.Metric; got {kind}."
                + correction(f'self.log("{name}", values)', f'self.log("{name}", values.mean())')
            )
        if on_step is False and on_epoch is False:
            raise TaskError(
                f"log({name!r}, on_step=False, on_epoch=False) is not useful: it discards a value. Set either to True."
            )
        if self.in_step and self.stage == "train":
            on_step = on_step is not False
            on_epoch = bool(on_epoch) or not on_step
        else:  # evaluations, and hooks between training steps, always have a value per epoch
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
                f"log({name!r}): the {type(metric).__name__} is not a module of the task, so it would not be moved to "
                f"a device, saved or reduced across processes. Assign it in the task's __init__, as in self.metric = "
                f"metric, or put several metrics into a torch.nn.ModuleDict."
            )
        return path

    def _warn_of_shared(self, name: str, metric: Any) -> None:
        """Warn if a metric object is logged in two open stages, because that mixes their samples."""
        for stage, series in self.stages.items():
            if stage != self.stage and any(item.metric is metric for item in series.values()):
                log.warning(
                    "log(%r): the same %s is logged in %s and in %s, which mixes their samples. Use a separate metric "
                    "for each stage (metric.clone()).", name, type(metric).__name__, stage, self.stage,
                )  # fmt: skip

    def watch(self, loss: Tensor) -> None:
        """Store a loss so that a later check can determine whether it is finite."""
        self.losses.append((loss.detach(), self.step))
        if len(self.losses) >= PENDING_LIMIT:
            self._first_bad_loss()

    # --- reading: at logging points and at the end of each epoch ------------------------------------------------------
    def flush(self) -> None:
        """Add all pending values to their sums, with one transfer per device and dtype."""
        self.count(self.read_pending())

    def read_pending(self) -> list[Row]:
        """Return all pending values as numbers, except those from a dropped step."""
        pending = self.pending if self.dropped < 0 else [item for item in self.pending if item[4] != self.dropped]
        self.pending, self.dropped = [], -1
        # If a series has only per-step values, only those of the latest step are read: each takes a microsecond.
        newest = {series: step for series, _, _, _, step in pending}
        pending = [item for item in pending if item[0].keeps_sums or item[4] == newest[item[0]]]
        if not pending:
            return []
        series, values, weights, replicas, steps = zip(*pending, strict=True)
        return list(zip(series, replicas, to_floats(values), to_floats(weights), steps, strict=True))

    def count(self, rows: Iterable[Row]) -> None:
        """Add values to the sums of the epoch and, for series with per-step values, to those of the latest step."""
        for series, replica, value, weight, step in rows:
            if series.keeps_sums:
                accumulate(series.sums, replica, series.kind, value, weight)
            if series.on_step:
                if series.step_at != step:
                    series.step, series.step_at = {}, step
                accumulate(series.step, replica, series.kind, value, weight)

    def drop_step(self) -> None:
        """Discard all values logged for the latest step, and ignore any that are logged for it later."""
        self.pending = [item for item in self.pending if item[4] not in (self.step, self.dropped)]
        self.dropped = self.step

    def check_losses(self) -> None:
        """Raise a NonFiniteError that reports the step if a loss is not finite. All ranks must call this."""
        first = self._first_bad_loss()
        if self.processes > 1:
            first = self.collectives.all_reduce(torch.tensor([first], dtype=torch.float64), "min").item()
        self._refuse_bad_loss(first)

    def _first_bad_loss(self) -> float:
        """Read the pending losses, and return the first step with a non-finite loss, or NEVER if there is none."""
        losses, self.losses = self.losses, []
        for (_, step), value in zip(losses, to_floats([loss for loss, _ in losses]), strict=True):
            if value - value != 0.0 and self.bad_loss is None:
                self.bad_loss = step, value
        return NEVER if self.bad_loss is None else float(self.bad_loss[0])

    def _refuse_bad_loss(self, first: float) -> None:
        if first != NEVER:
            bad = self.bad_loss
            problem = f"is {bad[1]}" if bad is not None and bad[0] == first else "is not finite on another rank"
            raise NonFiniteError(
                f"The loss of step {int(first) + 1} {problem}. Lower the learning rate, clip gradients "
                f"(gradient_clip_val), or find the cause with detect_anomaly=true. To continue training anyway, set "
                f"nan=ignore. Earlier checkpoints are untouched."
            )

    def running_values(self) -> dict[str, float]:
        """Return the means over the training epoch so far for the progress bar. This reads values from the device.

        With multiple processes, the result is empty, because each process has only its own values. The bar then shows
        the latest logging point.
        """
        if self.stage != "train" or self.series is None or self.processes > 1:
            return {}
        self.flush()
        shown = [series for series in self.series.values() if series.prog_bar and series.sums]
        return {series.name: total(series.kind, series.sums) for series in shown}

    def newest_values(self) -> Reduced:
        """Return the latest step's values in the current stage, across all replicas. All ranks must call this."""
        return self.log_point(checks_losses=False, extra=())[0]

    def log_point(self, checks_losses: bool, extra: Sequence[float]) -> tuple[Reduced, list[float]]:
        """Return the latest step's values across all replicas, and the maximum across ranks of each number in `extra`.

        A single collective gathers both. If `checks_losses` is true, this function also checks the losses, as
        `check_losses` does.
        """
        # negated, since the exchange takes maxima but the first bad step is a minimum
        extra = [-self._first_bad_loss() if checks_losses else -NEVER, *extra]
        values, maxima = self.gather_step(extra)
        self._refuse_bad_loss(-maxima[0])  # the maximum of the negative is the first step
        return sort_out(values, "_step"), maxima[1:]

    def gather_step(self, extra: Sequence[float]) -> tuple[list[tuple[Series, float]], list[float]]:
        """Return the latest step's values across all replicas, and the maximum across ranks of each number in `extra`.

        All ranks must call this.
        """
        self.flush()
        local = {series: series.step for series in self.with_values_of_step()}
        gathered, maxima = self._gather(local, self.batches_of_step == 0, extra)
        return [(series, total(series.kind, sums)) for series, sums in gathered.items()], maxima

    def with_values_of_step(self) -> list[Series]:
        """Return the series that have values from the latest step."""
        open_series = (self.series or {}).values()
        return [series for series in open_series if series.step_at == self.step and series.step]

    def reduce_epoch(self, keep: bool = False) -> Reduced:
        """Return the current stage's values for the epoch. Close the stage unless `keep` is true.

        All ranks must call this.
        """
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
        """Return every series in the epoch with its sums across all replicas. All ranks must call this."""
        self.flush()
        reduced = (series for series in (self.series or {}).values() if series.on_epoch)
        local = {series: series.sums for series in reduced if series.sums or series.metric is not None}
        absent = self.batches[self.stage] == 0 or len(self.loaders_seen) < self.loaders
        return self._gather(local, absent)[0]

    def is_complete(self, series: Series) -> bool:
        """Return whether this rank already has the values of all ranks, so that no exchange is needed."""
        return series.alone

    def _read_metrics(self, logged: list[Series], keep: bool) -> None:
        """Compute torchmetrics objects across all ranks, except those not updated since they were last computed.

        If `keep` is true, their states are kept, so that hooks at the end of an epoch can read them.
        """
        stale = torch.tensor([series.read_at != updates_within(series.metric) for series in logged], dtype=torch.int32)
        if self.processes > 1 and logged:  # reading is collective: all ranks read a metric that any rank has updated
            self.collectives.all_reduce(stale, "max")
        unread = [series for series, is_stale in zip(logged, stale.tolist(), strict=True) if is_stale]
        states = self.states
        if unread:
            states.merge([series.metric for series in unread], self.collectives)
        values = [value_of(series.metric) for series in unread]
        if not states.swaps_states:  # a hook's compute() then merges this rank's states
            states.open_replica(states.replica)
        elif keep:
            states.merge(states.with_states.values(), self.collectives)
        for series, value in zip(unread, values, strict=True):
            series.value, series.read_at = value, updates_within(series.metric)

    def _gather(
        self, local: dict[Series, Sums], absent: bool, extra: Sequence[float] = ()
    ) -> tuple[dict[Series, Sums], list[float]]:
        """Return each series with its sums across all replicas, and the maximum across ranks of each number in `extra`.

        Args:
            local: this rank's series with the sums of its replicas. Series that only other ranks have are created on
                this rank.
            absent: whether this rank had no batch, in which case it may have logged fewer names.

        Raises a DisagreementError that lists the ranks and names if ranks that had batches logged different names.
        """
        if self.processes == 1:
            return local, list(extra)
        rows = [
            (series, replica, value, weight, series.step_at)
            for series, sums in local.items()
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
        return local | gathered, [max(column) for column in zip(*extras, strict=True)][1:]

    def _require_equal(self, series: Series, values: list[float]) -> None:
        """Raise DisagreementError if ranks logged different values for a sum that counts a hook's value only once."""
        if series.kind == ONCE and len(set(map(str, values))) > 1:  # as strings, in which NaN equals NaN
            raise DisagreementError(
                f"log({series.name!r}, reduce_fx='sum') was called in a hook of {self.describe_place()} with different "
                f"values on different ranks: {values}. A value logged in a hook counts once, so log the same value on "
                f"every rank, or pass sync_dist=True to sum across ranks."
            )

    def compare(self, logged: list[list[int]], absent: list[bool]) -> None:
        """Raise DisagreementError unless all ranks logged the same series in the same order.

        Ranks without a batch may have logged only some of the series.

        Args:
            logged: for each rank, the numbers that identify the series it logged.
        """
        descriptions = self.exchange.descriptions
        names = [list(dict.fromkeys(descriptions[number][0] for number in numbers)) for numbers in logged]
        present = {rank: of_rank for rank, of_rank in enumerate(names) if not absent[rank]} or dict(enumerate(names))
        expected = next(iter(present.values()))
        strays = {rank: of_rank for rank, of_rank in enumerate(names) if not set(of_rank) <= set(expected)}
        compared = {**present, **strays}
        if not strays and all(of_rank == expected for of_rank in present.values()):
            return
        common = set.intersection(*map(set, compared.values()))
        extras = {rank: {*of_rank} - common for rank, of_rank in compared.items()}
        differences = [f"rank {rank} also logged {sorted(extra)}" for rank, extra in extras.items() if extra]
        raise DisagreementError(
            f"The ranks logged different names in {self.describe_place()}: all ranks logged {sorted(common)}, but "
            f"{'; '.join(differences) or 'not in the same order'}. Call self.log with the same names in the same order "
            f"on every rank, regardless of the rank or the contents of a batch."
        )

    def find_series(self, among: dict[str, Series], description: Sequence[Any]) -> Series:
        """Return the series with the given description. If there is none, create an empty one."""
        key = key_of(description[0], description[-1])
        if key not in among:
            among[key] = series = Series(*description)
            if series.path is not None and series.path not in self.states.by_path:
                self.states.find_metrics()  # another rank has created and logged the metric
            series.metric = self.states.by_path.get(series.path or "")
        return among[key]

    def share(self) -> None:
        """If `shares` is true, share every rank's training values with all ranks. All ranks must call this."""

    def share_step(self) -> None:
        """If `shares` is true, send every rank's values for the current step to all ranks before the update.

        All ranks must call this.
        """

    # --- another step, epoch or layout ------------------------------------------------------------------------------
    def rewind(self, step: int) -> None:
        """Discard values logged in `step` and later, so that the run can repeat them."""
        self.pending = [item for item in self.pending if item[4] < step and item[0].in_step]
        self.losses = [item for item in self.losses if item[1] < step]
        self.step, self.suffix = step - 1 if step else NO_STEP, ""
        for series in self.stages["train"].values():
            if not series.in_step:  # hooks log them again
                series.sums = {}
        self.open("train", fresh=False)

    def forget_epoch(self) -> None:
        """Discard all sums of the training epoch, which has ended or is starting over."""
        self.states.forget(series.metric for series in self.stages["train"].values() if series.metric is not None)
        self.open("train")

    def join(self, collectives: Ranks, replicas: range) -> None:
        """Reduce subsequent values over the ranks of `collectives`. This process runs `replicas`."""
        self.collectives = collectives
        self.set_layout(collectives.size, replicas)

    def set_layout(self, processes: int, replicas: range) -> None:
        """Set the number of processes and this process's replicas."""
        self.processes, self.states.replicas = processes, list(replicas)
        self.first_replica = self.replica = replicas.start
        # a rank that joins does not know the numbers of series, so all ranks agree on them again
        self.exchange = Exchange(self.collectives)

    def take_states(self, by_replica: bool) -> None:
        """Find the task's metric objects. Only the first rank keeps their states from before the run."""
        self.states = self.make_states(self.states.replicas, by_replica)
        if self.first_replica > 0:  # otherwise the states would count once per rank
            for metric in self.states.by_path.values():
                metric.reset()

    def make_states(self, replicas: list[int], by_replica: bool) -> MetricStates:
        """Return the states of the task's metrics for `replicas`."""
        return MetricStates(self.task, replicas, by_replica)

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the training epoch's sums so far, across all ranks. All ranks must call this.

        Values that hooks log between steps are omitted, because these hooks run again when the epoch resumes.
        """
        if self.state_at_end is not None:
            return self.state_at_end
        self.flush()
        saved = self.stages.setdefault("train", {})
        kept = (series for series in saved.values() if series.in_step and series.on_epoch)
        local = {series: series.sums for series in kept if not series.alone}
        # `_gather` looks up series in self.series, which holds the validation run's series during validation
        stage, self.series = self.series, saved
        gathered, _ = self._gather(local, absent=not local)
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
        # not in checkpoints: series that only rank 0 logs, and series without a value per epoch
        kept = {key: series for key, series in before.items() if series.alone or not series.on_epoch}
        self.stages["train"], self.pending = kept, []
        for saved in state["series"]:
            self.load_sums(self.find_series(kept, [*saved["description"], True]), saved, owned)
        numbers = [series for series in kept.values() if series.metric is None]
        # 0 if the replicas of this process had no batch in the epoch so far
        self.batches["train"] = sum(bool(series.sums) for series in numbers) if numbers else len(state["series"])
        self.states.load(state["states"])

    def load_sums(self, series: Series, saved: dict[str, Any], owned: set[int]) -> None:
        """Restore a series' sums for this process's replicas."""
        series.sums = {int(replica): sums for replica, *sums in saved["sums"] if replica in owned}
        if series.kind == ONCE and saved["sums"]:
            series.sums = {self.first_replica: saved["sums"][0][1:]}

    def finish(self) -> None:
        """Reset metric objects if a single-process run ends mid-epoch, so that the next fit starts from empty states.

        A checkpoint saved later still contains their states.
        """
        metrics = [series.metric for series in self.stages.get("train", {}).values() if series.metric is not None]
        if metrics and self.processes == 1:
            self.state_at_end = self.state_dict()
            for metric in metrics:
                metric.reset()

    def gather_unlogged(self) -> list[str]:
        """Load the states of all replicas into the metric objects that were never logged. All ranks must call this.

        Returns the names of metrics that were updated but not computed.
        """
        states = self.states
        if not states.by_path or self.processes == len(states.replicas) == 1:
            return []
        computed = {path for path, metric in states.with_states.items() if is_computed(metric)}
        # a rank without a batch has logged nothing, but all ranks must gather the same metrics
        of_ranks = self.gather_objects((self.logged, computed))
        self.logged = set().union(*(logged for logged, _ in of_ranks))
        computed = set.intersection(*(computed for _, computed in of_ranks))
        unlogged = {path: metric for path, metric in states.with_states.items() if path not in self.logged}
        parts = self.gather_states(unlogged.values())
        updated = [path for path in unlogged if any(states[COUNT] for states in parts.get(path, {}).values())]
        for path in updated:
            load_states(unlogged[path], merged_in_order(unlogged[path], parts[path]))
        return [path for path in updated if path not in computed] if self.processes > 1 else []

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value. All ranks must call this."""
        return self.collectives.gather_objects(value)

    def gather_states(self, metrics: Iterable[Any]) -> dict[str, dict[int, States]]:
        """Return the states of metrics on all ranks, keyed by path and replica. All ranks must call this."""
        return self.states.gather(metrics, self.collectives)


def as_lists(sums: Sums) -> list[list[float]]:
    """Return sums in replica order, as stored in a checkpoint."""
    return [[replica, *sums[replica]] for replica in sorted(sums)]
