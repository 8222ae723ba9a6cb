"""TaskHooks: the task hooks; `callbacks/callback.py` lists them in call order."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class TaskHooks:
    """Task hooks. Hooks you don't override add no overhead."""

    trainer: "Trainer"

    def setup(self, stage: str) -> None:
        """Called at the beginning of a stage ("fit", "validate", "test", "predict")."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a stage, even after an exception."""

    def on_fit_start(self) -> None:
        """Called when the model, optimizers and data are ready, and the model is on its device."""

    def on_fit_end(self) -> None:
        """Called after training ends."""

    def on_train_start(self) -> None:
        """Called before the first epoch or, in a resumed run, before training continues."""

    def on_processes_changed(self) -> None:
        """Called after processes leave or join an elastic run. A process's rank may change. The epoch continues."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called when an epoch starts or when a resumed run continues an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch. You may still log values."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called for each batch, once it is on the device. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each batch. For the last batch of a step, this is after the weight update."""

    def on_step_end(self) -> None:
        """Called in every process at the end of each step. For example, you can use this hook to average weights."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Called before each backward pass."""

    def on_after_backward(self) -> None:
        """Called after each backward pass."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when `.grad` holds the gradients for the whole step, unscaled and not yet clipped."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before gradients are zeroed."""

    def on_validation_start(self) -> None:
        """Called when an evaluation begins. Each `on_validation_*` hook has test and predict variants."""

    def on_validation_end(self) -> None:
        """Called after an evaluation. Its metrics are in `trainer.callback_metrics`."""

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation mode."""
        self.eval()  # type: ignore[attr-defined]  # a Task is an nn.Module

    def on_validation_model_train(self) -> None:
        """Restore the mode of every module."""
        self.trainer.current_run.restore_training_mode()

    def on_validation_epoch_start(self) -> None:
        """Called before the first evaluation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last evaluation batch. You may still log values."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each evaluation batch, once it is on the device."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each evaluation batch."""

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written. You may add JSON values and tensors to `checkpoint`."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint is read, before its state is restored."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends the run."""
