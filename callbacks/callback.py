"""Callback: the hooks, under one drawing of the loop.

Every hook, in the order in which it fires. `C` callbacks have it, `T` tasks have it; where both do, callbacks come
first, but for those that judge what was logged (EarlyStopping) and that save (Checkpoint), which come last. A test
holds this drawing against the code.

    prepare_data                                   T   one process of each machine; the data module's first
    setup                                        C T   (stage); the data module's between the two
    configure_model                                T
    on_load_checkpoint                           C T   when going on from a checkpoint
    train_dataloader                               T   or the data module's, if it was given none; fit only
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
    |   |   on_before_zero_grad                  C T
    |   |   optimizer_zero_grad                    T
    |   |   +-- for each batch of a local replica
    |   |   |   on_before_batch_transfer           T   or the data module's
    |   |   |   transfer_batch_to_device           T   or the data module's
    |   |   |   on_after_batch_transfer            T   or the data module's
    |   |   |   on_train_batch_start             C T
    |   |   |   training_step                      T
    |   |   |   on_before_backward               C T
    |   |   |   backward                           T
    |   |   |   on_after_backward                C T
    |   |   |   on_train_batch_end               C T   but for the step's last batch
    |   |   on_before_optimizer_step             C T
    |   |   configure_gradient_clipping            T
    |   |   optimizer_step                         T
    |   |   lr_scheduler_step                      T   schedulers that go by steps
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
    |   |   |   on_validation_end                C T   the metrics are there
    |   |   |   on_validation_model_train        C T
    |   on_train_epoch_end                       C T   values may still be logged
    |   lr_scheduler_step                          T   schedulers that go by epochs; then the callbacks that come last
    on_save_checkpoint                           C T   whenever a checkpoint is written
    on_processes_changed                         C T   when processes have left an elastic run, or joined it
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

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

Outputs = Any
"""What a step returned."""


class Callback:
    """Something that watches a run. Override the hooks that you need; the others cost nothing.

    A callback changes the run only through the trainer's public methods and `trainer.should_stop`.
    """

    late = 0
    """When its hooks come: 0, before the task's; 1, after them, since it judges metrics; 2, last, since it saves."""
    after_every_step = False
    """Whether its `on_train_batch_end` comes on every process after every step, with None where there was no batch.

    In an epoch's last step a process may have no batch while others have, and then no batch ends there. True for what
    all processes must do alike: saving, averaging weights, setting a learning rate. `late` callbacks are always called.
    """

    @property
    def state_key(self) -> str:
        """The name under which the callback's state stands in a checkpoint; make it unique where two may be used."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs: JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned in the run that is resumed."""

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Begin a stage ("fit", "validate", "test", "predict"); the process group is up, nothing is on a device."""

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """End a stage, also after an exception."""

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Everything is built and placed."""

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Training is over."""

    def on_sanity_check_start(self, trainer: "Trainer", task: "Task") -> None:
        """A few validation batches are about to be tried."""

    def on_sanity_check_end(self, trainer: "Trainer", task: "Task") -> None:
        """The validation batches worked."""

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """The first epoch is about to begin, or the one that is resumed."""

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """The last epoch is over."""

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """An epoch begins, or goes on after a resume."""

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """An epoch is over; its metrics stand in `trainer.callback_metrics`."""

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """One batch of one local replica is on its device; -1 as the answer leaves out the rest of the epoch.

        All processes must answer alike: not -1 for a round of batches in which some process has none.
        """

    def on_train_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int
    ) -> None:
        """The batch is done; where it was the step's last one, the weights are updated.

        In an epoch's last step a process may have no batch while others have; see `after_every_step`.
        """

    def on_before_backward(self, trainer: "Trainer", task: "Task", loss: "torch.Tensor") -> None:
        """The loss is known, its gradient is not."""

    def on_after_backward(self, trainer: "Trainer", task: "Task") -> None:
        """The gradient of one batch is there."""

    def on_before_optimizer_step(self, trainer: "Trainer", task: "Task", optimizer: "torch.optim.Optimizer") -> None:
        """The gradient of the whole step is there, unscaled, not clipped yet."""

    def on_before_zero_grad(self, trainer: "Trainer", task: "Task", optimizer: "torch.optim.Optimizer") -> None:
        """Gradients are about to be dropped."""

    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """The task is about to be switched to evaluation mode."""

    def on_validation_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """The task is about to be switched back, also where a validation was left."""

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """A validation begins."""

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """A validation is over; its metrics stand in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """The validation loaders are about to be read."""

    def on_validation_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """The validation loaders are read; values may still be logged."""

    def on_validation_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One validation batch is on its device."""

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One validation batch is done."""

    def on_test_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """The task is about to be switched to evaluation mode."""

    def on_test_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """The task is about to be switched back, also where a test was left."""

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """A test begins."""

    def on_test_end(self, trainer: "Trainer", task: "Task") -> None:
        """A test is over."""

    def on_test_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """The test loaders are about to be read."""

    def on_test_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """The test loaders are read; values may still be logged."""

    def on_test_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One test batch is on its device."""

    def on_test_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One test batch is done."""

    def on_predict_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """The task is about to be switched to evaluation mode."""

    def on_predict_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """The task is about to be switched back, also where a prediction was left."""

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """A prediction begins."""

    def on_predict_end(self, trainer: "Trainer", task: "Task") -> None:
        """A prediction is over."""

    def on_predict_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """The prediction loaders are about to be read."""

    def on_predict_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """The prediction loaders are read."""

    def on_predict_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One prediction batch is on its device."""

    def on_predict_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Outputs, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """One prediction batch is done."""

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; JSON values and tensors may be added to it."""

    def on_load_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """A checkpoint has been read; the run has not taken it over yet."""

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Others have left or joined an elastic run; ranks may have changed, and the epoch is about to go on."""

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """The run is about to end by this exception."""
