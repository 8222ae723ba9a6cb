"""Logged values: kept on their device, read late, reduced over batches, replicas and ranks in one order.

A logged tensor is appended to a list and nothing else happens to it until a point is written; then all pending values
are read in one go. Sums are kept for each replica and added up in the order of the replicas, in float64, so that a
logged mean is the same number on any number of processes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DisagreementError, NonFiniteError, TaskError
from ..processes.collectives import Collectives
from ..torch_private import newest_value_of
from .reduce import (
    AVERAGED,
    LOADER_MARK,
    PRESENT,
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
from .torchmetrics import MetricStates, is_metric, read_metrics, updates_within

Options = tuple[bool, bool | None, bool | None, bool | None, Any, bool, bool]
"""prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only: as given to `Task.log`."""

PENDING_LIMIT = 1024
"""Values, or losses, that may wait on the device before they are read although no point is due."""


CLOSING = 1 << 62
"""In the place of the step, while hooks at the end of the training epoch log: those values count only if it ends."""
NO_STEP = -2
ONCE = -2
"""In the place of the replica, for what a hook logs once in each process: where values are shared those of the first
process count, since the number of processes may change."""
NEVER = float("inf")


class Metrics:
    """What the tasks and callbacks of a run log."""

    def __init__(self, collectives: Collectives, processes: int, task: nn.Module, shares: bool = False) -> None:
        """`shares`: every rank keeps what all logged in training, lest a rank that dies take it along; see `share`."""
        self.collectives, self.processes, self.task, self.shares = collectives, processes, task, shares
        self.exchange = Exchange(collectives)
        self.states = MetricStates(task, [0], by_replica=False)
        self.stages: dict[str, dict[str, Series]] = {}
        self.series: dict[str, Series] | None = None
        self.stage = ""
        self.in_step = False
        self.in_turn = False
        """Whether a batch is worked on; after the last one of a step its hooks come, once for the whole step."""
        self.first_replica = self.replica = 0
        self.samples = 1
        self.step = self.newest = NO_STEP  # none has begun; -1 is the step of a series without values
        self.suffix, self.loader = "", 0
        """What is added to a name that a loader of several logs, and the index of that loader."""
        self.turns: dict[str, int] = {}
        self.describe_place: Callable[[], str] = lambda: self.stage
        """Says what is going on, for messages."""
        self.turns_left_out = 0
        """Batches of this training epoch of which training_step returned None."""
        self.loaders = 0
        """How many loaders the evaluation has, where it must be known which gave this process a batch."""
        self.loaders_seen: set[int] = set()
        self.loaders_of: dict[str, set[int]] = {}
        """Which of the evaluation's loaders logged a name without their index."""
        self.turns_of_step = 0
        self.pending: list[tuple[Series, Any, float, int, int]] = []
        self.dropped = -1
        """The newest step, where it was dropped: what is still logged for it counts no more."""
        self.muted = False
        """Whether what is logged is dropped: in turns whose results do not count."""
        self.losses: list[tuple[Tensor, int]] = []
        self.loss: Tensor | None = None
        """The newest loss."""
        self.unshared: list[Row] = []
        """Values of the training that other ranks do not know yet, where they are shared."""
        self.exchanges = 0
        """How often values were shared: of two ranks at the same step the one that did so more often is ahead."""
        self.bad_loss: tuple[int, float] | None = None
        """The first step of this process whose loss was seen not to be finite, and that loss."""

    # --- writing: the hot path --------------------------------------------------------------------------------------
    def open(self, stage: str, fresh: bool = True, loaders: int = 1) -> None:
        """Log into `stage` from now on; `fresh` drops what it holds."""
        if self.pending:
            self.flush()
        self.stage, self.in_step = stage, False
        self.leave_turns(1)
        self.loaders, self.loaders_seen, self.loaders_of = loaders if loaders > 1 else 0, set(), {}
        if fresh and stage == "train":
            self.unshared = []
        if fresh or stage not in self.stages:
            self.stages[stage], self.turns[stage] = {}, 0
        self.series = self.stages[stage]

    def open_turn(self, replica: int, samples: int) -> None:
        """Count what is logged from now on to one batch of `replica`."""
        self.replica, self.samples, self.in_step, self.in_turn = replica, samples, True, True
        self.turns[self.stage] += 1
        trains = self.stage == "train"
        self.turns_of_step += trains
        # not in the middle of a training step: where it has to be repeated, its values must not be in the sums yet
        if len(self.pending) >= PENDING_LIMIT and (self.turns_of_step == 1 or not trains):
            self.flush()
        if self.states.taking_turns:
            self.states.open_replica(replica)

    def leave_turns(self, samples: int) -> None:
        """Count what is logged from now on to no batch, but to this process: hooks that come once log it."""
        counts = self.first_replica == 0 or not self.shares or self.stage != "train"
        self.replica, self.samples, self.in_turn = self.first_replica if counts else ONCE, samples, False

    def return_to_turn(self, replica: int, samples: int) -> None:
        """Count what is logged from now on to the batch of a turn that was opened before."""
        self.replica, self.samples, self.in_turn = replica, samples, True

    def open_loader(self, index: int) -> None:
        """Name what is logged from now on after an evaluation's loader, where it has several."""
        if self.loaders:
            self.suffix, self.loader = f"{LOADER_MARK}{index}", index
            self.loaders_seen.add(index)

    def leave_out_turn(self) -> None:
        """Do not expect that the batch whose turn it is logs what the others do."""
        self.turns[self.stage] -= 1
        self.turns_left_out += 1
        self.turns_of_step -= self.stage == "train"

    def log(self, name: str, value: Any, batch_size: int | None, options: Options) -> None:
        """Take one value; see `Task.log`."""
        if self.muted:
            return
        if self.series is None:
            raise TaskError(
                f"log({name!r}) here has no step or epoch to count to: its points are written already, or none has "
                f"begun. Log in a step, in on_train_batch_*, or in on_*_epoch_start and on_*_epoch_end."
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
        elif series.in_step is not self.in_step:
            self._refuse_mixture(series)
        if series.metric is not None:
            if series.metric is value and not series.on_step:
                return
            value = newest_value_of(value) if series.metric is value else value
            if value is None:
                return
        elif isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()
        weight = batch_size if batch_size is not None else self.samples if self.in_step else 1
        self.pending.append((series, value, weight, self.replica, self.step))

    def log_dict(self, values: Mapping[str, Any], batch_size: int | None, options: Options) -> None:
        """Take some values that are logged alike: what `log` does for each, in a quarter of the time."""
        known, in_step = self.series, self.in_step
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
        prog_bar, logger, on_step, on_epoch, reduce_fx, add_suffix, rank_zero_only = options
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
            self._refuse_shared(name, value)
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
            kind = read_kind(reduce_fx, name)
        else:
            came = type(value).__name__
            if isinstance(value, Tensor):
                came = f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else f"a {value.dtype}"
            raise TaskError(
                f"log({name!r}) takes a number, a tensor with one value or a torchmetrics.Metric; got {came}."
            )
        in_training_step = self.in_step and self.stage == "train"
        on_step = in_training_step if on_step is None else on_step
        on_epoch = not in_training_step if on_epoch is None else on_epoch
        if not in_training_step and not on_epoch:  # only training has points of steps
            on_step, on_epoch = False, True
        full = name + self.suffix if add_suffix else name
        on_step, on_epoch = on_step and self.in_step, on_epoch or not on_step
        series = Series(full, kind, on_step, on_epoch, prog_bar, logger is not False)
        series.metric = value if kind == "metric" else None
        series.alone, series.in_step = rank_zero_only, self.in_step
        series.description = self._describe(series)
        self.series[full] = series
        return series

    def _refuse_mixture(self, series: Series) -> None:
        """Refuse a name that both steps and what is called between them log: its mean would be over both."""
        if series.in_step is None:  # of a checkpoint, or of another rank
            series.in_step = self.in_step
        elif series.metric is None:
            raise TaskError(
                f"{series.name!r} is logged by the steps of {self.stage} and outside of them (such as in "
                f"on_{self.stage}_epoch_end); its value would be the mean over both. Log one of the two under another "
                f"name."
            )

    def _refuse_shared(self, name: str, metric: Any) -> None:
        """Refuse a metric that another stage under way fills too: the samples of both would be in its value."""
        for stage, series in self.stages.items():
            if stage != self.stage and any(one.metric is metric for one in series.values()):
                raise TaskError(
                    f"log({name!r}): the same {type(metric).__name__} is logged in {stage} and in {self.stage}, which "
                    f"would mix their samples. Give each stage a metric of its own (metric.clone())."
                )

    def watch(self, loss: Tensor) -> None:
        """Remember a loss, to see later whether it was finite."""
        self.loss = loss = loss.detach()
        self.losses.append((loss, self.step))
        if len(self.losses) >= PENDING_LIMIT:
            self._read_losses()

    # --- reading: at logging steps and at the end of epochs ---------------------------------------------------------
    def flush(self) -> None:
        """Read every pending value from its device, in one go for each device and type, and add it to its sums."""
        pending, self.pending = self.pending, []
        newest, dropped, self.dropped = self.step, self.dropped, -1
        # what only the point of an earlier step would have shown is not read
        pending = [one for one in pending if (one[0].on_epoch or one[4] == newest) and one[4] != dropped]
        values = to_floats([one[1] for one in pending])
        if self.shares and self.stage == "train":
            self.unshared += [
                Row(series, replica, value, weight, step)
                for (series, _, weight, replica, step), value in zip(pending, values, strict=True)
            ]
            return
        for (series, _, weight, replica, step), value in zip(pending, values, strict=True):
            if series.kind in AVERAGED and step != newest:  # most values of most runs, without two calls
                if series.kind == "mean":
                    entry = series.sums.get(replica)
                    if entry is None:
                        series.sums[replica] = [value * weight, weight]
                    else:
                        entry[0] += value * weight
                        entry[1] += weight
            else:
                self._count(series, replica, value, weight, step)

    def _count(self, series: Series, replica: int, value: float, weight: float, step: int) -> None:
        """Add a value to the sums of its replica, those of the epoch and those of the newest step."""
        if replica == ONCE:
            return
        if step == CLOSING:
            accumulate(series.closing, replica, series.kind, value, weight)
            return
        if series.kind != "metric" and series.on_epoch:
            accumulate(series.sums, replica, series.kind, value, weight)
        if series.on_step and step == self.step:
            if series.step_at != step:
                series.step, series.step_at = {}, step
            accumulate(series.step, replica, series.kind, value, weight)

    def drop_step(self) -> None:
        """Let what is logged for the newest step count for nothing."""
        self.pending = [item for item in self.pending if item[4] not in (self.step, self.dropped)]
        self.unshared = [row for row in self.unshared if row.step not in (self.step, self.dropped)]
        self.dropped = self.step

    def begin_closing(self) -> None:
        """The epoch's steps are over; what is logged from now on counts only if the epoch ends here."""
        self.newest, self.step = self.step, CLOSING
        self.leave_turns(1)

    def check_losses(self) -> None:
        """Raise NonFiniteError, naming the first step whose loss was not finite, on every rank."""
        first = self._first_bad_loss()
        if self.processes > 1:
            first = self.collectives.all_reduce(torch.tensor([first], dtype=torch.float64), "min").item()
        self._refuse_bad_loss(first)

    def _first_bad_loss(self) -> float:
        """Return the first step of this process whose loss is not finite; NEVER where there is none."""
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
        """Read the losses that wait, and remember the first that is not finite."""
        losses, self.losses = self.losses, []
        for (_, step), value in zip(losses, to_floats([loss for loss, _ in losses]), strict=True):
            if value - value != 0.0 and self.bad_loss is None:
                self.bad_loss = step, value

    def reduce_step(self) -> Reduced:
        """Return the newest step's values of the present stage, over all replicas; every rank calls it."""
        return self.log_point(checks_losses=False, said=())[0]

    def newest_values(self) -> Reduced:
        """Return the newest step's values while the step is being counted, where shared ones need no collective."""
        return sort_out(self._totals_of_step(), "_step") if self.shares else self.reduce_step()

    def log_point(self, checks_losses: bool, said: Sequence[float]) -> tuple[Reduced, list[float]]:
        """Return the newest step's values over all replicas, and the highest of each number that a rank has `said`.

        Both in one collective, and with `checks_losses` what `check_losses` does too.
        """
        said = [-self._first_bad_loss() if checks_losses else -NEVER, *said]
        if self.shares and self.stage == "train":
            heard = self._share(said)
            found = self._totals_of_step()
        else:
            self.flush()
            mine = self._with_values_of_step()
            rows = [
                Row(one, replica, value, weight, one.step_at)
                for one in mine
                for replica, (value, weight) in one.step.items()
            ]
            gathered, heard = self._gather([row for row in rows if not row.series.alone], self.turns_of_step == 0, said)
            found = [(one, total(one.kind, sums)) for one, sums in gathered]
            found += [(one, total(one.kind, one.step)) for one in mine if one.alone]
        self._refuse_bad_loss(-heard[0])
        return sort_out(found, "_step"), heard[1:]

    def _with_values_of_step(self) -> list[Series]:
        known = (self.series or {}).values()
        return [one for one in known if one.on_step and one.step_at == self.step and one.step]

    def _totals_of_step(self) -> list[tuple[Series, float]]:
        return [(series, total(series.kind, series.step)) for series in self._with_values_of_step()]

    def reduce_epoch(self, keep: bool = False) -> Reduced:
        """Return the present stage's values over the whole epoch; unless told to `keep` them, close the stage."""
        if self.shares and self.stage == "train":
            self._share(())
        self.flush()
        assert self.series is not None
        gathered = self._gather_epoch()
        found = [(series, total(series.kind, sums)) for series, sums in gathered if series.kind != "metric"]
        others = [series for series, _ in gathered if series.kind == "metric"]
        self._read_metrics(others, keep)
        found += [(one, one.value) for one in others]
        if self.step == CLOSING:
            self.step = self.newest
        if keep:
            for series in self.series.values():
                series.closing = {}
        else:
            for series in self.series.values():
                if series.metric is not None:
                    series.metric.reset()
            self.stages[self.stage], self.series = {}, None
            self.turns[self.stage] = 0
            self.turns_left_out *= self.stage != "train"
        return sort_out(found, "_epoch")

    def _gather_epoch(self) -> list[tuple[Series, dict[int, list[float]]]]:
        """Return every series of the epoch with its sums over all replicas; every rank calls it."""
        assert self.series is not None
        mine = [one for one in self.series.values() if one.on_epoch]
        mine = [one for one in mine if one.sums or one.closing or one.metric is not None]
        sums = {one.name: joined(one.kind, one.sums, one.closing) for one in mine}
        shared = self.shares and self.stage == "train"  # then all ranks have all sums, but perhaps not all metrics
        here = [one for one in mine if one.alone or (shared and one.kind != "metric")]
        asked = [one for one in mine if not (one.alone or (shared and one.kind != "metric"))]
        absent = self.turns[self.stage] == 0 or len(self.loaders_seen) < self.loaders
        skipped = shared and not self.states.by_path
        gathered = [] if skipped else self._gather(rows_of(asked, sums), absent, ())[0]
        return [(one, sums[one.name]) for one in here] + gathered

    def _read_metrics(self, others: list[Series], keep: bool) -> None:
        """Read torchmetrics objects over all ranks, but not twice where none has updated one since it was read.

        Their states stay with `keep`, so that hooks at the end of an epoch may look at them.
        """
        stale = torch.tensor([series.read_at != updates_within(series.metric) for series in others], dtype=torch.int32)
        if self.processes > 1 and others:
            self.collectives.all_reduce(stale, "max")
        unread = [series for series, is_stale in zip(others, stale.tolist(), strict=True) if is_stale]
        metrics = [series.metric for series in unread]
        if self.states.taking_turns:
            self.states.merge(metrics, self.collectives)
        values = read_metrics(metrics, self.collectives, 1 if self.states.taking_turns else self.processes, keep)
        for series, value in zip(unread, values, strict=True):
            series.value, series.read_at = value, updates_within(series.metric)
        if self.states.taking_turns and keep:
            self.states.stand_together(self.collectives)
        elif self.states.taking_turns:
            self.states.forget(series.metric for series in others)

    def _gather(
        self, rows: Sequence[Row], absent: bool, said: Sequence[float]
    ) -> tuple[list[tuple[Series, dict[int, list[float]]]], list[float]]:
        """Return each series that all ranks logged with the sums of all replicas, and the highest of each number.

        This rank may have logged less if it had not its share of batches (`absent`). What it lacks is added to what is
        known of the stage. Where values are shared every rank has all sums, and only the names are compared.

        Raises DisagreementError, naming ranks and names, where ranks that had their share logged different names.
        """
        found: dict[str, tuple[Series, dict[int, list[float]]]] = {}
        if self.processes == 1:
            for series, replica, value, weight, _ in rows:
                sums = found.setdefault(series.name, (series, {}))[1]
                if replica != PRESENT:
                    sums[replica] = [value, weight]
            return list(found.values()), list(said)
        ranks, heard = self.exchange.gather(rows, [float(absent), *said])
        self._compare([[row[0] for row in rank] for rank in ranks], [bool(own[0]) for own in heard])
        known = self.series if self.series is not None else {}
        for rank in ranks:
            for number, replica, value, weight, _ in rank:
                series = self._series_at(number, known)
                sums = found.setdefault(series.name, (series, {}))[1]
                if replica != PRESENT:
                    sums[replica] = [value, weight]
        return list(found.values()), [max(column) for column in zip(*heard, strict=True)][1:]

    def _compare(self, logged: list[list[int]], absent: list[bool]) -> None:
        """Raise DisagreementError where the numbers of the series that ranks logged are not the same in one order."""
        own = [list(dict.fromkeys(numbers)) for numbers in logged]
        whole = [numbers for numbers, is_absent in zip(own, absent, strict=True) if not is_absent] or own
        chosen = list(dict.fromkeys(number for numbers in whole for number in numbers))
        odd = {
            rank
            for rank, (numbers, is_absent) in enumerate(zip(own, absent, strict=True))
            if (not is_absent and numbers != chosen) or not set(numbers) <= set(chosen)
        }
        if odd:
            names = [[self.exchange.descriptions[number][0] for number in numbers] for numbers in own]
            compared = {rank: names[rank] for rank in range(len(own)) if rank in odd or not absent[rank]}
            raise DisagreementError(self._disagreement(compared))

    def _series_at(self, number: int, known: dict[str, Series]) -> Series:
        """Return the `known` series of a number that the ranks agreed on; an empty one where this rank had none."""
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
        """Return an empty series as `_describe` described it."""
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
        """Give every rank what all have logged in this step so far; every rank calls it, before weights are changed.

        So no rank can have finished a step of which another one's values may be lost with it. What is logged in the
        step after that goes with the next one's, or with the next point.
        """
        self._share((), names=True)

    def share(self) -> None:
        """Give every rank what others have logged since the last time; every rank calls it."""
        self._share(())

    def _share(self, said: Sequence[float], names: bool = False) -> list[float]:
        """Share, and return the highest of each number that a rank has `said`; an error leaves all as it was."""
        if self.stage == "train":
            self.flush()
        known = self.stages.setdefault("train", {})
        states = self.states.own()
        if self.processes == 1:
            for own in self.unshared:
                self._count(*own)
            self.unshared, self.exchanges = [], self.exchanges + 1
            return list(said)
        absent = self.turns_of_step == 0
        ranks, heard = self.exchange.gather(self.unshared, [float(bool(states)), float(absent), *said])
        if names:
            self._compare([self._logged_in_step(rank) for rank in ranks], [bool(own[1]) for own in heard])
        states_of_all = self.collectives.gather_objects(states) if any(own[0] for own in heard) else []
        for rank in ranks:
            for number, replica, value, weight, step in rank:
                self._count(self._series_at(number, known), replica, value, weight, step)
        for states in states_of_all:
            self.states.accept(states)
        self.unshared, self.exchanges = [], self.exchanges + 1
        return [max(column) for column in zip(*heard, strict=True)][2:]

    def _logged_in_step(self, rows: list[tuple[int, int, float, float, int]]) -> list[int]:
        """Return the numbers of the series that rows of the newest step belong to, but for replica 0's own."""
        alone = {number for number, description in enumerate(self.exchange.descriptions) if description[-1]}
        return [row[0] for row in rows if row[4] == self.step and row[0] not in alone]

    def rewind(self, step: int) -> None:
        """Drop what was logged in `step` and later, which will be done again, and stand where the step before ended."""
        self.pending = [item for item in self.pending if item[4] < step]
        self.unshared = [row for row in self.unshared if row.step < step]
        self.losses = [item for item in self.losses if item[1] < step]
        self.step, self.suffix = step - 1 if step else NO_STEP, ""
        for series in self.stages["train"].values():
            series.closing = {}
        self.open("train", fresh=False)

    def forget_epoch(self) -> None:
        """Drop all sums of the training epoch: it is done, or begins anew."""
        metrics = [series.metric for series in self.stages["train"].values() if series.metric is not None]
        self.states.forget(metrics)
        for metric in metrics:
            metric.reset()
        self.open("train")

    def set_layout(self, processes: int, replicas: range) -> None:
        """From now on the replicas of this process are these."""
        self.processes, self.states.replicas = processes, list(replicas)
        self.first_replica = self.replica = replicas.start
        self.exchange.reset()

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the training epoch's sums so far, over all ranks; every rank calls it.

        Where they are shared nothing is communicated, and what this rank has shared last is what it knows.
        """
        known = self.stages.setdefault("train", {})
        if self.shares:
            series = [(one, one.sums) for one in known.values()]
            return {
                "series": [
                    {
                        "description": list(one.description),
                        "sums": _sums_as_lists(sums),
                        "step": _sums_as_lists(one.step),
                        "at": one.step_at,
                    }
                    for one, sums in series
                ],
                "states": self.states.all(),
            }
        self.flush()
        own = [one for one in known.values() if one.on_epoch and not one.alone]
        stage, self.series = self.series, known
        gathered, _ = self._gather(rows_of(own, {one.name: one.sums for one in own}), absent=not own, said=())
        self.series = stage
        metrics = [one.metric for one, _ in gathered if one.metric is not None]
        return {
            "series": [{"description": list(one.description), "sums": _sums_as_lists(sums)} for one, sums in gathered],
            "states": self.states.gather(metrics, self.collectives),
        }

    def load_state_dict(self, state: dict[str, Any], replicas: Iterable[int]) -> None:
        """Take over the sums of `replicas`, this process's own; where they are shared, those of all."""
        owned, known = set(replicas), self.stages.get("train", {})
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
            if self.shares and "step" in saved:
                series.step_at = saved["at"]
                series.step = {int(replica): [value, weight] for replica, value, weight in saved["step"]}
        plain = [series for series in kept.values() if series.metric is None]
        # 0: the replicas that are this process's now had no batch in the epoch so far
        self.turns["train"] = sum(bool(series.sums) for series in plain) if plain else len(state["series"])
        self.states.load(state["states"])


def rows_of(chosen: Iterable[Series], sums: dict[str, dict[int, list[float]]]) -> list[Row]:
    """Return what the ranks tell each other of the epoch's sums; of a series that has none, that it is there."""
    rows: list[Row] = []
    for series in chosen:
        entries = sums[series.name] or {PRESENT: [0.0, 0.0]}
        rows += [Row(series, replica, value, weight, 0) for replica, (value, weight) in entries.items()]
    return rows


def _sums_as_lists(sums: dict[int, list[float]]) -> list[list[float]]:
    return [[replica, *sums[replica]] for replica in sorted(sums)]
