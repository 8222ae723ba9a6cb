"""The input of one optimizer step, and the settings that determine how batches are assigned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .sampling import Layout


# slots, as there is one object per batch
@dataclass(slots=True)
class ReplicaBatch:
    """One batch of one local replica."""

    replica: int
    batch_idx: int
    """Number of the batch's round within the epoch, which is the same for all replicas in that round."""
    batch: Any
    samples: int
    dataloader_idx: int = 0
    masked: bool = False
    """Whether the batch belongs to another process and runs only to stay in lockstep. Its results are discarded."""
    place: tuple[Any, int, int] | None = None
    """The epoch's order and the batch's positions [start, stop) in it, or None if the data has no positions."""

    @property
    def indices_by_loader(self) -> dict[str, list[Any]] | None:
        """The dataset indices of the batch's samples, keyed by loader name. A single loader's name is "".

        None if the data has no positions, as with streams.
        """
        if self.place is None:
            return None
        order, start, stop = self.place
        return {name: indices for name, part in order.by_loader().items() if (indices := part.indices(start, stop))}

    @property
    def indices(self) -> list[Any] | None:
        """The dataset indices of a single loader's batch, or None if there are multiple loaders or no positions."""
        by_loader = self.indices_by_loader
        return None if by_loader is None else by_loader.get("")


@dataclass(slots=True)
class StepInput:
    """The batches that this process runs in one optimizer step, ordered by replica."""

    batches: list[ReplicaBatch]
    samples: int
    """Number of samples in the step across all replicas. If it is 0, all are left out, and nothing is computed."""
    rounds: int
    """Number of batches per replica in the step."""
    is_full: bool = True
    """Whether every replica has a batch in every round."""
    masked: Sequence[ReplicaBatch] = ()
    """Masked batches, added so that this process runs as many batches as any other; see `Dealing.lockstep`."""


@dataclass(frozen=True)
class Dealing:
    """Settings that determine how batches are assigned to replicas.

    Within a run, only `process` and the number of processes may change.
    """

    layout: Layout
    process: int
    accumulate: int = 1
    seed: int = 0
    full_rounds: bool = False
    """Whether to drop a round if any replica has no batch in it."""
    keyed: bool = True
    """Whether to key the random numbers of each batch's loading; False with `reproducible: off`."""
    lockstep: bool = False
    """Whether all processes run the same number of batches per step, adding masked batches if needed."""
    loader_options: Mapping[str, Any] | None = None
    """Options that override those of the user's DataLoaders."""
    padded: bool = False
    """Whether the last round repeats the epoch's first samples until all replicas have the same number of samples."""
    left_out: frozenset[int] = frozenset()
    """Dataset indices to leave out of all batches. Positions stay the same, and batches shrink."""

    @property
    def replicas(self) -> range:
        """The replicas that this process runs."""
        return self.layout.owned(self.process)

    @property
    def leaders(self) -> list[range]:
        """Blocks of other processes' replicas that may have the most batches in a step; empty unless in `lockstep`."""
        # process 0 has the longest block of replicas, but with samples left out, not always the most batches
        processes = range(self.layout.processes if self.left_out else 1) if self.lockstep else ()
        return [self.layout.owned(process) for process in processes if process != self.process]


def apply_limit(limit: int | float, count: int | None) -> int | None:
    """Return how many of `count` batches remain under a limit, which is a number (int) or a fraction (float).

    For both `count` and the result, None means that the number is unknown.
    """
    # 1 is one batch, 1.0 is all of them
    if isinstance(limit, float):
        return None if count is None else int(count * limit)
    return limit if count is None else min(limit, count)
