"""Monitor: one watched metric, for callbacks that decide by it."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..trainer.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class Monitor:
    """Reads one metric from `trainer.callback_metrics` and knows which of two values is better.

    It finds out by itself whether validation or training logs the metric: what a validation replaced is validation's.
    The values are the same on every rank, so what is decided by them is too.
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
        """Begin a run: nothing was seen yet."""
        self.from_validation, self._validated, self._validated_step = False, False, -1

    def state_dict(self) -> dict[str, Any]:
        """Return whether validation logs the metric, and after which step it last did."""
        return {"from_validation": self.from_validation, "validated_step": self._validated_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what was known of the metric in the run that is resumed."""
        self.from_validation = state_dict["from_validation"]
        self._validated_step = state_dict["validated_step"]

    def start_validation(self, trainer: "Trainer") -> None:
        """Remember what stands there before a validation."""
        self._before = trainer.callback_metrics.get(self.name)

    def end_validation(self, trainer: "Trainer") -> bool:
        """Return whether this validation logged the metric."""
        found = trainer.callback_metrics.get(self.name)
        fresh = found is not None and found is not self._before
        self.from_validation |= fresh
        if not trainer.sanity_checking:
            self._validated = True
            self._validated_step = trainer.global_step if fresh else self._validated_step
        self._before = None
        return fresh

    def read(self, trainer: "Trainer") -> float | None:
        """Return the present value; None where there is none, or where validation measured it at an earlier step."""
        found = trainer.callback_metrics.get(self.name)
        stale = self.from_validation and self._validated_step != trainer.global_step
        return None if found is None or stale else float(found)

    def is_from_training(self, trainer: "Trainer") -> bool:
        """Return whether the metric is there, and not because of a validation."""
        return not self.from_validation and self.name in trainer.callback_metrics

    def is_missing(self, trainer: "Trainer") -> bool:
        """Return, at the end of an epoch, whether the metric is absent and no validation is left that could log it."""
        if self.name in trainer.callback_metrics or self.from_validation:
            return False
        return self._validated or not sum(trainer.num_val_batches)

    def is_better(self, value: float, than: float) -> bool:
        """Return whether `value` is strictly better; NaN never is."""
        return value < than if self.mode == "min" else value > than

    @property
    def worst(self) -> float:
        """The value that every other one improves on."""
        return math.inf if self.mode == "min" else -math.inf

    def refuse(self, trainer: "Trainer") -> NoReturn:
        """Save the present state where the run keeps checkpoints, then raise ConfigError with the metrics there are."""
        if trainer.checkpoint_callback is not None:
            trainer.checkpoint_callback.save(trainer, always=True)
        logged = sorted(trainer.callback_metrics)
        raise ConfigError(
            f"{self.user} monitors {self.name!r}, which was not logged by the end of epoch {trainer.current_epoch}."
            f"{did_you_mean(self.name, logged)} Logged: {', '.join(logged) or 'nothing'}. "
            f"Set {self.user}'s monitor to one of these, or log {self.name!r} in training_step or validation_step."
        )
