"""WeightAveraging and ExponentialMovingAverage: average the weights during training, and evaluate with the averages."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, TaskError
from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer


class WeightAveraging(Callback):
    """Keeps the mean of the weights after the optimizer steps that `should_update` chooses, by default all.

    Validation, test and prediction use the averages, and after `fit` the task holds them. A checkpoint has the trained
    weights as the model's and the averages as this callback's state, so that a resume restores both; whoever else takes
    weights from it (`load_from_checkpoint`, an evaluation, `legato export`) gets the averages. With
    `save_weights_only` the averages are the model's.
    """

    def __init__(self, use_buffers: bool = False) -> None:
        """Average parameters, with `use_buffers` also floating point buffers."""
        self.use_buffers = use_buffers
        self.updates = 0
        """Number of updates so far."""
        self.averages: dict[str, torch.Tensor] = {}
        """Averages by parameter name; of a sharded parameter this rank's shard."""
        self._unsharded: dict[str, torch.Tensor] = {}
        """Unsharded averages, as loaded from a checkpoint or left by the last run."""
        self._trained: dict[str, torch.Tensor] = {}
        """The trained weights, while the task holds the averages."""
        self._step = 0

    def averaged_state_dict(self) -> "dict[str, torch.Tensor]":
        """Return the unsharded averages by parameter name. Collective under a sharded strategy."""
        return self._unsharded or {name: _full_tensor(average) for name, average in self.averages.items()}

    # --- training ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the averages at the start of a training. Raises ConfigError for strategies without all weights."""
        if not trainer.strategy.has_all_weights and stage == "fit":
            raise ConfigError(
                f"{type(self).__name__} averages all weights, of which a process of strategy "
                f"{trainer.strategy.name!r} has some only (those of its own stages, or none of the remote modules'): "
                f"remove it, set pipeline to 1, or keep the modules here."
            )
        if stage == "fit":
            self.updates, self.averages, self._unsharded, self._step = 0, {}, {}, 0

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Shard the averages of a resumed run."""
        self._shard_averages(task)
        self._step = trainer.global_step

    def on_step_end(self, trainer: "Trainer", task: "Task") -> None:
        """Update the averages after an optimizer step."""
        self._step = trainer.global_step
        if self.should_update(self._step, trainer.current_epoch):
            self.update(task)

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Use the averages that another process of an elastic run has sent, and make up for an update cut off."""
        self._shard_averages(task)
        if trainer.global_step != self._step:
            self.on_step_end(trainer, task)

    def should_update(self, step: int, epoch: int) -> bool:
        """Return whether the weights after this optimizer step, counted from 1, are averaged."""
        return True

    def average(self, averages: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Update averages in place by new weights; the first are copied."""
        # a running mean and not a sum, whose last digits would be lost as it grows
        averages.lerp_(weights, 1.0 / (self.updates + 1))

    def update(self, task: "Task") -> None:
        """Add the current weights to the averages."""
        import torch

        with torch.no_grad():
            for name, tensor in self._averaged(task).items():
                # in float32 at least: the update by (1 - decay) is mostly below bfloat16's resolution
                kind = torch.promote_types(tensor.dtype, torch.float32)
                # the first update copies, so that an average does not begin at the random weights' mean with zero
                if name not in self.averages:
                    self.averages[name] = tensor.detach().to(kind, copy=True)
                else:
                    self.average(_local_shard(self.averages[name]), _local_shard(tensor.detach()).to(kind))
        self.updates += 1

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the averages in the task."""
        self.leave_averages(task)
        # gathered while all processes are there: the next call may have other devices, and shards them anew
        self._unsharded = {name: _full_tensor(average).cpu() for name, average in self.averages.items()}

    def leave_averages(self, task: "Task") -> None:
        """Let the task hold the averages for good."""
        self._swap_in(task)
        self._trained = {}

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Leave the trained weights in the task."""
        self._swap_out(task)

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Swap in the averages."""
        self._swap_in(task)

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Swap out the averages, before a checkpoint is saved."""
        self._swap_out(task)

    def on_validation_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Swap out the averages, also after an exception."""
        self._swap_out(task)

    # what comes last in an evaluation, also in one that failed, so that no run goes on with the averages
    on_test_model_train = on_predict_model_train = on_validation_model_train

    def _swap_in(self, task: "Task") -> None:
        import torch

        # swapped in already: a second time would take the averages for the trained weights
        if self._trained:
            return
        self._shard_averages(task)
        with torch.no_grad():
            for name, tensor in self._averaged(task).items():
                if name in self.averages:
                    # copied into the parameter and not put in its place: optimizers and compiled graphs hold that one
                    own = _local_shard(tensor.detach())
                    self._trained[name] = own.clone()
                    own.copy_(_local_shard(self.averages[name]))
        if self.use_buffers:
            task.trainer.strategy.align_buffers()  # each process averaged the buffers of its own replicas

    def _swap_out(self, task: "Task") -> None:
        import torch

        # a validation that succeeds comes here twice, of which the second time finds nothing to do
        trained, self._trained = self._trained, {}
        with torch.no_grad():
            for name, tensor in self._averaged(task).items() if trained else ():
                if name in trained:
                    _local_shard(tensor.detach()).copy_(trained[name])

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the averages. Collective under a sharded strategy."""
        whole = self.averaged_state_dict()
        return {"updates": self.updates, "averages": whole, "step": self._step} if whole else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages; they are sharded when training or evaluation begins."""
        self.updates, self._unsharded, self.averages = state_dict["updates"], dict(state_dict["averages"]), {}
        # none where on_load_checkpoint stands in for a state that the checkpoint lacks
        self._step = state_dict.get("step", -1)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Raise TaskError while the task holds the averages instead of the trained weights."""
        if self._trained:
            raise TaskError(
                f"save_checkpoint was called within an evaluation, while the task holds the averaged weights of "
                f"{type(self).__name__}. Call it from on_validation_end on."
            )
        if "callbacks" not in checkpoint:  # of weights alone: those that are evaluated
            weights = checkpoint["state_dict"]
            for name in self.averages.keys() & weights.keys():
                weights[name] = self.averages[name].to(weights[name].dtype)

    def on_load_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Load the averages of a checkpoint that is evaluated."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if trainer.stage != "fit":
            self.load_state_dict(state or {"updates": 0, "averages": {}})

    def _shard_averages(self, task: "Task") -> None:
        """Shard loaded averages like the task's parameters."""
        whole, self._unsharded = self._unsharded, {}
        for name, tensor in self._averaged(task).items():
            if name in whole:
                self.averages[name] = _distribute_like(whole[name], tensor.detach())

    def _averaged(self, task: "Task") -> "dict[str, torch.Tensor]":
        """Return the tensors to average, by name."""
        found: dict[str, torch.Tensor] = dict(task.named_parameters())
        if self.use_buffers:
            found.update(task.named_buffers())
        # counters, such as num_batches_tracked of a batch norm, have no mean
        return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


class ExponentialMovingAverage(WeightAveraging):
    """Keeps average = decay * average + (1 - decay) * weights, updated after optimizer steps.

    The first update copies the weights. What is evaluated, left in the task and taken from checkpoints are the
    averages, as for every `WeightAveraging`. Equal to torch.optim.swa_utils.AveragedModel with get_ema_avg_fn.
    """

    def __init__(
        self, decay: float = 0.999, *, every_n_steps: int = 1, start_step: int = 0, use_buffers: bool = False
    ) -> None:
        """Average every `every_n_steps` steps from `start_step` on; with `use_buffers` also floating point buffers."""
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ExponentialMovingAverage: decay={decay!r}: expected a number from 0 to less than 1.")
        if every_n_steps < 1 or start_step < 0:
            raise ConfigError(
                f"ExponentialMovingAverage: every_n_steps={every_n_steps!r} must be at least 1, start_step="
                f"{start_step!r} at least 0."
            )
        super().__init__(use_buffers)
        self.decay, self.every_n_steps, self.start_step = decay, every_n_steps, start_step

    def should_update(self, step: int, epoch: int) -> bool:
        """Return whether the weights after this optimizer step are averaged."""
        return step >= self.start_step and step % self.every_n_steps == 0

    def average(self, averages: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Update averages in place by new weights."""
        averages.lerp_(weights, 1.0 - self.decay)


def _local_shard(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return this rank's shard of a tensor, sharing its memory."""
    from ..base.tensors import local_part

    return local_part(tensor)


def _full_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the full tensor; collective for a DTensor."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _distribute_like(whole: "torch.Tensor", like: Any) -> "torch.Tensor":
    """Return a full tensor distributed like `like`; collective for a DTensor."""
    import torch

    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be updated later
        if not hasattr(like, "full_tensor"):
            return whole.to(like.device, copy=True)
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
