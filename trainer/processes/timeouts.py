"""How long ranks wait for each other, by what the run is doing: starting up, training, or writing a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from ..errors import ConfigError, did_you_mean

Phase = Literal["startup", "step", "checkpoint"]
Timeout = float | Mapping[Phase, float]
"""Seconds; one number for all phases, or one for each."""
PHASES: tuple[Phase, ...] = ("startup", "step", "checkpoint")
DEFAULT = 1800.0
"""Seconds for a phase of which nothing is said; torch's own default."""


class Timeouts:
    """The limit of each phase, and which of them holds now.

    `startup` lasts from the meeting of the ranks to the first step, which compiles kernels and fills loaders; `step` is
    training with its validations; `checkpoint` is the writing of one, during which other ranks wait for rank 0.
    """

    def __init__(self, wanted: Timeout) -> None:
        """Raises ConfigError for a phase that there is not, and for what is no positive number."""
        given: Mapping[Phase, float] = wanted if isinstance(wanted, Mapping) else dict.fromkeys(PHASES, wanted)
        for phase, seconds in given.items():
            if phase not in PHASES:
                raise ConfigError(
                    f"timeout has no phase {phase!r}: expected seconds, or a mapping of {', '.join(PHASES)}."
                    f"{did_you_mean(str(phase), PHASES)}"
                )
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
                place = f"timeout.{phase}" if isinstance(wanted, Mapping) else "timeout"
                raise ConfigError(f"{place}={seconds!r}: expected a positive number of seconds.")
        self.limits = {phase: timedelta(seconds=given.get(phase, DEFAULT)) for phase in PHASES}
        self.phase: Phase = "startup"

    def __getitem__(self, phase: Phase) -> timedelta:
        return self.limits[phase]

    def enter(self, phase: Phase) -> None:
        """Let the limit of `phase` hold, for every process group, from the next collective on."""
        from torch import distributed

        from ..torch_private import set_group_timeouts

        changes, self.phase = self.limits[phase] != self.limits[self.phase], phase
        if changes and distributed.is_initialized():
            set_group_timeouts(self.limits[phase])

    def end_startup(self) -> None:
        """Let the limit of steps hold where that of start-up does; within a save that of saves stays."""
        if self.phase == "startup":
            self.enter("step")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Let the limit of `phase` hold for this context."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
