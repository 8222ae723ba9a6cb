"""Callback: the hooks, and a diagram of the training loop.

The diagram lists every hook in call order: `C` marks callback hooks, and `T` marks task hooks. Callbacks run before the
task, with two exceptions: a MonitoringCallback, which acts on metrics, runs after the task, and a CheckpointCallback,
which saves, runs last. A test checks this diagram against the code.

    prepare_data                                   T   one process per machine; runs after the data module's hook
    setup                                        C T   (stage); runs after the data module's hook
    configure_model                                T
    on_load_checkpoint                           C T   when resuming from a checkpoint
    train_dataloader                               T   or the data module's, unless you pass loaders; fit only
    val_dataloader                                 T   likewise; test_dataloader, predict_dataloader in their stages
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
    |   |   |   on_before_zero_grad              C T   for the step's first batch; with multiple replicas, earlier
    |   |   |   optimizer_zero_grad                T   likewise
    |   |   |   on_before_backward               C T
    |   |   |   backward                           T
    |   |   |   on_after_backward                C T
    |   |   |   on_train_batch_end               C T   except the step's last batch
    |   |   on_before_optimizer_step             C T
    |   |   configure_gradient_clipping            T
    |   |   optimizer_step                         T
    |   |   lr_scheduler_step                      T   schedulers with interval "step"
    |   |   lr_scheduler_step                      T   schedulers with interval "epoch", after the epoch's last step
    |   |   on_step_end                          C T   on every process, even without a batch for the step
    |   |   on_train_batch_end                   C T   for the step's last batch, after the weight update
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
    on_processes_changed                         C T   after processes leave or join an elastic run
    on_train_end                                 C T
    on_fit_end                                   C T
    on_exception                                 C T   when an exception ends the run; also in the data module
    teardown                                     C T   (stage); the data module's hook runs between these two

`validate`, `test` and `predict` run only the evaluation part, with `test` or `predict` in place of `validation`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer

Outputs = Any
"""The return value of a step."""


class Callback:
    """Base class for callbacks. Hooks you don't override add no overhead.

    A callback observes the run. It changes the run only through the trainer's public methods and `trainer.should_stop`.
    """

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint; must be unique among the callbacks of a run."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state when a run resumes."""

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Called when a stage begins ("fit", "validate", "test", "predict"), before anything is moved to a device."""

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Called at the end of a stage, even after an exception."""

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called when the model, optimizers and data are ready, and the model is on its device."""

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after training ends."""

    def on_sanity_check_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the validation batches of the sanity check."""

    def on_sanity_check_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after the sanity check."""

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the first epoch or, in a resumed run, before training continues."""

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called when an epoch starts or a resumed run continues one."""

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after an epoch. Its metrics are in `trainer.callback_metrics`."""

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Called for each batch of a local replica, once it is on the device. Return -1 to skip the rest of the epoch.

        All processes must return the same value, so do not return -1 in a step for which a process may have no batch.
        """

    def on_train_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int
    ) -> None:
        """Called after each batch. For the last batch of a step, this is after the weight update.

        In the last step of an epoch, this hook is not called on a process without a batch. For work that every process
        must do, such as averaging weights, use `on_step_end` or a MonitoringCallback.
        """

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called on every process at the end of each step, even if the process has no batch for the step."""

    def on_before_backward(self, trainer: "Trainer", task: "Task", loss: "torch.Tensor") -> None:
        """Called before each backward pass."""

    def on_after_backward(self, trainer: "Trainer", task: "Task") -> None:
        """Called after each backward pass."""

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "torch.optim.Optimizer") -> None:
        """Called when `.grad` holds the gradients of the whole step, unscaled and not yet clipped."""

    def on_before_zero_grad(self, trainer: "Trainer", task: "Task", optimizer: "torch.optim.Optimizer") -> None:
        """Called before gradients are zeroed."""

    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the task enters evaluation mode. `on_validation_*` hooks have test and predict variants."""

    def on_validation_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the task returns to its previous mode, even after an exception."""

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called when an evaluation starts."""

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after an evaluation. Its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Called before the first evaluation batch."""

    def on_validation_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Called after the last evaluation batch. The task may still log values."""

    def on_validation_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each evaluation batch, once it is on the device."""

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each evaluation batch."""

    # these are aliases of the functions above: an override of on_validation_start is not called in test or predict
    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written. You may add JSON values and tensors to `checkpoint`."""

    def on_load_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint is read, before its state is restored."""

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Called after processes leave or join an elastic run. A process's rank may change. The epoch continues."""

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Called when an exception ends the run."""


class MonitoringCallback(Callback):
    """Base class for callbacks that act on metrics. Their hooks run after the hooks of the task and other callbacks.

    `on_train_batch_end` runs on every process after every step, so it may save a checkpoint or make a decision for all
    processes. On a process without a batch, `outputs` and `batch` are None.
    """
