"""Callback: the hooks, under one drawing of the loop.

Every hook in the order of its calls, with `C` for hooks of callbacks and `T` for hooks of tasks. Callbacks are called
before the task, except those that judge metrics (MonitoringCallback) and, last of all, save (CheckpointCallback). A
test checks this drawing against the code.

    prepare_data                                   T   one process of each machine; the data module's first
    setup                                        C T   (stage); the data module's comes first
    configure_model                                T
    on_load_checkpoint                           C T   when resuming from a checkpoint
    train_dataloader                               T   or the data module's, if `fit` was given none; fit only
    val_dataloader                                 T   the same; test_dataloader, predict_dataloader in their stages
    configure_optimizers                           T   fit only
    on_fit_start                                 C T   fit only
    on_sanity_check_start                        C     a few validation batches before training
        (validation, as below)
    on_sanity_check_end                          C
    on_train_start                               C T
    +-- for each epoch
    |   on_train_epoch_start                     C T
    |   +-- for each optimizer step
    |   |   +-- for each batch of a local replica
    |   |   |   on_before_batch_transfer           T   or the data module's
    |   |   |   transfer_batch_to_device           T   or the data module's
    |   |   |   on_after_batch_transfer            T   or the data module's
    |   |   |   on_train_batch_start             C T
    |   |   |   training_step                      T
    |   |   |   on_before_zero_grad              C T   step's first batch; if it runs several replicas, before that
    |   |   |   optimizer_zero_grad                T   the same
    |   |   |   on_before_backward               C T
    |   |   |   backward                           T
    |   |   |   on_after_backward                C T
    |   |   |   on_train_batch_end               C T   except the step's last batch
    |   |   on_before_optimizer_step             C T
    |   |   configure_gradient_clipping            T
    |   |   optimizer_step                         T
    |   |   lr_scheduler_step                      T   schedulers by steps
    |   |   lr_scheduler_step                      T   schedulers by epochs, after the epoch's last step
    |   |   on_step_end                          C T   on every process, also one without a batch in the step
    |   |   on_train_batch_end                   C T   for the step's last batch: the weights are updated
    |   |   +-- validation, when it is due: after this step, or at the end of the epoch
    |   |   |   on_validation_model_eval         C T
    |   |   |   on_validation_start              C T
    |   |   |   on_validation_epoch_start        C T
    |   |   |   +-- for each batch
    |   |   |   |   (transfer, as above)
    |   |   |   |   on_validation_batch_start    C T
    |   |   |   |   validation_step                T
    |   |   |   |   on_validation_batch_end      C T
    |   |   |   on_validation_epoch_end          C T   values may still be logged
    |   |   |   on_validation_end                C T   metrics are computed
    |   |   |   on_validation_model_train        C T
    |   on_train_epoch_end                       C T   values may still be logged
    on_save_checkpoint                           C T   whenever a checkpoint is written
    on_processes_changed                         C T   when processes left or joined an elastic run
    on_train_end                                 C T
    on_fit_end                                   C T
    on_exception                                 C T   when the run ends by an exception; and the data module's
    teardown                                     C T   (stage); the data module's between the two

`validate`, `test` and `predict` run the evaluation part alone, with `test` or `predict` in place of `validation`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer

Outputs = Any
"""The return value of a step."""


class Callback:
    """Base class of callbacks; hooks that are not overridden cost nothing.

    A callback changes the run only through the trainer's public methods and `trainer.should_stop`.
    """

    @property
    def state_key(self) -> str:
        """Key of the callback's state in a checkpoint; make it unique if several instances may be used."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state when a run is resumed."""

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Called first in a stage ("fit", "validate", "test", "predict"), before anything is moved to a device."""

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Called at the end of a stage, also after an exception."""

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called when everything is built and on its device."""

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called when training is over."""

    def on_sanity_check_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the sanity check's validation batches."""

    def on_sanity_check_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after the sanity check."""

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the first epoch, or the resumed one."""

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called when an epoch begins, or continues after a resume."""

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after an epoch; its metrics are in `trainer.callback_metrics`."""

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Called for each batch of a local replica once it is on the device; return -1 to skip the rest of the epoch.

        All processes must return the same: never -1 in a round in which some process has no batch.
        """

    def on_train_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int
    ) -> None:
        """Called after each batch; after a step's last batch the weights are updated already.

        A process may have no batch in an epoch's last step, and is not called there: what all processes must do alike,
        such as averaging weights, belongs into `on_step_end`, or into a MonitoringCallback.
        """

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called once a step, after its optimizers, on every process, also one without a batch in the step."""

    def on_before_backward(self, trainer: "Trainer", task: "Task", loss: "torch.Tensor") -> None:
        """Called before each backward."""

    def on_after_backward(self, trainer: "Trainer", task: "Task") -> None:
        """Called after each backward."""

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "torch.optim.Optimizer") -> None:
        """Called with the gradients of the whole step, unscaled and not yet clipped."""

    def on_before_zero_grad(self, trainer: "Trainer", task: "Task", optimizer: "torch.optim.Optimizer") -> None:
        """Called before gradients are cleared."""

    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the task is switched to evaluation mode; as all hooks below, also for test and predict."""

    def on_validation_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the task is switched back, also after an exception."""

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called when an evaluation begins."""

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after an evaluation; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the first evaluation batch."""

    def on_validation_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after the last evaluation batch; values may still be logged."""

    def on_validation_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each evaluation batch, which is on the device."""

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each evaluation batch."""

    # names of this class's functions: an override of on_validation_start is not called in test and predict
    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; may add JSON values and tensors to it."""

    def on_load_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read and before it is restored."""

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Called when processes left or joined an elastic run; ranks may have changed, and the epoch continues."""

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Called when the run ends by an exception."""


class MonitoringCallback(Callback):
    """Base class of callbacks that judge what the others have done: their hooks are called after those of the task.

    Their `on_train_batch_end` is called on every process after every step, with `outputs` and `batch` None where it had
    none, so that they may save, or decide for all.
    """
