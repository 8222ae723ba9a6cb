"""Trainer, with Lightning's arguments and defaults."""

from ...trainer import trainer


class Trainer(trainer.Trainer):
    """A Legato Trainer that takes Lightning's arguments."""
