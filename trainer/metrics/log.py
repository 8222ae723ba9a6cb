"""Logged values: collected without a host sync, and reduced over batches, replicas and ranks.

`log` only appends to a list; all pending values are read from the device together when a logging point is due. Sums are
kept per replica in float64 and added up in replica order, so a logged mean is the same on any number of processes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import DisagreementError, NonFiniteError, TaskError
from ...base.torch_private import is_computed, newest_value_of
from ..processes.ranks import Ranks
from .reduce import (
    AVERAGED,
    LOADER_MARK,
    NAME_ONLY,
    ONCE,
    OTHER,
    Description,
    Exchange,
    Reduced,
    Row,
    Series,
    accumulate,
    joined,
    read_kind,
    sort_out,
    to_floats,
    total,
)
from .torchmetrics import (
    COUNT,
    MetricStates,
    is_metric,
    load_states,
    merged_in_order,
    metrics_within,
    read_values,
    updates_within,
)

log = logging.getLogger("legato")

Options = tuple[bool, bool | None, bool | None, bool | None, Any, bool, bool, bool]
"""prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist: see `Task.log`."""

BatchSize = float | Tensor | None
"""Weight of a value in its mean; None: the samples of its batch."""

PENDING_LIMIT = 1024
"""Maximum number of values, or losses, that wait on the device before they are read even if no logging point is due."""


EPOCH_END = 1 << 62
"""Step number of values logged by hooks at the end of the training epoch; they count only if the epoch ends."""
NO_STEP = -2
EPOCH_SO_FAR = -3
"""Step number of rows with the sums of the epoch so far, in an exchange of a step's values."""
ONCE_PER_PROCESS = -2
"""Replica number of a value that a hook logs once per process.

Where values are shared only the first process counts it, since the number of processes may change.
"""
NEVER = float("inf")


class Metrics:
    """All values that the task and callbacks of a run log."""

    def __init__(self, collectives: Ranks, processes: int, task: nn.Module) -> None:
        self.collectives, self.processes, self.task = collectives, processes, task
        self.shares = False
        """Whether every rank keeps the training values of all ranks, so that an elastic run loses none with a rank."""
        self.exchange = Exchange(collectives)
        self.states = MetricStates(task, [0], by_replica=False)
        self.stages: dict[str, dict[str, Series]] = {}
        self.series: dict[str, Series] | None = None
        self.stage = ""
        self.in_step = False
        self.in_batch = False
        """Whether a batch is being processed; False while the hooks after a step's last batch run."""
        self.first_replica, self.replica, self.samples = 0, 0, 1
        self.step = self.newest = NO_STEP  # none has begun; -1 is the step of a series without values
        self.unread = 0
        """The first training step with values that `log_point` and `own_values` have yet to return."""
        self.suffix, self.loader = "", 0
        """Added to names logged by one of several evaluation loaders; `loader` is that loader's index."""
        self.means_shown: dict[str, float] = {}
        """Values of the epoch up to the newest logging point, over all ranks: those for the progress bar."""
        self.batches: dict[str, int] = {}
        self.describe_place: Callable[[], str] = lambda: self.stage
        """Returns a description of the current stage, for messages."""
        self.measured_at: dict[str, int] = {}
        """Step of the value of each name of `trainer.callback_metrics`."""
        self.batches_left_out = 0
        """Batches of this training epoch for which training_step returned None."""
        self.loaders = 0
        """Number of evaluation loaders; 0 when there is one."""
        self.loaders_seen: set[int] = set()
        self.loaders_of: dict[str, set[int]] = {}
        """Evaluation loaders that logged a name without a loader index, by name."""
        self.pending: list[tuple[Series, Any, Any, int, int]] = []
        self.batches_of_step, self.dropped = 0, -1
        """`dropped`: the newest step if it was dropped: values still logged for it are ignored."""
        self.muted = False
        """Whether logged values are ignored, as for masked batches."""
        self.losses: list[tuple[Tensor, int]] = []
        self.unshared: list[Row] = []
        """Training values not yet sent to other ranks, where values are shared."""
        self.exchanges = 0
        """Number of exchanges of values; of two ranks at the same step the one with the higher count is ahead."""
        self.logged: set[str] = set()
        """Paths of the metric objects in the task that were logged."""
        self.state_at_end: dict[str, Any] | None = None
        """The state of an epoch that the run ended within, whose metric objects are reset since."""
        self.bad_loss: tuple[int, float] | None = None
        """The first step of this process with a non-finite loss, and that loss."""

    # --- writing: the hot path --------------------------------------------------------------------------------------
    def open(self, stage: str, fresh: bool = True, loaders: int = 1) -> None:
        """Start logging into `stage`; `fresh` drops its values."""
        if self.pending:
            self.flush()
        self.stage, self.in_step = stage, False
        self.leave_batches(1)
        self.loaders, self.loaders_seen, self.loaders_of = loaders if loaders > 1 else 0, set(), {}
        if fresh and stage == "train":
            self.unshared, self.means_shown = [], {}
        if fresh or stage not in self.stages:
            self.stages[stage], self.batches[stage] = {}, 0
        self.series = self.stages[stage]

    def open_batch(self, replica: int, samples: int) -> None:
        """Attribute the following values to one batch of `replica`."""
        self.replica, self.samples, self.in_step, self.in_batch = replica, samples, True, True
        self.batches[self.stage] += 1
        trains = self.stage == "train"
        self.batches_of_step += trains
        # Not within a training step: if the step is repeated (elastic runs), its values must not be in the sums yet.
        if len(self.pending) >= PENDING_LIMIT and (self.batches_of_step == 1 or not trains):
            self.flush()
        if self.states.swaps_states:
            self.states.open_replica(replica)

    def leave_batches(self, samples: int) -> None:
        """Attribute the following values to this process and no batch, as in hooks called once per step or epoch."""
        counts = self.first_replica == 0 or not self.shares or self.stage != "train"
        self.replica, self.samples, self.in_batch = self.first_replica if counts else ONCE_PER_PROCESS, samples, False

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
            series = self.series.get(name + self.suffix if options[5] else name)
        except TypeError:
            series = None  # no name
        if series is None:
            series = self._open_series(name, value, options)
        elif series.in_step is not self.in_step and self._is_mixed(series, value):
            full = name + OTHER + (self.suffix if options[5] else "")
            series = self.series.get(full) or self._open_series(name + OTHER, value, options)
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
        """Record several values with the same options: equal to `log` for each, in a quarter of the time."""
        known, in_step = self.series, self.in_step
        # the rare cases go through `log`; what follows checks once for all values (1.2 to 2.8 us for each of 100)
        if known is None or self.muted or self.suffix or options[6]:
            for name, value in values.items():
                self.log(name, value, batch_size, options)
            return
        replica, step, append = self.replica, self.step, self.pending.append
        weight = batch_size if batch_size is not None else self.samples if in_step else 1
        for name, value in values.items():
            series = known.get(name)
            if series is None or series.metric is not None or series.in_step is not in_step:
                self.log(name, value, batch_size, options)
            elif isinstance(value, Tensor) and value.requires_grad:
                append((series, value.detach(), weight, replica, step))
            else:
                append((series, value, weight, replica, step))

    def _open_series(self, name: str, value: Any, options: Options) -> Series:
        prog_bar, logger, on_step, on_epoch, reduce_fx, add_suffix, rank_zero_only, synced = options
        assert self.series is not None
        if not isinstance(name, str) or not name:
            swapped = isinstance(value, str) and isinstance(name, (Real, Tensor))
            came = (
                "a tensor"
                if isinstance(name, Tensor)
                else f"the number {name}"
                if isinstance(name, Real)
                else repr(name)
            )
            hint = f"; the two are swapped: self.log({value!r}, value)" if swapped else ""
            raise TaskError(f"log() needs a name first, and then the value; got {came}{hint}.")
        if is_metric(value):
            kind = "metric"
            self.logged.update(path for path in map(self.states.path_of, metrics_within([value])) if path is not None)
            self._warn_of_shared(name, value)
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
            kind = read_kind(reduce_fx, name)
            kind = ONCE if kind == "sum" and not (self.in_batch or synced) else kind
        else:
            came = type(value).__name__
            if isinstance(value, Tensor):
                came = f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else f"a {value.dtype}"
            raise TaskError(
                f"log({name!r}) takes a number, a tensor with one value or a torchmetrics.Metric; got {came}."
            )
        if on_step is False and on_epoch is False:
            raise TaskError(f"log({name!r}, on_step=False, on_epoch=False) is not useful: it keeps no value.")
        in_training_step = self.in_step and self.stage == "train"
        on_step = in_training_step if on_step is None else on_step
        on_epoch = not in_training_step if on_epoch is None else on_epoch
        if not in_training_step and not on_epoch:
            on_step, on_epoch = False, True
        full = name + self.suffix if add_suffix else name
        on_step, on_epoch = on_step and self.in_step, on_epoch or not on_step
        series = Series(full, kind, on_step, on_epoch, prog_bar, logger is not False)
        series.metric = value if kind == "metric" else None
        series.alone, series.synced, series.in_step = rank_zero_only, synced, self.in_step
        series.description = self._describe(series)
        self.series[full] = series
        return series

    def _is_mixed(self, series: Series, value: Any) -> bool:
        """Return whether a name that a series has in steps is logged between them, or the other way round."""
        if series.in_step is None:  # of a checkpoint, or of another rank
            series.in_step = self.in_step
        return series.in_step is not self.in_step and series.metric is not value

    def _warn_of_shared(self, name: str, metric: Any) -> None:
        """Warn of a metric object logged in two open stages: it mixes their samples."""
        for stage, series in self.stages.items():
            if stage != self.stage and any(one.metric is metric for one in series.values()):
                log.warning(
                    "log(%r): the same %s is logged in %s and in %s, which mixes their samples. Give each stage a "
                    "metric of its own (metric.clone()).", name, type(metric).__name__, stage, self.stage,
                )  # fmt: skip

    def watch(self, loss: Tensor) -> None:
        """Record a loss, to check later that it is finite."""
        self.losses.append((loss.detach(), self.step))
        if len(self.losses) >= PENDING_LIMIT:
            self._read_losses()

    # --- reading: at logging steps and at the end of epochs ---------------------------------------------------------
    def flush(self, since: int | None = None) -> None:
        """Add all pending values to their sums, with one transfer per device and dtype.

        since: the oldest step whose values are kept as those of a step; without it the newest step alone.
        """
        pending, self.pending = self.pending, []
        since, dropped, self.dropped = self.step if since is None else since, self.dropped, -1
        # skip values that only an earlier step's logging point would have shown
        pending = [one for one in pending if (one[0].keeps_sums or one[4] >= since) and one[4] != dropped]
        values = to_floats([one[1] for one in pending])
        weights = read_weights(pending)
        if self.shares and self.stage == "train":
            # Not into the sums yet: a step that breaks off is repeated, and would count twice. They are counted when
            # all ranks have them, before the update (share_step).
            self.unshared += [
                Row(series, replica, value, weight, step)
                for (series, _, _, replica, step), value, weight in zip(pending, values, weights, strict=True)
            ]
            return
        for (series, _, _, replica, step), value, weight in zip(pending, values, weights, strict=True):
            if series.kind in AVERAGED and step < since:  # most values of most runs, without two calls
                if series.kind == "mean":
                    entry = series.sums.get(replica)
                    if entry is None:
                        series.sums[replica] = [value * weight, weight]
                    else:
                        entry[0] += value * weight
                        entry[1] += weight
            else:
                self._count(series, replica, value, weight, step, since)

    def _count(
        self, series: Series, replica: int, value: float, weight: float, step: int, since: int | None = None
    ) -> None:
        """Add a value to its replica's sums of the epoch and of a step: the newest, or one not before `since`."""
        if replica == ONCE_PER_PROCESS:  # the first process counts it
            return
        if step == EPOCH_END:
            accumulate(series.closing, replica, series.kind, value, weight)
            return
        if series.kind != "metric" and series.keeps_sums:
            accumulate(series.sums, replica, series.kind, value, weight)
        if series.on_step and step >= (self.step if since is None else since):
            if series.step_at != step:
                series.step, series.step_at = {}, step
            accumulate(series.step, replica, series.kind, value, weight)

    def drop_step(self) -> None:
        """Ignore all values logged for the newest step, including later ones."""
        self.pending = [item for item in self.pending if item[4] not in (self.step, self.dropped)]
        self.unshared = [row for row in self.unshared if row.step not in (self.step, self.dropped)]
        self.dropped = self.step

    def begin_closing(self) -> None:
        """Mark the following values as logged after the epoch's last step; they count only if the epoch ends here."""
        self.newest, self.step = self.step, EPOCH_END

    def check_losses(self) -> None:
        """Raise NonFiniteError on every rank, naming the first step with a non-finite loss. Collective."""
        first = self._first_bad_loss()
        if self.processes > 1:
            first = self.collectives.all_reduce(torch.tensor([first], dtype=torch.float64), "min").item()
        self._refuse_bad_loss(first)

    def _first_bad_loss(self) -> float:
        self._read_losses()
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

    def _read_losses(self) -> None:
        """Read pending losses and remember the first non-finite one."""
        losses, self.losses = self.losses, []
        for (_, step), value in zip(losses, to_floats([loss for loss, _ in losses]), strict=True):
            if value - value != 0.0 and self.bad_loss is None:
                self.bad_loss = step, value

    def running_values(self) -> dict[str, float]:
        """Return training's values of the epoch so far that are for the progress bar; no collective.

        On several processes those up to the newest logging point, over all ranks; else they are read from the device.
        Empty where values are shared.
        """
        if self.stage != "train" or self.series is None or self.shares:
            return {}
        if self.processes > 1:
            return dict(self.means_shown)
        newest = [one for one in self.pending if one[4] == self.step]  # of a step that may yet be dropped
        self.pending = [one for one in self.pending if one[4] != self.step]
        self.flush()
        self.pending, more = newest, dict[str, dict[int, list[float]]]()
        for (series, _, _, replica, step), value, weight in zip(
            newest, to_floats([one[1] for one in newest]), read_weights(newest), strict=True
        ):
            if series.keeps_sums and series.kind != "metric" and step != EPOCH_END and replica != ONCE_PER_PROCESS:
                accumulate(more.setdefault(series.name, {}), replica, series.kind, value, weight)
        shown = [one for one in self.series.values() if one.prog_bar and (one.sums or one.name in more)]
        sums = {one.name: joined(one.kind, one.sums, more.get(one.name, {})) for one in shown}
        return {one.name.replace(OTHER, ""): total(one.kind, sums[one.name]) for one in shown}

    def own_values(self) -> Reduced:
        """Return this process's newest values of steps since this or `log_point` was called; no collective.

        On several processes without those logged with `sync_dist`. Not usable where `shares` is set.
        """
        since, self.unread = self.unread, max(self.step, 0)
        self.flush(since)
        known = [one for one in (self.series or {}).values() if one.step and one.step_at >= since]
        found = [(one, total(one.kind, one.step)) for one in known if not one.synced or self.processes == 1]
        return sort_out(found, "_step")

    def own_values_between_steps(self) -> Reduced:
        """Return what this process has logged between steps since the epoch began; otherwise like `own_values`."""
        self.flush(self.unread)
        known = [one for one in (self.series or {}).values() if one.in_step is False and one.kind != "metric"]
        sums = [
            (one, joined(one.kind, one.sums, one.closing)) for one in known if not one.synced or self.processes == 1
        ]
        return sort_out([(one, total(one.kind, own)) for one, own in sums if own], "_epoch")

    def reduce_step(self) -> Reduced:
        """Return the newest step's values of the current stage, over all replicas. Collective."""
        return self.log_point(checks_losses=False, extra=())[0]

    def newest_values(self) -> Reduced:
        """Return the newest step's values before the step counter advances; no collective where values are shared."""
        return sort_out(self._totals_of_step(), "_step") if self.shares else self.reduce_step()

    def log_point(self, checks_losses: bool, extra: Sequence[float]) -> tuple[Reduced, list[float]]:
        """Return the newest step's values over all replicas, and the maximum over ranks of each number in `extra`.

        Both take one collective, which with `checks_losses` also does the work of `check_losses`.
        """
        # negated, since the exchange takes maxima and the first bad step is a minimum
        extra = [-self._first_bad_loss() if checks_losses else -NEVER, *extra]
        if self.stage == "train" and self.step != EPOCH_END:
            self.unread = self.step + 1
        if self.shares and self.stage == "train":
            maxima = self._share(extra)
            found = self._totals_of_step()
        else:
            self.flush()
            mine = self._with_values_of_step()
            rows = [
                Row(one, replica, value, weight, one.step_at)
                for one in mine
                for replica, (value, weight) in one.step.items()
            ]
            absent = self.batches_of_step == 0
            gathered, maxima = self._gather(
                [row for row in rows if not row.series.alone], absent, extra, self._rows_to_show()
            )
            found = [(one, total(one.kind, sums)) for one, sums in gathered]
            found += [(one, total(one.kind, one.step)) for one in mine if one.alone]
        self._refuse_bad_loss(-maxima[0])  # the maximum of the negative is the first step
        return sort_out(found, "_step"), maxima[1:]

    def _rows_to_show(self) -> list[Row]:
        """Return the sums of the training epoch so far that the progress bar shows, where ranks have parts of them."""
        if self.stage != "train" or self.processes == 1:
            return []
        shown = [one for one in (self.series or {}).values() if one.prog_bar and one.kind != "metric" and not one.alone]
        return [
            Row(one, replica, value, weight, EPOCH_SO_FAR)
            for one in shown
            for replica, (value, weight) in one.sums.items()
        ]

    def _with_values_of_step(self) -> list[Series]:
        known = (self.series or {}).values()
        return [one for one in known if one.on_step and one.step_at == self.step and one.step]

    def _totals_of_step(self) -> list[tuple[Series, float]]:
        return [(series, total(series.kind, series.step)) for series in self._with_values_of_step()]

    def reduce_epoch(self, keep: bool = False) -> Reduced:
        """Return the current stage's values over the whole epoch; close the stage unless `keep` is set. Collective."""
        if self.shares and self.stage == "train":
            self._share(())
        self.flush()
        assert self.series is not None
        gathered = self._gather_epoch()
        self._read_metrics([one for one, _ in gathered if one.kind == "metric"], keep)
        found = [(one, one.value if one.kind == "metric" else total(one.kind, sums)) for one, sums in gathered]
        if self.step == EPOCH_END:
            self.step = self.newest
        if keep:
            for series in self.series.values():
                series.closing = {}
        else:
            for series in self.series.values():
                if series.metric is not None:
                    series.metric.reset()
            self.stages[self.stage], self.series = {}, None
            self.batches[self.stage] = 0
            self.means_shown = {}
            self.batches_left_out *= self.stage != "train"
        return sort_out(found, "_epoch")

    def _gather_epoch(self) -> list[tuple[Series, dict[int, list[float]]]]:
        """Return every series of the epoch with its sums over all replicas. Collective."""
        assert self.series is not None
        mine = [one for one in self.series.values() if one.on_epoch]
        mine = [one for one in mine if one.sums or one.closing or one.metric is not None]
        sums = {one.name: joined(one.kind, one.sums, one.closing) for one in mine}
        shared = self.shares and self.stage == "train"  # all ranks have all sums, but not all metric states
        local = [one for one in mine if one.alone or (shared and one.kind != "metric")]
        remote = [one for one in mine if one not in local]
        absent = self.batches[self.stage] == 0 or len(self.loaders_seen) < self.loaders
        skipped = shared and not self.states.by_path
        gathered = [] if skipped else self._gather(rows_of(remote, sums), absent, ())[0]
        return [(one, sums[one.name]) for one in local] + gathered

    def _read_metrics(self, others: list[Series], keep: bool) -> None:
        """Compute torchmetrics objects over all ranks, skipping those without an update since the last time.

        With `keep` their states stay, so that hooks at the end of an epoch can read them.
        """
        stale = torch.tensor([series.read_at != updates_within(series.metric) for series in others], dtype=torch.int32)
        if self.processes > 1 and others:  # reading is collective: all ranks read a metric that any has updated
            self.collectives.all_reduce(stale, "max")
        unread = [series for series, is_stale in zip(others, stale.tolist(), strict=True) if is_stale]
        metrics = [series.metric for series in unread]
        if self.states.swaps_states:
            self.states.merge(metrics, self.collectives)
        values = read_values(metrics, self.collectives, 1 if self.states.swaps_states else self.processes, keep)
        for series, value in zip(unread, values, strict=True):
            series.value, series.read_at = value, updates_within(series.metric)
        if self.states.swaps_states and keep:
            self.states.load_merged(self.collectives)
        elif self.states.swaps_states:
            self.states.forget(series.metric for series in others)

    def _gather(
        self, rows: Sequence[Row], absent: bool, extra: Sequence[float], shown: Sequence[Row] = ()
    ) -> tuple[list[tuple[Series, dict[int, list[float]]]], list[float]]:
        """Return each series with its sums over all replicas, and the maximum over ranks of each number in `extra`.

        absent: this rank had no batch and may have logged fewer names; series known only to other ranks are created
        here. Where values are shared every rank has all sums already and only the names are compared.
        shown: rows of `_rows_to_show`, for `means_shown`.

        Raises DisagreementError, naming ranks and names, when ranks that had batches logged different names.
        """
        found: dict[str, tuple[Series, dict[int, list[float]]]] = {}
        if self.processes == 1:
            for series, replica, value, weight, _ in rows:
                sums = found.setdefault(series.name, (series, {}))[1]
                if replica != NAME_ONLY:
                    sums[replica] = [value, weight]
            return list(found.values()), list(extra)
        ranks, extras = self.exchange.gather([*rows, *shown], [float(absent), *extra])
        numbers = [[row[0] for row in rank if row[4] != EPOCH_SO_FAR] for rank in ranks]
        self._compare(numbers, [bool(own[0]) for own in extras])
        known = self.series if self.series is not None else {}
        so_far: dict[str, tuple[Series, dict[int, list[float]]]] = {}
        for rank in ranks:
            for number, replica, value, weight, step in rank:
                series = self._series_at(number, known)
                place = so_far if step == EPOCH_SO_FAR else found
                sums = place.setdefault(series.name, (series, {}))[1]
                if replica != NAME_ONLY:
                    sums[replica] = [value, weight]
        self._require_equal_sums(found.values())
        for series, sums in so_far.values():
            self.means_shown[series.name.replace(OTHER, "")] = total(series.kind, sums)
        return list(found.values()), [max(column) for column in zip(*extras, strict=True)][1:]

    def _require_equal_sums(self, gathered: Iterable[tuple[Series, dict[int, list[float]]]]) -> None:
        """Raise DisagreementError for a sum that counts once and of which the ranks logged different values."""
        for series, sums in gathered:
            values = [value for value, _ in sums.values()]
            if series.kind == ONCE and len({str(value) for value in values}) > 1:  # as text, where NaN is NaN
                raise DisagreementError(
                    f"log({series.name!r}, reduce_fx='sum') was called in a hook of {self.describe_place()} with "
                    f"different values on the ranks: {values}. What a hook logs counts once, so log the same value on "
                    f"every rank; or pass sync_dist=True to add up those of all ranks."
                )

    def _compare(self, logged: list[list[int]], absent: list[bool]) -> None:
        """Raise DisagreementError unless all ranks logged the same series in the same order."""
        own = [list(dict.fromkeys(numbers)) for numbers in logged]
        whole = [numbers for numbers, is_absent in zip(own, absent, strict=True) if not is_absent] or own
        chosen = list(dict.fromkeys(number for numbers in whole for number in numbers))
        differing = {
            rank
            for rank, (numbers, is_absent) in enumerate(zip(own, absent, strict=True))
            if (not is_absent and numbers != chosen) or not set(numbers) <= set(chosen)
        }
        if differing:
            names = [[self.exchange.descriptions[number][0] for number in numbers] for numbers in own]
            compared = {rank: names[rank] for rank in range(len(own)) if rank in differing or not absent[rank]}
            raise DisagreementError(self._disagreement(compared))

    def _series_at(self, number: int, known: dict[str, Series]) -> Series:
        """Return the series with a number agreed between ranks; create an empty one if this rank has none."""
        description = self.exchange.descriptions[number]
        found = known.get(description[0])
        if found is None:
            found = known[description[0]] = self._series_of(description)
        return found

    def _describe(self, series: Series) -> Description:
        path = self.states.path_of(series.metric) if series.metric is not None else None
        flags = series.on_step, series.on_epoch, series.prog_bar, series.to_loggers
        return (series.name, series.kind, *flags, path, series.alone)

    def _series_of(self, description: Sequence[Any]) -> Series:
        """Return an empty series from its `_describe` tuple."""
        name, kind, on_step, on_epoch, prog_bar, to_loggers, path, *alone = description
        series = Series(name, kind, on_step, on_epoch, prog_bar, to_loggers, self.states.by_path.get(path))
        series.alone = any(alone)
        series.description = self._describe(series)
        return series

    def _disagreement(self, names: dict[int, list[str]]) -> str:
        common = set.intersection(*(set(own) for own in names.values()))
        extra = [
            f"rank {rank} also logged {sorted(set(own) - common)}" for rank, own in names.items() if set(own) - common
        ]
        return (
            f"The ranks logged different names in {self.describe_place()}: all logged {sorted(common)}, but "
            f"{'; '.join(extra) or 'not in the same order'}. Call self.log with the same names in the same order on "
            f"every rank, never under a condition on the rank or on the content of a batch."
        )

    # --- elastic runs -----------------------------------------------------------------------------------------------
    def share_step(self) -> None:
        """Send all ranks' values of the current step to every rank, before the weights are updated. Collective.

        A rank thus never finishes a step whose values another rank could lose. Values logged later in the step are sent
        with the next step or logging point.
        """
        self._share((), names=True)

    def share(self) -> None:
        """Send every rank the values that others logged since the last exchange. Collective."""
        self._share(())

    def _share(self, extra: Sequence[float], names: bool = False) -> list[float]:
        """Exchange values and return the maximum over ranks of each number in `extra`; on an error nothing changes."""
        if self.stage == "train":
            self.flush()
        known = self.stages.setdefault("train", {})
        states = self.states.own_states()
        if self.processes == 1:
            for own in self.unshared:
                self._count(*own)
            self.unshared, self.exchanges = [], self.exchanges + 1
            return list(extra)
        absent = self.batches_of_step == 0
        ranks, extras = self.exchange.gather(self.unshared, [float(bool(states)), float(absent), *extra])
        if names:
            self._compare([self._logged_in_step(rank) for rank in ranks], [bool(own[1]) for own in extras])
        states_of_all = self.collectives.gather_objects(states) if any(own[0] for own in extras) else []
        for rank in ranks:
            for number, replica, value, weight, step in rank:
                self._count(self._series_at(number, known), replica, value, weight, step)
        for states in states_of_all:
            self.states.add_remote(states)
        self.unshared, self.exchanges = [], self.exchanges + 1
        return [max(column) for column in zip(*extras, strict=True)][2:]

    def _logged_in_step(self, rows: list[tuple[int, int, float, float, int]]) -> list[int]:
        """Return the series numbers in rows of the newest step, without `rank_zero_only` series."""
        alone = {number for number, description in enumerate(self.exchange.descriptions) if description[-1]}
        return [row[0] for row in rows if row[4] == self.step and row[0] not in alone]

    def rewind(self, step: int) -> None:
        """Discard values logged in `step` and later, so that these steps can be repeated."""
        self.pending = [item for item in self.pending if item[4] < step]
        self.unshared = [row for row in self.unshared if row.step < step]
        self.losses = [item for item in self.losses if item[1] < step]
        self.step, self.suffix = step - 1 if step else NO_STEP, ""
        self.unread = min(self.unread, step)
        for series in self.stages["train"].values():
            series.closing = {}
        self.open("train", fresh=False)

    def forget_epoch(self) -> None:
        """Drop all sums of the training epoch, because it has ended or starts over."""
        metrics = [series.metric for series in self.stages["train"].values() if series.metric is not None]
        self.states.forget(metrics)
        for metric in metrics:
            metric.reset()
        self.open("train")

    def join(self, collectives: Ranks, replicas: range, shares: bool) -> None:
        """Reduce values with the other ranks from now on; `replicas` are those of this process, `shares` as above."""
        self.collectives, self.shares, self.exchange = collectives, shares, Exchange(collectives)
        self.set_layout(collectives.size, replicas)

    def set_layout(self, processes: int, replicas: range) -> None:
        """Set the number of processes and the replicas of this process."""
        self.processes, self.states.replicas = processes, list(replicas)
        self.first_replica = self.replica = replicas.start
        self.exchange.reset()

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the training epoch's sums so far, over all ranks. Collective unless values are shared.

        Where they are shared, this rank returns the values of its last exchange.
        """
        if self.state_at_end is not None:
            return self.state_at_end
        known = self.stages.setdefault("train", {})
        if self.shares:
            series = [
                {
                    "description": list(one.description),
                    "sums": _sums_as_lists(one.sums),
                    "step": _sums_as_lists(one.step),
                    "at": one.step_at,
                }
                for one in known.values()
            ]
            return {"series": series, "states": self.states.all()}
        self.flush()
        own = [one for one in known.values() if one.on_epoch and not one.alone]
        # `_gather` looks up other ranks' series in self.series, which is validation's if that saves
        stage, self.series = self.series, known
        gathered, _ = self._gather(rows_of(own, {one.name: one.sums for one in own}), absent=not own, extra=())
        self.series = stage
        metrics = [one.metric for one, _ in gathered if one.metric is not None]
        return {
            "series": [{"description": list(one.description), "sums": _sums_as_lists(sums)} for one, sums in gathered],
            "states": self.states.gather(metrics, self.collectives),
        }

    def finish(self) -> None:
        """Reset the metric objects of an epoch that the run of one process ends within, for the next fit to begin anew.

        A checkpoint that is saved later has what they held.
        """
        metrics = [one.metric for one in self.stages.get("train", {}).values() if one.metric is not None]
        if metrics and self.processes == 1:
            self.state_at_end = self.state_dict()
            for metric in metrics:
                metric.reset()

    def gather_unlogged(self) -> list[str]:
        """Load the states of all replicas into the metric objects that were never logged. Collective.

        Returns the names of those that were updated but not computed.
        """
        states = self.states
        if not states.by_path or (self.processes == 1 and not states.swaps_states):
            return []
        computed = {path for path, metric in states.with_states.items() if is_computed(metric)}
        # a rank without a batch has logged nothing, and all must gather the same
        of_ranks = (
            [(self.logged, computed)] if self.shares else self.collectives.gather_objects((self.logged, computed))
        )
        self.logged = set().union(*(logged for logged, _ in of_ranks))
        computed = set.intersection(*(computed for _, computed in of_ranks))
        unlogged = {path: metric for path, metric in states.with_states.items() if path not in self.logged}
        parts = states.all() if self.shares else states.gather(unlogged.values(), self.collectives)
        updated = [path for path in unlogged if any(one[COUNT] for one in parts.get(path, {}).values())]
        for path in updated:
            load_states(unlogged[path], merged_in_order(unlogged[path], parts[path]))
        return [path for path in updated if path not in computed] if self.processes > 1 else []

    def load_state_dict(self, state: dict[str, Any], replicas: Iterable[int]) -> None:
        """Restore the sums of `replicas`, those of this process; where values are shared, the sums of all."""
        owned, known = set(replicas), self.stages.get("train", {})
        # not in checkpoints: series that only rank 0 logs, and those without values of an epoch
        kept = {name: one for name, one in known.items() if not self.shares and (one.alone or not one.on_epoch)}
        self.stages["train"], self.pending, self.unshared = kept, [], []
        for saved in state["series"]:
            name = saved["description"][0]
            series = kept[name] = known.get(name) or self._series_of(saved["description"])
            series.sums = {
                int(replica): [value, weight]
                for replica, value, weight in saved["sums"]
                if self.shares or replica in owned
            }
            if series.kind == ONCE and not self.shares and saved["sums"]:
                series.sums = {self.first_replica: list(saved["sums"][0][1:])}
            if self.shares and "step" in saved:
                series.step_at = saved["at"]
                series.step = {int(replica): [value, weight] for replica, value, weight in saved["step"]}
        plain = [series for series in kept.values() if series.metric is None]
        # 0 if the replicas that this process now owns had no batch in the epoch so far
        self.batches["train"] = sum(bool(series.sums) for series in plain) if plain else len(state["series"])
        self.states.load(state["states"])


def read_weights(pending: Sequence[tuple[Series, Any, Any, int, int]]) -> list[float]:
    """Return the weights of pending values; those that are tensors are read from their device, in one transfer."""
    weights = [one[2] for one in pending]
    return to_floats(weights) if any(isinstance(weight, Tensor) for weight in weights) else weights


def rows_of(chosen: Iterable[Series], sums: dict[str, dict[int, list[float]]]) -> list[Row]:
    """Return one row per series and replica with the epoch's sums; a NAME_ONLY row for a series without sums."""
    rows: list[Row] = []
    for series in chosen:
        entries = sums[series.name] or {NAME_ONLY: [0.0, 0.0]}
        rows += [Row(series, replica, value, weight, 0) for replica, (value, weight) in entries.items()]
    return rows


def _sums_as_lists(sums: dict[int, list[float]]) -> list[list[float]]:
    return [[replica, *sums[replica]] for replica in sorted(sums)]
