"""Monitor: reads and compares one metric, for callbacks that act on it."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..base.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class Monitor:
    """One metric in `trainer.callback_metrics`, and the comparison of its values.

    It detects whether validation or training logs the metric: a value replaced during a validation is validation's.
    Values are the same on every rank, so decisions based on them are too.
    """

    def __init__(self, name: str, mode: Literal["min", "max"], user: str) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"{user}: mode must be 'min' or 'max', got {mode!r}.")
        self.name, self.mode, self.user = name, mode, user
        self.from_validation = False
        self._before: Any = None
        self._validated_step = -1
        self._validated = False

    def reset(self) -> None:
        """Reset the state at the start of a run."""
        self.from_validation, self._validated, self._validated_step = False, False, -1

    def state_dict(self) -> dict[str, Any]:
        """Return whether validation logs the metric, and after which step it last did."""
        return {"from_validation": self.from_validation, "validated_step": self._validated_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of a resumed run."""
        self.from_validation = state_dict["from_validation"]
        self._validated_step = state_dict["validated_step"]

    def start_validation(self, trainer: "Trainer") -> None:
        """Remember the value before a validation."""
        self._before = trainer.agreed_metrics.get(self.name)

    def end_validation(self, trainer: "Trainer") -> bool:
        """Return whether this validation logged the metric."""
        found = trainer.agreed_metrics.get(self.name)
        # by identity: every publish makes new tensors, also of an equal value
        fresh = found is not None and found is not self._before
        self.from_validation |= fresh
        # a sanity check tells who logs the metric, but nothing is decided by its value
        if not trainer.sanity_checking:
            self._validated = True
            self._validated_step = trainer.global_step if fresh else self._validated_step
        self._before = None
        return fresh

    def read(self, trainer: "Trainer") -> float | None:
        """Return the current value; None if there is none or validation measured it at an earlier step."""
        found = trainer.agreed_metrics.get(self.name)
        stale = self.from_validation and self._validated_step != trainer.global_step
        return None if found is None or stale else float(found)

    def is_from_training(self, trainer: "Trainer") -> bool:
        """Return whether training, and not validation, has logged the metric."""
        return not self.from_validation and self.name in trainer.agreed_metrics

    def is_missing(self, trainer: "Trainer") -> bool:
        """Return, at the end of an epoch, whether the metric is absent and no validation will log it."""
        if self.name in trainer.agreed_metrics or self.from_validation:
            return False
        # before the first validation nothing is missing yet, unless there is none to wait for
        return self._validated or not sum(trainer.num_val_batches)

    def lacks_validation(self, trainer: "Trainer") -> str | None:
        """Return, before the first step, why the run will end without a value of validation; None where it will not."""
        first, total = trainer.first_validation_step, trainer.estimated_stepping_batches
        if trainer.global_step or first is None or total >= first:
            return None
        if trainer.num_sanity_val_steps and not self.from_validation:
            return None  # the sanity check did not log it: training may
        limit = f"max_steps={trainer.max_steps}" if total == trainer.max_steps else f"max_epochs={trainer.max_epochs}"
        unless = "" if self.from_validation else ", unless training logs it"
        return (
            f"{limit} ends before the first validation, at step {first}: {self.name!r}, which {self.user} monitors, "
            f"will have no value{unless}. Train longer, or validate earlier (val_check_interval)."
        )

    def is_better(self, value: float, than: float) -> bool:
        """Return whether `value` is strictly better; False for NaN."""
        # each comparison with NaN is False, so that one is never the best
        return value < than if self.mode == "min" else value > than

    @property
    def worst(self) -> float:
        """Infinity of the sign that every value improves on."""
        return math.inf if self.mode == "min" else -math.inf

    def refuse(self, trainer: "Trainer") -> NoReturn:
        """Save a checkpoint if the run keeps any, then raise ConfigError with the names that were logged."""
        if trainer.checkpoint_callback is not None:
            # a misspelt name shows after a whole epoch: a resume with the right one need not train it again
            trainer.checkpoint_callback.save(trainer, always=True)
        logged = sorted(trainer.agreed_metrics)
        raise ConfigError(
            f"{self.user} monitors {self.name!r}, which was not logged by the end of epoch {trainer.current_epoch}."
            f"{did_you_mean(self.name, logged)} Logged: {', '.join(logged) or 'nothing'}. "
            f"Set {self.user}'s monitor to one of these, or log {self.name!r} in training_step or validation_step."
        )
