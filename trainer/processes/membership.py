"""A process's membership in a run. `elastic/` contains the variant for runs whose processes may die and be replaced."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...base.place import Place


class RunFinished(Exception):
    """Raised in a process that is still waiting to join a run when the run ends."""


class Membership:
    """Membership in a run with a fixed set of processes. ElasticMembership overrides its methods."""

    open_outputs: Callable[[Any], None] | None = None
    """Opens the loggers of a Run. Set during setup, for a process that becomes rank 0 after the previous one leaves."""

    def connect(self, place: Place) -> Place:
        """Form the process group and return this process's rank and node as a `Place`."""
        return place

    def adopt_settings(self) -> None:
        """Before setup, adopt the settings of the run this process is joining."""

    def check_members(self) -> None:
        """Leave the training loop if the ranks have agreed on a new generation of processes."""

    def returns_result(self, rank: int) -> bool:
        """Return whether this process returns the run's result to the launcher."""
        return rank == 0

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None
