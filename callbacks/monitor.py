"""Monitor: reads and compares values of a metric for callbacks that act on it."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..base.errors import ConfigError, correction, did_you_mean, nearest_name

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class Monitor:
    """Reads a metric from `trainer.callback_metrics` and compares its values.

    The monitor also detects whether training or validation logs the metric: if the value changes during a validation
    run, validation logs it. The values are the same on all ranks, so all ranks make the same decisions.
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
        """Return whether validation logs the metric, and the step at which it last did so."""
        return {"from_validation": self.from_validation, "validated_step": self._validated_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of a resumed run."""
        self.from_validation = state_dict["from_validation"]
        self._validated_step = state_dict["validated_step"]

    def start_validation(self, trainer: "Trainer") -> None:
        """Store the metric's value before validation."""
        self._before = trainer.agreed_metrics.get(self.name)

    def end_validation(self, trainer: "Trainer") -> bool:
        """Return whether the validation run that just ended logged the metric."""
        value = trainer.agreed_metrics.get(self.name)
        # compare by identity: publishing metrics creates new tensors even for equal values
        fresh = value is not None and value is not self._before
        self.from_validation |= fresh
        # a sanity check shows whether validation logs the metric, but its value is not used
        if not trainer.sanity_checking:
            self._validated = True
            self._validated_step = trainer.global_step if fresh else self._validated_step
        self._before = None
        return fresh

    def read(self, trainer: "Trainer") -> float | None:
        """Return the current value, or None if there is no value or if validation measured it at an earlier step."""
        value = trainer.agreed_metrics.get(self.name)
        stale = self.from_validation and self._validated_step != trainer.global_step
        return None if value is None or stale else float(value)

    def is_from_training(self, trainer: "Trainer") -> bool:
        """Return whether the metric was logged during training rather than validation."""
        return not self.from_validation and self.name in trainer.agreed_metrics

    def is_missing(self, trainer: "Trainer") -> bool:
        """Return whether, at the end of an epoch, nothing has logged the metric and no validation will follow."""
        if self.name in trainer.agreed_metrics or self.from_validation:
            return False
        # before the first validation run, the metric is not missing yet, unless the run has no validation
        return self._validated or not sum(trainer.num_val_batches)

    def lacks_validation(self, trainer: "Trainer") -> str | None:
        """Return the reason the run will end before validation logs a value, or None if it will log one in time.

        Call this method before the first step.
        """
        first, total = trainer.first_validation_step, trainer.estimated_stepping_batches
        if trainer.global_step or first is None or total >= first:
            return None
        if trainer.num_sanity_val_steps and not self.from_validation:
            return None  # the sanity check did not log the metric, but training may
        limit = f"max_steps={trainer.max_steps}" if total == trainer.max_steps else f"max_epochs={trainer.max_epochs}"
        unless = "" if self.from_validation else ", unless training logs it"
        return (
            f"{limit} ends training before the first validation, at step {first}, so {self.name!r}, which "
            f"{self.user} monitors, will have no value{unless}. Train longer, or validate earlier (val_check_interval)."
        )

    def is_better(self, value: float, than: float) -> bool:
        """Return whether `value` is strictly better. NaN is never better."""
        # comparisons with NaN are False, so NaN is never the best value
        return value < than if self.mode == "min" else value > than

    @property
    def worst(self) -> float:
        """Infinity or negative infinity, whichever is worse than every finite value."""
        return math.inf if self.mode == "min" else -math.inf

    def refuse(self, trainer: "Trainer") -> NoReturn:
        """Save a checkpoint if the run saves any, then raise a ConfigError that lists the logged names."""
        if trainer.checkpoint_callback is not None:
            # a misspelled name goes unnoticed for an epoch; resuming with the right name should not repeat that epoch
            trainer.checkpoint_callback.save(trainer, always=True)
        logged = sorted(trainer.agreed_metrics)
        near = nearest_name(self.name, logged)
        raise ConfigError(
            f"{self.user} monitors {self.name!r}, but nothing logged it by the end of epoch {trainer.current_epoch}."
            f"{did_you_mean(self.name, logged)} Logged: {', '.join(logged) or 'nothing'}. "
            f"Set {self.user}'s `monitor` to one of these, or log {self.name!r} in training_step or validation_step."
            + (correction(f'monitor="{self.name}"', f'monitor="{near}"') if near else "")
        )
