"""Loop state of a run, as a checkpoint stores it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..base.errors import CheckpointError


@dataclass
class State:
    """Progress of a run. Saved as it is; nothing in it depends on the number of processes."""

    replicas: int = 1
    """Logical data-parallel workers, fixed when the run began."""
    seed: int = 0
    """Seed, which with config and data determines the run."""
    global_step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """The epoch that is under way, or comes next."""
    epoch_steps: int = 0
    """Optimizer steps done in this epoch: the position from which a resume goes on."""
    epoch_rounds: int = 0
    """Batches that each replica has trained on in this epoch."""
    rounds: int = 0
    """Batches that each replica has trained on in the run."""
    samples_seen: int = 0
    """Samples trained on in the run, over all replicas."""
    elapsed: float = 0.0
    """Seconds that the run has taken so far, over all its resumes, as the ranks agreed."""
    epoch_ended: bool = False
    """Whether all that ends `epoch` is done but for counting on; so that a checkpoint of that moment ends it once."""
    logged_at: int = -1
    """The step of the newest logged point; -1: none yet."""
    skipped_steps: int = 0
    """Steps whose update was dropped since their gradient was not finite."""
    skipped_in_a_row: int = 0
    """Those of them that have followed one another without another step between."""
    optimizer_steps: int = 0
    """Calls of optimizers' `step` in manual optimization."""
    validated_at: int = -1
    """The step after which the newest finished validation ran; -1: none yet."""
    scheduled_epochs: int = 0
    """Epochs for which the schedulers that go by epochs, and by no metric, have stepped."""
    plateau_step: int = 0
    """The newest step after which ReduceLROnPlateau has stepped, where it goes by steps."""
    weight_scale: float = 0.0
    """The power of two by which the weights that training_step returns are multiplied; 0: there were none yet."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "State":
        """Read what `to_dict` wrote. Raises CheckpointError where a field is missing or of the wrong type."""
        known = {one.name: getattr(cls(), one.name) for one in fields(cls)}
        missing = sorted(known.keys() - values.keys())
        if missing:
            raise CheckpointError(f"The checkpoint's state lacks {', '.join(missing)}; it is no Legato training state.")
        for name in known:
            # True is an int for isinstance, and an int may stand for a float in JSON
            kind = type(known[name])
            if isinstance(values[name], bool) != (kind is bool) or not isinstance(values[name], (int, kind)):
                raise CheckpointError(f"state.{name} must be {kind.__name__}, got {values[name]!r}.")
        return cls(**{name: values[name] for name in known})  # passes over fields that a later version has added
