"""Support for requeued SLURM jobs. As in Lightning, fit resumes from the checkpoint saved after the signal."""

from pathlib import Path
from typing import Any

from ...base.environment import requeued_job, slurm_job
from ...base.place import find_place


def is_requeued_by_default() -> bool:
    """Return whether srun started this process. By default, Lightning's Trainer requeues jobs started by srun."""
    place = find_place()
    return place is not None and place.origin == "slurm"


def store_checkpoint(root: Any, path: Any) -> None:
    """Store the path of the checkpoint that this SLURM job will resume from after being requeued."""
    if slurm_job() is not None:
        _note(root).write_text(str(Path(path).absolute()))


def stored_checkpoint(root: Any) -> str | None:
    """Return the checkpoint path stored for this SLURM job if the job was requeued, otherwise None."""
    return _note(root).read_text() if requeued_job() is not None and _note(root).exists() else None


def forget_checkpoint(root: Any) -> None:
    """Delete the stored path so that later fit calls in the script do not resume from it."""
    _note(root).unlink(missing_ok=True)


def _note(root: Any) -> Path:
    return Path(root) / f".requeued-{slurm_job()}"
