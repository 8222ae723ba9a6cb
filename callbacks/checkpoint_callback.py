"""CheckpointCallback: the base class for callbacks that save checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING

from .callback import MonitoringCallback

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class CheckpointCallback(MonitoringCallback):
    """Base class for callbacks that save checkpoints. Their hooks run last.

    If you pass such a callback, the trainer does not add its default Checkpoint callback. The properties below return
    the paths of the checkpoints that are kept. Subclasses don't have to override them.
    """

    dirpath: Path | str | None = None
    """Folder of the checkpoints, or None before the run starts and in runs that write nothing."""
    save_weights_only = False

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, or ""."""
        return ""

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint, or ""."""
        return ""

    @property
    def is_elsewhere(self) -> bool:
        """Whether checkpoints are saved in a folder outside the run directory."""
        return False

    def find_folder(self, trainer: "Trainer") -> None:
        """Set `dirpath` for this run."""

    def save_cut_epoch(self, trainer: "Trainer") -> None:
        """Save before the last validation run if training stops mid-epoch. Every rank must call this method."""

    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Save the current state. If `always` is true, save even if the checkpoint would not be kept.

        Every rank must call this method.
        """
