"""The input of one optimizer step, and what a process must know to take its part of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .sampling import Layout


@dataclass(slots=True)
class ReplicaBatch:
    """One batch of one local replica."""

    replica: int
    batch_idx: int
    """The round of the epoch: the same for the batches of all replicas that belong together."""
    batch: Any
    samples: int
    dataloader_idx: int = 0
    masked: bool = False
    """Whether it is another process's batch, taken along in lockstep, whose results do not count."""


@dataclass(slots=True)
class StepInput:
    """What this process does in one optimizer step: its turns, replica by replica."""

    turns: list[ReplicaBatch]
    samples: int
    """Samples of the step over all replicas of the run."""
    rounds: int
    """Batches that each replica has in the step."""
    whole: bool = True
    """Whether every replica has a batch in each of its rounds."""
    masked: Sequence[ReplicaBatch] = ()
    """Turns that do not count, up to as many as the process with most has: see `Dealing.lockstep`."""


@dataclass(frozen=True)
class Dealing:
    """How batches are shared out: fixed for a run, but for `process` and `processes`."""

    layout: Layout
    process: int
    accumulate: int = 1
    seed: int = 0
    whole_rounds: bool = False
    """Whether a round in which some replica has no batch is left out."""
    keyed: bool = True
    """Whether each batch is loaded under random numbers of its own: unless `reproducible` is "off"."""
    lockstep: bool = False
    """Whether all processes take equally many turns in a step, those that have fewer batches some masked ones."""

    @property
    def replicas(self) -> range:
        """The replicas of this process."""
        return self.layout.owned(self.process)

    @property
    def leaders(self) -> range | None:
        """In lockstep the replicas of process 0, which has the most batches of every step."""
        return self.layout.owned(0) if self.lockstep and self.process else None


def limited(limit: int | float, count: int) -> int:
    """Return how many of `count` batches a limit leaves: a count (int), or a fraction of them (float)."""
    if isinstance(limit, float):
        if not 0.0 <= limit <= 1.0:
            raise ConfigError(f"A limit on batches is a count (int) or a fraction from 0.0 to 1.0, got {limit}.")
        return int(count * limit)
    return min(limit, count)
