"""The input of one optimizer step, and the settings by which batches are dealt out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .sampling import Layout


# with slots: one is made for each batch
@dataclass(slots=True)
class ReplicaBatch:
    """One batch of one local replica."""

    replica: int
    batch_idx: int
    """The round of the epoch, shared by the batches of all replicas in that round."""
    batch: Any
    samples: int
    dataloader_idx: int = 0
    masked: bool = False
    """Whether the batch belongs to another process and is run only to keep lockstep; its results are discarded."""
    place: tuple[Any, int, int] | None = None
    """The epoch's order and the positions [start, stop) of the batch in it; None where the data has no positions."""

    @property
    def indices_by_loader(self) -> dict[str, list[Any]] | None:
        """The dataset indices of the batch's samples, by the name of the loader: "" where there is one.

        None where the data has no positions, as in streams.
        """
        if self.place is None:
            return None
        order, start, stop = self.place
        return {name: indices for name, own in order.by_loader().items() if (indices := own.indices(start, stop))}

    @property
    def indices(self) -> list[Any] | None:
        """The same where there is one loader; None where there are several."""
        by_loader = self.indices_by_loader
        return None if by_loader is None else by_loader.get("")


@dataclass(slots=True)
class StepInput:
    """The batches that this process runs in one optimizer step, ordered by replica."""

    batches: list[ReplicaBatch]
    samples: int
    """Samples of the step over all replicas of the run; 0 where all are left out, and nothing is computed."""
    rounds: int
    """Batches of each replica in the step."""
    whole: bool = True
    """Whether every replica has a batch in every round."""
    masked: Sequence[ReplicaBatch] = ()
    """Masked batches that fill up to the largest number of any process; see `Dealing.lockstep`."""


@dataclass(frozen=True)
class Dealing:
    """Settings by which batches are dealt out; only `process` and the number of processes may change in a run."""

    layout: Layout
    process: int
    accumulate: int = 1
    seed: int = 0
    whole_rounds: bool = False
    """Whether to drop a round in which some replica has no batch."""
    keyed: bool = True
    """Whether each batch is loaded under its own random numbers; False with `reproducible: off`."""
    lockstep: bool = False
    """Whether all processes run equally many batches in a step, padding with masked ones."""
    loader_options: Mapping[str, Any] | None = None
    """Options of DataLoaders, instead of their own."""
    padded: bool = False
    """Whether an epoch's last round repeats its first samples until every replica has equally many."""
    left_out: frozenset[int] = frozenset()
    """Dataset indices that are in no batch: positions stay, and batches shrink."""

    @property
    def replicas(self) -> range:
        """The replicas of this process."""
        return self.layout.owned(self.process)

    @property
    def leaders(self) -> list[range]:
        """In lockstep the replicas of each other process that may have the most batches of a step."""
        # process 0 has the longest block of replicas, but not always the most batches where samples are left out
        processes = range(self.layout.processes if self.left_out else 1) if self.lockstep else ()
        return [self.layout.owned(process) for process in processes if process != self.process]


def apply_limit(limit: int | float, count: int | None) -> int | None:
    """Return how many of `count` batches remain under a limit given as a count (int) or a fraction (float).

    None is a count that is not known.
    """
    # 1 is one batch, 1.0 is all of them
    if isinstance(limit, float):
        return None if count is None else int(count * limit)
    return limit if count is None else min(limit, count)
