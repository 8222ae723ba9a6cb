"""CheckpointCallback: base of callbacks that save checkpoints, with what the trainer asks of one."""

from pathlib import Path
from typing import TYPE_CHECKING

from .callback import MonitoringCallback

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class CheckpointCallback(MonitoringCallback):
    """Base class of callbacks that save checkpoints.

    Their hooks are called last of all. The trainer leaves its own Checkpoint callback out if one of them is given, and
    asks them for the paths of the checkpoints that they keep. A subclass that only overrides hooks works too.
    """

    dirpath: Path | str | None = None
    """Folder of its checkpoints; None: not known yet, or the run writes nothing."""
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
        """Whether it saves to a given folder instead of the run directory."""
        return False

    def find_folder(self, trainer: "Trainer") -> None:
        """Set `dirpath` for this run."""

    def save_cut_epoch(self, trainer: "Trainer") -> None:
        """Save before the validation of a run that was asked to stop within an epoch. Every rank calls it."""

    def save(self, trainer: "Trainer", always: bool = False) -> None:
        """Write the current state; `always`: even if it would not be kept. Every rank calls it."""
