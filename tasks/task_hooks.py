"""TaskHooks: the moments of a run at which a task may act; `callbacks/callback.py` draws when each fires."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class TaskHooks:
    """Hooks that do nothing until they are overridden; those that are not overridden cost nothing."""

    trainer: "Trainer"

    def setup(self, stage: str) -> None:
        """Begin a stage ("fit", "validate", "test", "predict")."""

    def teardown(self, stage: str) -> None:
        """End a stage, also after an exception."""

    def on_fit_start(self) -> None:
        """Everything is built and placed."""

    def on_fit_end(self) -> None:
        """Training is over."""

    def on_train_start(self) -> None:
        """The first epoch is about to begin, or the one that is resumed."""

    def on_processes_changed(self) -> None:
        """Others have left or joined an elastic run; ranks may have changed, and the epoch is about to go on."""

    def on_train_end(self) -> None:
        """The last epoch is over."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins, or goes on after a resume."""

    def on_train_epoch_end(self) -> None:
        """An epoch is over; values may still be logged."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """One batch of one local replica is on its device; return -1 to leave out the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch is done; where it was the step's last one, the weights are updated."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """The loss is known, its gradient is not."""

    def on_after_backward(self) -> None:
        """The gradient of one batch is there."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradient of the whole step is there, unscaled, not clipped yet."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are about to be dropped."""

    def on_validation_start(self) -> None:
        """A validation begins."""

    def on_validation_end(self) -> None:
        """A validation is over."""

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation mode."""
        self.trainer.current_run.evaluation_mode()

    def on_validation_model_train(self) -> None:
        """Switch back: every module gets the mode that it had."""
        self.trainer.current_run.restore_training_mode()

    def on_validation_epoch_start(self) -> None:
        """The validation loaders are about to be read."""

    def on_validation_epoch_end(self) -> None:
        """The validation loaders are read; values may still be logged."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One validation batch is on its device."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One validation batch is done."""

    def on_test_start(self) -> None:
        """A test begins."""

    def on_test_end(self) -> None:
        """A test is over."""

    def on_test_model_eval(self) -> None:
        """Switch to evaluation mode."""
        self.trainer.current_run.evaluation_mode()

    def on_test_model_train(self) -> None:
        """Switch back: every module gets the mode that it had."""
        self.trainer.current_run.restore_training_mode()

    def on_test_epoch_start(self) -> None:
        """The test loaders are about to be read."""

    def on_test_epoch_end(self) -> None:
        """The test loaders are read; values may still be logged."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One test batch is on its device."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One test batch is done."""

    def on_predict_start(self) -> None:
        """A prediction begins."""

    def on_predict_end(self) -> None:
        """A prediction is over."""

    def on_predict_model_eval(self) -> None:
        """Switch to evaluation mode."""
        self.trainer.current_run.evaluation_mode()

    def on_predict_model_train(self) -> None:
        """Switch back: every module gets the mode that it had."""
        self.trainer.current_run.restore_training_mode()

    def on_predict_epoch_start(self) -> None:
        """The prediction loaders are about to be read."""

    def on_predict_epoch_end(self) -> None:
        """The prediction loaders are read."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One prediction batch is on its device."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One prediction batch is done."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; JSON values and tensors may be added to it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint has been read; the task has not taken it over yet."""

    def on_exception(self, exception: BaseException) -> None:
        """The run is about to end by this exception."""
