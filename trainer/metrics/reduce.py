"""Series of logged values: accumulation per replica, reduction over replicas, and exchange between ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...base.errors import TaskError, did_you_mean
from ..processes.ranks import Ranks

KINDS = ("mean", "sum", "min", "max")
# Separator between a name and the index of its evaluation loader
LOADER_MARK = "/dataloader_idx_"
# Kinds averaged over the batches of a step; the epoch's value of a "metric" is the result of its `compute`
AVERAGED = ("mean", "metric")
# Kind of a sum that hooks log once per step or epoch: all processes log the same values, and one process's are counted
ONCE = "once"


# The attributes of a series that ranks exchange, in the order of its arguments
Description = tuple[Any, ...]
# Added to the names of series logged between steps, because a series logged within steps may have the same name
BETWEEN_STEPS = "\n"


@dataclass(slots=True, eq=False)
class Series:
    """The values logged under one name in one stage."""

    name: str
    kind: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    to_loggers: bool
    path: str | None = None
    """Path of the metric's module in the task."""
    alone: bool = False
    """Whether only replica 0 logs the series (`rank_zero_only`), for loggers but not for `callback_metrics`."""
    in_step: bool = True
    metric: Any = None
    """The logged torchmetrics.Metric, if any."""
    value: float = float("nan")
    """The metric's most recently computed value."""
    read_at: int = -1
    """The metric's number of updates when `value` was computed."""
    sums: dict[int, list[float]] = field(default_factory=dict)
    """(weighted value, weight) of the epoch so far, keyed by replica."""
    step: dict[int, list[float]] = field(default_factory=dict)
    """(weighted value, weight) of the step `step_at`, keyed by replica."""
    step_at: int = -1
    synced: bool = False
    """Whether the series was logged with `sync_dist`, so that a process never shows only its local value."""
    keeps_sums: bool = False
    """Whether to keep `sums`, for values per epoch and for the progress bar's running means."""

    def __post_init__(self) -> None:
        self.keeps_sums = self.kind != "metric" and (self.on_epoch or self.prog_bar)

    @property
    def description(self) -> Description:
        """The attributes from which another rank or a resumed run can recreate this series."""
        flags = self.on_step, self.on_epoch, self.prog_bar, self.to_loggers
        return (self.name, self.kind, *flags, self.path, self.alone, self.in_step)


def key_of(name: str, in_step: bool) -> str:
    """Return the key of a series: a string, because hashing a tuple would take half as long as an entire `log` call."""
    return name if in_step else name + BETWEEN_STEPS


@dataclass
class Reduced:
    """Values at a logging point, which are the same on every rank."""

    all: dict[str, float] = field(default_factory=dict)
    """Values for `trainer.callback_metrics`."""
    alone: dict[str, float] = field(default_factory=dict)
    """Values with `rank_zero_only`, which exist on rank 0 only."""
    loggers: dict[str, float] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all values as tensors, as in `trainer.callback_metrics`."""
        return {name: torch.tensor(value) for name, value in self.all.items()}


def to_floats(values: Sequence[Any]) -> list[float]:
    """Convert numbers and one-value tensors to floats, with one transfer per device and dtype."""
    out: list[float] = [0.0] * len(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and not value.is_cpu:
            groups.setdefault((value.device, value.dtype), []).append(index)
        else:
            out[index] = float(value)  # a CPU value needs no sync, and stacking would take 3 us per value
    for indices in groups.values():
        for index, number in zip(indices, torch.stack([values[i].reshape(()) for i in indices]).tolist(), strict=True):
            out[index] = float(number)
    return out


def read_kind(reduce_fx: str | Callable[..., Any], name: str) -> str:
    """Return the member of KINDS for `reduce_fx`, given as a name or as the torch or Python function with that name."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    kind = {"avg": "mean", "amin": "min", "amax": "max"}.get(kind.lower(), kind.lower())
    if kind not in KINDS:
        raise TaskError(
            f"log({name!r}, reduce_fx={reduce_fx!r}): expected one of {KINDS}, or the torch or Python function of "
            f"the same name.{did_you_mean(str(kind), KINDS)} For another reduction, log a torchmetrics.Metric."
        )
    return kind


def accumulate(sums: dict[int, list[float]], replica: int, kind: str, value: float, weight: float) -> None:
    """Add a value to the sums of its replica."""
    if kind in AVERAGED:
        value *= weight
    entry = sums.get(replica)
    if entry is None:
        sums[replica] = [value, weight]
        return
    entry[0] = extreme(kind, (entry[0], value)) if kind in ("min", "max") else entry[0] + value
    entry[1] += weight


def extreme(kind: str, values: Sequence[float]) -> float:
    """Return the minimum or maximum, or NaN if any value is NaN, as in torch."""
    # whether Python's min and max return a NaN depends on its position, that is, on the replicas
    if any(map(math.isnan, values)):
        return math.nan
    return min(values) if kind == "min" else max(values)


def total(kind: str, sums: dict[int, list[float]]) -> float:
    """Reduce sums across replicas, in replica order."""
    entries = [sums[replica] for replica in sorted(sums)]  # a fixed order: float addition is not associative
    values = [value for value, _ in entries]
    if kind in AVERAGED:
        value, weight = entries[0] if entries else (0.0, 0.0)
        if weight and entries.count(entries[0]) == len(entries):
            return value / weight  # equal entries, as from epoch hooks: rounding must not depend on the processes
        weight = sum(weight for _, weight in entries)
        return sum(values) / weight if weight else float("nan")
    if kind == ONCE:
        return values[0]
    return sum(values) if kind == "sum" else extreme(kind, values)


def sort_out(values: Iterable[tuple[Series, float]], suffix: str) -> Reduced:
    """Name the values and group them by destination.

    If a series has both per-step and per-epoch values, `suffix` is added to its name to distinguish them.
    """
    reduced = Reduced()
    for series, value in values:
        name = shown = series.name
        if series.on_step and series.on_epoch:
            base, mark, loader = name.partition(LOADER_MARK)
            name = base + suffix + mark + loader
        metrics = reduced.alone if series.alone else reduced.all
        metrics[name] = metrics[shown] = value
        if series.to_loggers:
            reduced.loggers[name] = value
        if series.prog_bar:
            reduced.progress_bar[name] = value
    return reduced


def by_loader(
    metrics: Mapping[str, Any], loaders: int, owners: Mapping[str, set[int]] | None = None
) -> list[dict[str, float]]:
    """Split an evaluation's metrics into one dict per loader. Metrics that belong to no loader appear in every dict.

    Args:
        owners: for each name logged without a loader index, the loaders that logged it.
    """
    marks = [f"{LOADER_MARK}{index}" for index in range(loaders)]
    dicts: list[dict[str, float]] = [{} for _ in marks]
    for name, value in metrics.items():
        marked = [index for index, mark in enumerate(marks) if name.endswith(mark)]
        base = name if owners is None or name in owners else name.removesuffix("_epoch")
        for index in marked or (owners or {}).get(base) or range(loaders):
            dicts[index][name] = float(value)
    return dicts


# Replica number of a row without values, which only shows that its series was logged
NAME_ONLY = -1
# Initial number of rows in the buffer; if a rank needs more, it grows to twice that number
ROWS = 16
_HEADER, _WIDTH = 2, 5


# One value of a series, or one replica's sums: series, replica, value, weight, step
Row = tuple[Series, int, float, float, int]


class Exchange:
    """Exchanges rows among all ranks in a single all_gather, with a number identifying each series.

    If there is a new series, or more rows than fit, the ranks first exchange pickled descriptions. All ranks must call
    this.
    """

    def __init__(self, collectives: Ranks) -> None:
        self.collectives = collectives
        self.numbers: dict[Description, int] = {}
        self.rows = ROWS

    @property
    def descriptions(self) -> list[Description]:
        """The descriptions of all series, ordered by series number."""
        return list(self.numbers)

    def gather(
        self, rows: Sequence[Row], extra: Sequence[float]
    ) -> tuple[list[list[tuple[int, int, float, float, int]]], list[list[float]]]:
        """Return every rank's rows, with series numbers that all ranks agree on, and every rank's `extra`.

        `extra` must have the same length on all ranks.
        """
        start = _HEADER + len(extra)
        while True:
            numbers = [self.numbers.get(row[0].description, -1) for row in rows]
            # number of rows, whether a series is new, `extra`, and (number, replica, value, weight, step) per row;
            # all as float64, in which series numbers and steps are exact up to 2^53
            sent = [float(len(rows)), float(-1 in numbers), *extra]
            for number, row in zip(numbers[: self.rows], rows, strict=False):
                sent += (number, *row[1:])
            sent += [0.0] * (start + _WIDTH * self.rows - len(sent))
            ranks = self.collectives.all_gather(torch.tensor(sent, dtype=torch.float64)).tolist()
            most = int(max(rank[0] for rank in ranks))
            if most <= self.rows and not any(rank[1] for rank in ranks):
                return [_unpack_values(rank, start) for rank in ranks], [rank[_HEADER:start] for rank in ranks]
            # all ranks get here together, so all assign the same numbers to new descriptions
            for descriptions in self.collectives.gather_objects([row[0].description for row in rows]):
                for description in descriptions:
                    self.numbers.setdefault(description, len(self.numbers))
            # doubled, so that a run that keeps adding names needs few such exchanges
            self.rows = 2 * most if most > self.rows else self.rows


def _unpack_values(sent: list[float], start: int) -> list[tuple[int, int, float, float, int]]:
    values = iter(sent[start : start + _WIDTH * int(sent[0])])
    rows = zip(*[values] * _WIDTH, strict=True)  # one iterator, so that each row takes the next values
    return [(int(number), int(replica), value, weight, int(step)) for number, replica, value, weight, step in rows]
