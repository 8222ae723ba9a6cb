"""Membership in a run whose processes may leave and come while it trains; where they may not, nothing of it acts."""

from types import TracebackType

from ..processes.environment import Place


class RunFinished(Exception):
    """The run is over for a process that waited to take part in it."""


class Membership:
    """Membership in a run whose processes stay the same: nothing happens. elastic.py has the other kind."""

    def connect(self, place: Place) -> Place:
        """Form the group and return this process's place in it."""
        return place

    def adopt_settings(self) -> None:
        """Learn of the run what must be known before anything is built."""

    def newest(self) -> int:
        """Return the version of the newest generation of members."""
        return 0

    def check_members(self, version: int) -> None:
        """Leave the loop where the ranks have agreed that another generation is out."""

    def answers(self, rank: int) -> bool:
        """Return whether this process brings the launcher the result, now that its work is done."""
        return rank == 0

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None
