"""State: the progress of a run, as stored in checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..base.errors import CheckpointError


@dataclass
class State:
    """Progress of a run. Checkpoints store all of its fields, none of which depends on the number of processes."""

    replicas: int = 1
    """Number of logical data-parallel workers, fixed when the run started."""
    seed: int = 0
    """Seed of the run's random numbers."""
    global_step: int = 0
    """Number of optimizer steps completed."""
    epoch: int = 0
    """Index of the current epoch; between epochs, of the next one."""
    epoch_steps: int = 0
    """Number of optimizer steps completed in this epoch: the position from which a resumed run continues."""
    epoch_rounds: int = 0
    """Number of batches that each replica has trained on in this epoch."""
    rounds: int = 0
    """Number of batches that each replica has trained on in this run."""
    samples_seen: int = 0
    """Number of training samples seen so far in this run, across all replicas."""
    elapsed: float = 0.0
    """Elapsed time of the run in seconds, across all resumes, as agreed by the ranks."""
    epoch_ended: bool = False
    """True after `epoch` ends and before it is counted, so that a checkpoint in between ends it only once."""
    logged_at: int = -1
    """The step of the latest logging point, or -1 if there is none yet."""
    skipped_steps: int = 0
    """Number of steps whose update was skipped because the gradient was not finite."""
    skipped_in_a_row: int = 0
    """Number of consecutive skipped steps up to the current step."""
    optimizer_steps: int = 0
    """Number of calls to an optimizer's `step` under manual optimization."""
    validated_at: int = -1
    """The step after which the latest complete validation ran, or -1 if there is none yet."""
    scheduled_epochs: int = 0
    """Number of epochs for which the epoch-interval schedulers that need no metric have been advanced."""
    plateau_step: int = 0
    """The latest step after which a step-interval ReduceLROnPlateau stepped."""
    weight_scale: float = 0.0
    """The power of two that scales the batch weights returned by training_step, or 0 if none has been returned yet."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "State":
        """Create a State from a dict. Raises CheckpointError if a field is missing or of the wrong type."""
        defaults = {item.name: getattr(cls(), item.name) for item in fields(cls)}
        missing = sorted(defaults.keys() - values.keys())
        if missing:
            raise CheckpointError(f"The checkpoint's state has no {', '.join(missing)}, so it is not a Legato state.")
        for name in defaults:
            # isinstance(True, int) holds, and JSON may store a float as an int
            kind = type(defaults[name])
            if isinstance(values[name], bool) != (kind is bool) or not isinstance(values[name], (int, kind)):
                raise CheckpointError(f"state.{name} must be {kind.__name__}, got {values[name]!r}.")
        return cls(**{name: values[name] for name in defaults})  # ignores fields that a later version added
