"""TaskHooks: the hooks of tasks; `callbacks/callback.py` lists them in the order of their calls."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..base.contracts import Trainer


class TaskHooks:
    """Hooks of tasks; those that are not overridden cost nothing."""

    trainer: "Trainer"

    def setup(self, stage: str) -> None:
        """Called at the beginning of a stage ("fit", "validate", "test", "predict")."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a stage, also after an exception."""

    def on_fit_start(self) -> None:
        """Called when everything is built and on its device."""

    def on_fit_end(self) -> None:
        """Called when training is over."""

    def on_train_start(self) -> None:
        """Called before the first epoch, or the resumed one."""

    def on_processes_changed(self) -> None:
        """Called when processes left or joined an elastic run; ranks may have changed, and the epoch continues."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called when an epoch begins, or continues after a resume."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch; values may still be logged."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called for each batch once it is on the device; return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each batch; after a step's last batch the weights are updated already."""

    def on_step_end(self) -> None:
        """Called once a step, after its optimizers, on every process: for weights that follow the trained ones."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Called before each backward."""

    def on_after_backward(self) -> None:
        """Called after each backward."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called with the gradients of the whole step, unscaled and not yet clipped."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_validation_start(self) -> None:
        """Called when an evaluation begins; as all hooks below, also for test and predict."""

    def on_validation_end(self) -> None:
        """Called after an evaluation; its metrics are in `trainer.callback_metrics`."""

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation mode."""
        self.eval()  # type: ignore[attr-defined]  # a Task is an nn.Module

    def on_validation_model_train(self) -> None:
        """Restore the mode of every module."""
        self.trainer.current_run.restore_training_mode()

    def on_validation_epoch_start(self) -> None:
        """Called before the first evaluation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last evaluation batch; values may still be logged."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each evaluation batch, which is on the device."""

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
        """Called before a checkpoint is written; may add JSON values and tensors to it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read and before it is restored."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run ends by an exception."""
