"""Exceptions that programs written for Lightning raise and catch."""

from ...trainer.errors import LegatoError

MisconfigurationException = LegatoError
"""The base of Legato's errors, so that `except MisconfigurationException` catches each of them."""


class SIGTERMException(SystemExit):
    """The end of a process that was told to terminate."""


class TunerExitException(Exception):
    """Ends the run of a finder of batch size or learning rate."""
