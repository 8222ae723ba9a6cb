"""ModelCheckpoint, with Lightning's arguments and file names."""

from ....callbacks.checkpoint import Checkpoint


class ModelCheckpoint(Checkpoint):
    """A Checkpoint under Lightning's name."""
