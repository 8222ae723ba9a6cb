"""Series: the values logged under one name, added up by replica, and what becomes of them at a point."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TaskError, did_you_mean
from ..processes.collectives import Collectives

KINDS = ("mean", "sum", "min", "max")
LOADER_MARK = "/dataloader_idx_"
"""Between a name and the index of the loader, where an evaluation has several."""
AVERAGED = ("mean", "metric")
"""A metric's value for one batch is averaged over the batches of a step; its value for an epoch is its own affair."""


Description = tuple[Any, ...]
"""What makes a series, as others are told: name, kind, on_step, on_epoch, prog_bar, to_loggers, path, alone.

`path` is where the task holds its metric, None where it has none.
"""


@dataclass(slots=True)
class Series:
    """The values logged under one name in one stage."""

    name: str
    kind: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    to_loggers: bool
    metric: Any = None
    """The torchmetrics.Metric that was logged, if it was one."""
    value: float = float("nan")
    """What the metric was when it was last read."""
    read_at: int = -1
    """How many updates it had then."""
    sums: dict[int, list[float]] = field(default_factory=dict)
    """For each replica: (weighted) value and weight of the epoch so far."""
    step: dict[int, list[float]] = field(default_factory=dict)
    """The same for one step, `step_at`."""
    step_at: int = -1
    in_step: bool | None = None
    """Whether steps log it, or what is called between them; None where that is not known yet."""
    closing: dict[int, list[float]] = field(default_factory=dict)
    """The same for what hooks at the end of the epoch logged, which counts only if the epoch ends there."""
    alone: bool = False
    """Whether it is replica 0's own affair (`rank_zero_only`): shown, but no metric of the run."""
    description: Description = ()


@dataclass
class Reduced:
    """Values of one point, the same on every rank."""

    all: dict[str, float] = field(default_factory=dict)
    """For `trainer.callback_metrics`."""
    loggers: dict[str, float] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all values as `trainer.callback_metrics` holds them."""
        return {name: torch.tensor(value) for name, value in self.all.items()}


def to_floats(values: list[Any]) -> list[float]:
    """Read numbers and one-value tensors as floats, with one transfer for each device and type."""
    out: list[float] = [0.0] * len(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and not value.is_cpu:
            groups.setdefault((value.device, value.dtype), []).append(index)
        else:
            out[index] = float(value)  # on the CPU there is nothing to wait for, and stacking costs 3 us a value
    for indices in groups.values():
        for index, number in zip(indices, torch.stack([values[i].reshape(()) for i in indices]).tolist(), strict=True):
            out[index] = float(number)
    return out


def read_kind(reduce_fx: str | Callable[..., Any], name: str) -> str:
    """Return which of KINDS `reduce_fx` means: its name, or torch's or Python's function of that name."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    kind = {"avg": "mean", "amin": "min", "amax": "max"}.get(kind, kind)
    if kind not in KINDS:
        raise TaskError(
            f"log({name!r}, reduce_fx={reduce_fx!r}): expected one of {KINDS}.{did_you_mean(str(kind), KINDS)}"
        )
    return kind


def accumulate(sums: dict[int, list[float]], replica: int, kind: str, value: float, weight: float) -> None:
    """Add a value to the sums of its replica."""
    entry = sums.get(replica)
    if entry is None:
        sums[replica] = [value * weight if kind in AVERAGED else value, weight]
        return
    if kind in AVERAGED:
        entry[0] += value * weight
    elif kind == "sum":
        entry[0] += value
    else:
        entry[0] = (min if kind == "min" else max)(entry[0], value)
    entry[1] += weight


def joined(kind: str, sums: dict[int, list[float]], more: dict[int, list[float]]) -> dict[int, list[float]]:
    """Return sums by replica with `more` added to them."""
    if not more:
        return sums
    found = {replica: list(entry) for replica, entry in sums.items()}
    for replica, (value, weight) in more.items():
        entry = found.get(replica)
        if entry is None:
            found[replica] = [value, weight]
        else:
            entry[0] = (
                min(entry[0], value) if kind == "min" else max(entry[0], value) if kind == "max" else entry[0] + value
            )
            entry[1] += weight
    return found


def total(kind: str, sums: dict[int, list[float]]) -> float:
    """Return what the sums of all replicas come to, added up in the order of the replicas."""
    entries = [sums[replica] for replica in sorted(sums)]
    values = [value for value, _ in entries]
    if kind in AVERAGED:
        value, weight = entries[0] if entries else (0.0, 0.0)
        if weight and entries.count(entries[0]) == len(entries):
            return value / weight  # what each process logs alike, as hooks of an epoch do: the same for any number
        weight = sum(weight for _, weight in entries)
        return sum(values) / weight if weight else float("nan")
    if kind == "sum":
        return sum(values)
    return min(values) if kind == "min" else max(values)


def sort_out(found: Iterable[tuple[Series, float]], suffix: str) -> Reduced:
    """Name each value and say who gets it. A series of steps and epochs gives two, `name_step` and `name_epoch`."""
    reduced = Reduced()
    for series, value in found:
        name = series.name
        if series.on_step and series.on_epoch:
            base, mark, loader = name.partition(LOADER_MARK)
            name = base + suffix + mark + loader
        if not series.alone:
            reduced.all[name] = reduced.all[series.name] = value
        if series.to_loggers:
            reduced.loggers[name] = value
        if series.prog_bar:
            reduced.progress_bar[series.name if suffix == "_step" else name] = value
    return reduced


def by_loader(
    metrics: Mapping[str, Any], loaders: int, owners: Mapping[str, set[int]] | None = None
) -> list[dict[str, float]]:
    """Return an evaluation's metrics, one dict for each loader; those of no loader in all of them.

    owners: the loaders that logged a name without their index.
    """
    marks = [f"{LOADER_MARK}{index}" for index in range(loaders)]
    found: list[dict[str, float]] = [{} for _ in marks]
    for name, value in metrics.items():
        marked = [index for index, mark in enumerate(marks) if name.endswith(mark)]
        base = name if owners is None or name in owners else name.removesuffix("_epoch")
        for index in marked or (owners or {}).get(base) or range(loaders):
            found[index][name] = float(value)
    return found


PRESENT = -1
"""In the place of the replica in a row that only says that its series was logged."""
ROWS = 16
"""How many rows a rank may send at first; twice as many as it needed last, when that was too few."""
_HEADER, _WIDTH = 2, 5


class Row(NamedTuple):
    """One value of a series, or what a replica's values come to."""

    series: Series
    replica: int
    value: float
    weight: float
    step: int


class Exchange:
    """Gathers rows of all ranks. Every rank calls it at the same points; an error in it leaves everything as it was."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.descriptions: list[Description] = []
        self.numbers: dict[Description, int] = {}
        self.rows = ROWS

    def reset(self) -> None:
        """Begin anew, with other ranks: who has come knows no numbers."""
        self.descriptions, self.numbers, self.rows = [], {}, ROWS

    def gather(
        self, rows: Sequence[Row], said: Sequence[float]
    ) -> tuple[list[list[tuple[int, int, float, float, int]]], list[list[float]]]:
        """Return every rank's rows, with the numbers of their series, and what each said (equally much on each)."""
        numbers = [self.numbers.get(row[0].description, -1) for row in rows]
        new = -1 in numbers
        sent = [float(len(rows)), float(new), *said]
        if not new and len(rows) <= self.rows:
            for number, row in zip(numbers, rows, strict=True):
                sent += (number, *row[1:])
        start, length = _HEADER + len(said), _HEADER + len(said) + _WIDTH * self.rows
        sent += [0.0] * (length - len(sent))
        ranks = self.collectives.all_gather(torch.tensor(sent, dtype=torch.float64)).tolist()
        heard = [rank[_HEADER:start] for rank in ranks]
        most = int(max(rank[0] for rank in ranks))
        if most <= self.rows and not any(rank[1] for rank in ranks):
            return [_unpack_values(rank, start) for rank in ranks], heard
        own = [(row[0].description, *row[1:]) for row in rows]
        gathered = self.collectives.gather_objects(own)
        for description in (row[0] for rank in gathered for row in rank):
            if description not in self.numbers:
                self.numbers[description] = len(self.descriptions)
                self.descriptions.append(description)
        if most > self.rows:
            self.rows = 2 * most
        return [[(self.numbers[row[0]], *row[1:]) for row in rank] for rank in gathered], heard


def _unpack_values(sent: list[float], start: int) -> list[tuple[int, int, float, float, int]]:
    stop = start + _WIDTH * int(sent[0])
    columns = [sent[start + column : stop : _WIDTH] for column in range(_WIDTH)]
    numbers, replicas, values, weights, steps = columns
    return list(zip(map(int, numbers), map(int, replicas), values, weights, map(int, steps), strict=True))
