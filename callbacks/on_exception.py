"""OnExceptionCheckpoint: saves a checkpoint when an exception ends the run."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..base.checkpoint_index import is_name
from ..base.errors import ConfigError
from ..base.location import to_absolute, to_location
from .checkpoint_callback import CheckpointCallback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer


class OnExceptionCheckpoint(CheckpointCallback):
    """Saves the last completed step to `dirpath/filename` when an exception ends a single-process run.

    With multiple processes, it saves nothing, because other ranks may be dead or waiting in a collective.

    Args:
        dirpath: Folder to save to.
        filename: Name of the checkpoint in that folder.

    Raises ConfigError if `filename` is not a valid folder name.
    """

    file_extension = ""
    """Suffix of `filename`."""

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename or not is_name(filename):
            raise ConfigError(f"OnExceptionCheckpoint: filename must be a folder name without '/', got {filename!r}.")
        self.dirpath, self.filename = to_absolute(dirpath), filename

    @property
    def is_elsewhere(self) -> bool:
        """True, because `dirpath` is required."""
        return True

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint."""
        return str(to_absolute(self.dirpath or "") / (self.filename + self.file_extension))

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Save the run."""
        # with multiple processes the saver writes nothing: the others may be dead or waiting in a collective
        if not trainer.fast_dev_run:
            trainer.saver.save_after_error(to_location(self.ckpt_path))
