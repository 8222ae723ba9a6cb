"""PredictionWriter: base of callbacks that write what predict_step returns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer


class PredictionWriter(Callback):
    """Calls `write_on_batch_end` and `write_on_epoch_end` with this process's predictions and their dataset indices.

    With `trainer.predict(..., return_predictions=False)` predictions are held by this callback alone, and only for
    `write_on_epoch_end`.

    Args:
        write_interval: "batch", "epoch" or "batch_and_epoch".
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
        """Write one batch; `batch_indices` are its samples' dataset indices, None for data without."""
        raise NotImplementedError(f"{type(self).__name__} must define write_on_batch_end.")

    def write_on_epoch_end(
        self, trainer: "Trainer", task: "Task", predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all batches of this process.

        predictions: one per batch; with several loaders a list for each.
        batch_indices: the batches' dataset indices, a list for each loader.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_on_epoch_end.")

    def on_predict_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Forget the predictions of the last call."""
        self._predictions = [[] for _ in trainer.num_predict_batches]
        self._indices = [[] for _ in trainer.num_predict_batches]

    def on_predict_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write or keep the batch."""
        item = trainer.current_run.loop.item  # the hook is given the batch alone, not where it lies in the dataset
        indices = None if item is None else item.indices
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Write what was kept."""
        if self.interval != "batch":
            # predictions as `predict` returns them; indices are a list for each loader also where there is one
            single = len(self._predictions) == 1
            predictions = self._predictions[0] if single else self._predictions
            self.write_on_epoch_end(trainer, task, predictions, self._indices)

    def on_predict_end(self, trainer: "Trainer", task: "Task") -> None:
        """Forget what was kept."""
        self._predictions = []
