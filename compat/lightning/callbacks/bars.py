"""ProgressBar: the base class for custom progress bars. It provides totals, descriptions and values."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ....base.errors import ConfigError
from ....callbacks.progress_bar import ProgressDisplay
from .callback import Callback

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task

Number = int | float


class ProgressBar(ProgressDisplay, Callback):
    """Base class for progress bars. Provides batch counts and a description for each stage."""

    _trainer: "Trainer | None" = None
    _current_eval_dataloader_idx: int | None = None

    def __init__(self) -> None:
        self._trainer, self._current_eval_dataloader_idx = None, None

    @property
    def trainer(self) -> "Trainer":
        """The run's trainer. Raises TypeError before a run."""
        if self._trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._trainer

    sanity_check_description = "Sanity Checking"
    train_description = "Training"
    validation_description = "Validation"
    test_description = "Testing"
    predict_description = "Predicting"

    @property
    def total_train_batches(self) -> Number:
        """Number of batches in the epoch; infinity if the loader has no length."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> Number:
        """Number of batches in the current validation loader."""
        trainer: Any = self.trainer
        return self._current(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> Number:
        """Number of batches in the current test loader."""
        return self._current(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> Number:
        """Number of batches in the current prediction loader."""
        return self._current(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> Number:
        """Number of batches in all validation loaders; 0 if the current epoch has no validation."""
        every = self.trainer.check_val_every_n_epoch
        due = every is None or (self.trainer.current_epoch + 1) % every == 0
        return sum(self.trainer.num_val_batches) if due else 0

    def _current(self, counts: list[Number]) -> Number:
        return counts[self._current_eval_dataloader_idx or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether the evaluation loader has changed since the previous call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the current evaluation loader so that the next loader is reported as changed."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Hide the bar."""
        raise NotImplementedError

    def enable(self) -> None:
        """Show the bar."""
        raise NotImplementedError

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the bar."""
        print(*args, **kwargs)

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Store the trainer and hide the bar on ranks other than 0."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: "Trainer", pl_module: "Task") -> dict[str, Any]:
        """Return the values to show in the bar. Override this method to show different values."""
        return {**get_standard_metrics(trainer), **trainer.progress_bar_metrics}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the trainer and the bars."""
        return {
            name: None if name == "_trainer" or isinstance(value, tqdm) else value for name, value in vars(self).items()
        }


def refuse_bars(callbacks: Sequence[Any], wanted: bool) -> None:
    """Raise ConfigError if there are multiple progress bars, or any at all with enable_progress_bar=False."""
    bars = [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1 or (bars and not wanted):
        way_out = "Keep only one of them" if wanted else "Remove it, or enable_progress_bar=False"
        raise ConfigError(f"callbacks contains the progress bar{'s' * (len(bars) > 1)} {', '.join(bars)}. {way_out}.")


def get_standard_metrics(trainer: "Trainer") -> dict[str, int | str]:
    """Return the first logger's version as `v_num`, or an empty dict if it has no version."""
    version = getattr(trainer.loggers[0], "version", None) if trainer.loggers else None
    if version in ("", None):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else int(version)}


def convert_inf(x: Number | None) -> Number | None:
    """Return a number of batches, or None if it is infinite or NaN, which tqdm does not accept."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x
