"""PredictionWriter: the base class for callbacks that write the results of predict_step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer


class PredictionWriter(Callback):
    """Base class for callbacks that write predictions. Override `write_on_batch_end`, `write_on_epoch_end` or both.

    Each process writes its own predictions and receives their dataset indices. To save memory, call
    `trainer.predict(..., return_predictions=False)`. Predictions are then kept only if `write_on_epoch_end` is used.

    Args:
        write_interval: When to write: "batch", "epoch" or "batch_and_epoch".

    Raises ConfigError if `write_interval` has any other value.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ConfigError(
                f"{type(self).__name__}: write_interval must be 'batch', 'epoch' or 'batch_and_epoch', got "
                f"{write_interval!r}."
            )
        self.interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    def write_on_batch_end(
        self,
        trainer: "Trainer",
        task: "Task",
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write a batch's prediction.

        Args:
            prediction: Return value of `predict_step`.
            batch_indices: Dataset indices of the batch's samples; None if the samples have no indices.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_on_batch_end for this write_interval.")

    def write_on_epoch_end(
        self, trainer: "Trainer", task: "Task", predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write this process's predictions for all batches.

        Args:
            predictions: One prediction per batch; with multiple loaders, one list per loader.
            batch_indices: One list per loader (even for a single loader) with the dataset indices of each batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_on_epoch_end for this write_interval.")

    def on_predict_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Discard the predictions from the previous call."""
        self._predictions = [[] for _ in trainer.num_predict_batches]
        self._indices = [[] for _ in trainer.num_predict_batches]

    def on_predict_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write the batch's prediction, or hold it until the end of the epoch."""
        item = trainer.current_run.loop.item  # the hook's arguments do not include dataset indices
        indices = None if item is None else item.indices
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Write the kept predictions."""
        if self.interval != "batch":
            # predictions have the form that `predict` returns; indices are a list per loader even for a single loader
            single = len(self._predictions) == 1
            predictions = self._predictions[0] if single else self._predictions
            self.write_on_epoch_end(trainer, task, predictions, self._indices)

    def on_predict_end(self, trainer: "Trainer", task: "Task") -> None:
        """Discard the kept predictions."""
        self._predictions = []
