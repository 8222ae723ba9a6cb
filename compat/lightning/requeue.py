"""A job that SLURM queues again: its fit resumes from what the job saved when it was told to end, as in Lightning."""

from pathlib import Path
from typing import Any

from ...base.environment import requeued_job, slurm_job
from ...base.place import find_place


def is_requeued_by_default() -> bool:
    """Return whether this process was started by srun: then Lightning's trainer requeues its job."""
    place = find_place()
    return place is not None and place.origin == "slurm"


def note_checkpoint(root: Any, path: Any) -> None:
    """Note the checkpoint from which this SLURM job is to go on when it is queued again."""
    if slurm_job() is not None:
        _note(root).write_text(str(Path(path).absolute()))


def noted_checkpoint(root: Any) -> str | None:
    """Return the checkpoint that this SLURM job has noted, if it was queued again."""
    return _note(root).read_text() if requeued_job() is not None and _note(root).exists() else None


def forget_checkpoint(root: Any) -> None:
    """Delete the note, for the fits that a script makes afterwards."""
    _note(root).unlink(missing_ok=True)


def _note(root: Any) -> Path:
    return Path(root) / f".requeued-{slurm_job()}"
