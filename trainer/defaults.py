"""Choices that a subclass of Trainer may override: state, strategies, callbacks, run directory, points of the log.

A Trainer for programs that were written for another library overrides these; they change nothing by themselves.
"""

from typing import ClassVar

from .view import TrainerView


class TrainerDefaults(TrainerView):
    """The Trainer without its loop; each choice may be overridden."""

    pads_shares: ClassVar[bool] = False
    """Whether an epoch's last round repeats samples rather than leaving a replica with fewer: in training, and in a
    validation or test whose steps call collectives."""

    reads_streams_whole: ClassVar[bool] = False
    """Whether each process trains on all that an IterableDataset gives it, rather than on one batch in turn."""
