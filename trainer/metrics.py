"""Logged values: kept on their device, read late, reduced over batches, replicas and ranks in one order.

A logged tensor is appended to a list and nothing else happens to it until a point is written; then all pending values
are read in one go. Sums are kept for each replica and added up in the order of the replicas, in float64, so that a
logged mean is the same number on any number of processes.
"""

import hashlib
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import DisagreementError, NonFiniteError, TaskError
from .series import LOADER_MARK, Reduced, Series, accumulate, read_kind, sort_out, to_floats, total
from .torch_private import newest_value_of
from .torchmetrics_states import MetricStates, is_metric, read_metrics, updates_within

Options = tuple[bool, bool | None, bool | None, bool | None, Any, bool, bool]
"""prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only: as given to `Task.log`."""

PENDING_LIMIT = 1024
"""Values, or losses, that may wait on the device before they are read although no point is due."""


class Collectives(Protocol):
    """The part of a strategy that metrics need."""

    def all_gather(self, tensor: Tensor) -> Tensor: ...  # noqa: D102
    def gather_objects(self, value: Any) -> list[Any]: ...  # noqa: D102
    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor: ...  # noqa: D102


class Metrics:
    """What the tasks and callbacks of a run log."""

    def __init__(self, collectives: Collectives, processes: int, replicas: int, task: nn.Module) -> None:
        self.collectives, self.processes, self.task = collectives, processes, task
        self.most_replicas = -(-replicas // processes)
        self.states = MetricStates(task, [0], by_replica=False)
        self.stages: dict[str, dict[str, Series]] = {}
        self.series: dict[str, Series] | None = None
        self.stage = ""
        self.in_step = False
        self.first_replica = self.replica = 0
        self.samples = 1
        self.step = -2  # none has begun; -1 is the step of a series without values
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
        self.incomplete = False
        """Whether sums of the training epoch may be lost, with processes that died: then ranks know different names."""
        self.bad_loss: tuple[int, float] | None = None
        """The first step of this process whose loss was seen not to be finite, and that loss."""

    # --- writing: the hot path --------------------------------------------------------------------------------------
    def open(self, stage: str, fresh: bool = True, loaders: int = 1) -> None:
        """Log into `stage` from now on; `fresh` drops what it holds."""
        if self.pending:
            self.flush()
        self.stage, self.in_step = stage, False
        self.loaders, self.loaders_seen, self.loaders_of = loaders if loaders > 1 else 0, set(), {}
        if fresh or stage not in self.stages:
            self.stages[stage], self.turns[stage] = {}, 0
        self.series = self.stages[stage]

    def open_turn(self, replica: int, samples: int) -> None:
        """Count what is logged from now on to one batch of `replica`."""
        self.replica, self.samples, self.in_step = replica, samples, True
        self.turns[self.stage] += 1
        trains = self.stage == "train"
        self.turns_of_step += trains
        # not in the middle of a training step: where it has to be repeated, its values must not be in the sums yet
        if len(self.pending) >= PENDING_LIMIT and (self.turns_of_step == 1 or not trains):
            self.flush()
        if self.states.taking_turns:
            self.states.open_replica(replica)

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
        newest = self.step
        for (series, _, weight, replica, step), value in zip(
            pending, to_floats([item[1] for item in pending]), strict=True
        ):
            if step == self.dropped:
                continue
            if series.metric is None:
                accumulate(series.sums, replica, series.kind, value, weight)
            if series.on_step and step == newest:
                if series.step_at != step:
                    series.step, series.step_at = {}, step
                accumulate(series.step, replica, series.kind, value, weight)
        self.dropped = -1

    def drop_step(self) -> None:
        """Let what is logged for the newest step count for nothing."""
        self.pending = [item for item in self.pending if item[4] not in (self.step, self.dropped)]
        self.dropped = self.step

    def check_losses(self) -> None:
        """Raise NonFiniteError, naming the first step whose loss was not finite, on every rank."""
        self._read_losses()
        own = self.bad_loss
        first = 2**62 if own is None else own[0]
        if self.processes > 1:
            first = int(self.collectives.all_reduce(torch.tensor([first]), "min").item())
        if first < 2**62:
            came = f"is {own[1]}" if own is not None and own[0] == first else "is not finite on another rank"
            raise NonFiniteError(
                f"The loss of step {first + 1} {came}. Lower the learning rate, clip gradients (gradient_clip_val) or "
                f"look for the cause with detect_anomaly=true; nan=ignore trains on. Earlier checkpoints are untouched."
            )

    def _read_losses(self) -> None:
        """Read the losses that wait, and remember the first that is not finite."""
        losses, self.losses = self.losses, []
        for (_, step), value in zip(losses, to_floats([loss for loss, _ in losses]), strict=True):
            if value - value != 0.0 and self.bad_loss is None:
                self.bad_loss = step, value

    def reduce_step(self) -> Reduced:
        """Return the newest step's values of the present stage, over all replicas."""
        self.flush()
        if self.series is None:
            return Reduced()
        mine = [series for series in self.series.values() if series.on_step and series.step_at == self.step]
        shared = [series for series in mine if not series.alone]
        chosen = self._agree(shared, self.series, absent=self.turns_of_step == 0)
        sums = [series.step if series.step_at == self.step else {} for series in chosen]
        found = list(zip(chosen, self._combine(chosen, sums), strict=True))
        found += [(series, total(series.kind, series.step)) for series in mine if series.alone]
        return sort_out(found, "_step")

    def reduce_epoch(self, keep: bool = False) -> Reduced:
        """Return the present stage's values over the whole epoch; unless told to `keep` them, close the stage."""
        self.flush()
        assert self.series is not None
        mine = [
            series for series in self.series.values() if series.on_epoch and (series.sums or series.metric is not None)
        ]
        absent = self.turns[self.stage] == 0 or len(self.loaders_seen) < self.loaders
        absent |= self.incomplete and self.stage == "train"
        chosen = self._agree([s for s in mine if not s.alone], self.series, absent)
        plain = [series for series in chosen if series.metric is None]
        found = [(series, total(series.kind, series.sums)) for series in mine if series.alone and series.sums]
        found += list(zip(plain, self._combine(plain, [series.sums for series in plain]), strict=True))
        others = [series for series in chosen if series.metric is not None]
        self._read_metrics(others, keep)
        found += [(series, series.value) for series in others]
        if not keep:
            for series in self.series.values():
                if series.metric is not None:
                    series.metric.reset()
            self.stages[self.stage], self.series = {}, None
            self.turns[self.stage] = 0
            self.turns_left_out *= self.stage != "train"
            self.incomplete &= self.stage != "train"
        return sort_out(found, "_epoch")

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

    def _combine(self, chosen: list[Series], sums: list[dict[int, list[float]]]) -> list[float]:
        """Return one number for each of `chosen`: the same on every rank, whatever the number of processes."""
        if self.processes > 1 and chosen:
            sums = self._gather(sums)
        return [total(series.kind, own) for series, own in zip(chosen, sums, strict=True)]

    def _gather(self, local: list[dict[int, list[float]]]) -> list[dict[int, list[float]]]:
        """Gather every rank's sums in one collective: (series, replica of the rank, [replica, value, weight])."""
        table = torch.full((len(local), self.most_replicas, 3), -1.0, dtype=torch.float64)
        for row, sums in enumerate(local):
            for column, (replica, (value, weight)) in enumerate(sums.items()):
                table[row, column] = torch.tensor([replica, value, weight], dtype=torch.float64)
        ranks = self.collectives.all_gather(table).tolist()
        return [{int(r): [v, w] for rank in ranks for r, v, w in rank[row] if r >= 0} for row in range(len(local))]

    def _agree(self, mine: list[Series], known: dict[str, Series], absent: bool) -> list[Series]:
        """Return what all ranks logged; this one may have logged less if it had not its share of batches (`absent`).

        What it lacks is added to the `known` series of the stage.

        Raises DisagreementError, naming ranks and names, where ranks that had their share logged different names.
        """
        if self.processes == 1:
            return mine
        names = [series.name for series in mine]
        key = int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:7], "little")
        sent = [-1, -(2**60), 1] if absent else [key, -key, 0]
        highest, lowest, some_absent = self.collectives.all_reduce(torch.tensor(sent), "max").tolist()
        if highest == -lowest and not some_absent:
            return mine
        gathered = self.collectives.gather_objects((absent, [self._describe(series) for series in mine]))
        whole = [own for is_absent, own in gathered if not is_absent] or [own for _, own in gathered]
        chosen = {name: rest for own in whole for name, *rest in own}
        logged = [[name for name, *_ in own] for _, own in gathered]
        odd = {
            rank
            for rank, (is_absent, _) in enumerate(gathered)
            if (not is_absent and logged[rank] != list(chosen)) or set(logged[rank]) - chosen.keys()
        }
        if odd:
            compared = {rank: own for rank, own in enumerate(logged) if rank in odd or not gathered[rank][0]}
            raise DisagreementError(self._disagreement(compared))
        for name, rest in chosen.items():
            if name not in known:
                known[name] = self._series_of([name, *rest])
        return [known[name] for name in chosen]

    def _describe(self, series: Series) -> list[Any]:
        path = self.states.path_of(series.metric)
        return [series.name, series.kind, series.on_step, series.on_epoch, series.prog_bar, series.to_loggers, path]

    def _series_of(self, description: list[Any]) -> Series:
        """Return an empty series as `_describe` described it."""
        name, kind, on_step, on_epoch, prog_bar, to_loggers, path = description
        return Series(name, kind, on_step, on_epoch, prog_bar, to_loggers, self.states.by_path.get(path))

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
    def rewind(self, step: int) -> None:
        """Drop what was logged in `step` and later, which will be done again, and stand where the step before ended."""
        self.pending = [item for item in self.pending if item[4] < step]
        self.losses = [item for item in self.losses if item[1] < step]
        self.step, self.suffix, self.incomplete = step - 1 if step else -2, "", True
        self.open("train", fresh=False)

    def forget_epoch(self) -> None:
        """Drop all sums of the training epoch: it is done, or begins anew."""
        metrics = [series.metric for series in self.stages["train"].values() if series.metric is not None]
        self.states.forget(metrics)
        for metric in metrics:
            metric.reset()
        self.open("train")

    def take_replicas(self, processes: int, replicas: range) -> None:
        """From now on the replicas of this process are these."""
        self.processes, self.states.replicas = processes, list(replicas)
        self.first_replica = self.replica = replicas.start

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the training epoch's sums so far, over all ranks; every rank calls it."""
        self.flush()
        known = self.stages.setdefault("train", {})
        own = [series for series in known.values() if series.on_epoch and not series.alone]
        series = self._agree(own, known, absent=not own or self.incomplete)
        gathered = self.collectives.gather_objects([one.sums for one in series])
        return {
            "series": [
                {
                    "description": self._describe(one),
                    "sums": [[replica, *sums[index][replica]] for sums in gathered for replica in sorted(sums[index])],
                }
                for index, one in enumerate(series)
            ],
            "states": self.states.gather([one.metric for one in series if one.metric is not None], self.collectives),
            "incomplete": self.incomplete,
        }

    def load_state_dict(self, state: dict[str, Any], replicas: Iterable[int]) -> None:
        """Take over the sums of `replicas`, this process's own."""
        owned, known = set(replicas), self.stages.get("train", {})
        self.incomplete = state["incomplete"]
        self.stages["train"] = {name: series for name, series in known.items() if series.alone or not series.on_epoch}
        for saved in state["series"]:
            name = saved["description"][0]
            series = self.stages["train"][name] = known.get(name) or self._series_of(saved["description"])
            series.sums = {
                int(replica): [value, weight] for replica, value, weight in saved["sums"] if replica in owned
            }
        plain = [series for series in self.stages["train"].values() if series.metric is None]
        # 0: the replicas that are this process's now had no batch in the epoch so far
        self.turns["train"] = sum(bool(series.sums) for series in plain) if plain else len(state["series"])
        self.states.load(state["states"])
