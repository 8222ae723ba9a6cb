"""The interface to elastic runs, with no-op implementations for runs whose processes stay the same."""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..metrics.log import Metrics
from ..processes.ranks import SINGLE

if TYPE_CHECKING:
    from ...base.contracts import Task, Trainer
    from ..processes.place import Place

T = TypeVar("T")


class RunFinished(Exception):
    """Raised in a process that waited to join a run which has ended."""


class Membership:
    """Membership in a run with fixed processes; ElasticMembership overrides it."""

    changes = False
    """Whether processes may leave and join while the run trains."""
    open_outputs: Callable[[Any], None] | None = None
    """Opens the loggers of a Run; set-up gives it, for a process that becomes rank 0 when the one before is gone."""

    def connect(self, place: "Place") -> "Place":
        """Form the process group; return this process's place in it."""
        return place

    def adopt_settings(self) -> None:
        """Take the settings of the run to join, before anything is set up."""

    def check_members(self) -> None:
        """Leave the loop if the ranks have agreed on a newer generation."""

    def returns_result(self, rank: int) -> bool:
        """Return whether this process returns the run's result to the launcher."""
        return rank == 0

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None


class Elasticity:
    """Interface of a strategy for processes that leave or join while a run trains. In this base class none do."""

    changes = False
    """Whether processes may leave and join."""

    def for_stage(self, stage: str) -> "Elasticity":
        """Return what holds in "fit", "validate", "test" or "predict"."""
        return self

    def refuse(self, reason: str) -> None:
        """Raise ConfigError, with the reason, where processes may leave and join."""

    def make_metrics(self, task: "Task") -> Metrics:
        """Return the collector of the values that a run logs."""
        return Metrics(SINGLE, 1, task)

    def membership(self, trainer: "Trainer") -> Membership:
        """Return this process's membership in a run."""
        return Membership()

    def launch(self, function: Callable[[], T], processes: int, *, nodes: int, max_restarts: int) -> T:
        """Call `function` in new processes, `processes` on each node; return what rank 0 returned."""
        from ..processes.launch import run_workers  # here: only a process that starts others needs it

        return run_workers(function, processes, max_restarts=max_restarts, nodes=nodes)
