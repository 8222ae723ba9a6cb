"""Exchange: how the ranks give each other what they logged, in one collective unless a name is new.

Each rank sends rows of numbers, and what else it has to say. A series is named by its number in a list that all ranks
have alike; one that is not in it yet travels with its description in another collective, once in a run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .series import Description, Series

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


class Collectives(Protocol):
    """The part of a strategy that metrics need."""

    def all_gather(self, tensor: Tensor) -> Tensor: ...  # noqa: D102
    def gather_objects(self, value: Any) -> list[Any]: ...  # noqa: D102
    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor: ...  # noqa: D102


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
            return [_read(rank, start) for rank in ranks], heard
        own = [(row[0].description, *row[1:]) for row in rows]
        gathered = self.collectives.gather_objects(own)
        for description in (row[0] for rank in gathered for row in rank):
            if description not in self.numbers:
                self.numbers[description] = len(self.descriptions)
                self.descriptions.append(description)
        if most > self.rows:
            self.rows = 2 * most
        return [[(self.numbers[row[0]], *row[1:]) for row in rank] for rank in gathered], heard


def _read(sent: list[float], start: int) -> list[tuple[int, int, float, float, int]]:
    stop = start + _WIDTH * int(sent[0])
    columns = [sent[start + column : stop : _WIDTH] for column in range(_WIDTH)]
    numbers, replicas, values, weights, steps = columns
    return list(zip(map(int, numbers), map(int, replicas), values, weights, map(int, steps), strict=True))
