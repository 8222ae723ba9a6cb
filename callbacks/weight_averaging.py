"""WeightAveraging and ExponentialMovingAverage: average the weights during training and evaluate with the averages."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, TaskError
from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..base.contracts import Task, Trainer


class WeightAveraging(Callback):
    """Averages the weights over all optimizer steps, or over those that `should_update` selects.

    Validation, test and prediction use the averages, and `fit` leaves the averages in the task. A checkpoint stores the
    trained weights as the model and the averages as this callback's state, and resuming restores both. Everything else
    that reads weights from the checkpoint (`load_from_checkpoint`, an evaluation, `legato export`) uses the averages.
    With `save_weights_only`, the checkpoint stores the averages as the model. Averages are float32 or wider.

    Args:
        use_buffers: Average floating-point buffers in addition to parameters.

    Raises ConfigError if the strategy's processes do not each hold all weights (pipeline, ddp_rpc).
    """

    def __init__(self, use_buffers: bool = False) -> None:
        self.use_buffers = use_buffers
        self.updates = 0
        """Number of updates so far."""
        self.averages: dict[str, torch.Tensor] = {}
        """Averages by parameter name; for a sharded parameter, this rank's shard."""
        self._unsharded: dict[str, torch.Tensor] = {}
        """Unsharded averages from a checkpoint or from the previous run."""
        self._trained: dict[str, torch.Tensor] = {}
        """The trained weights by name while the task holds the averages."""
        self._step = 0

    def averaged_state_dict(self) -> "dict[str, torch.Tensor]":
        """Return the unsharded averages, keyed by parameter name. Under a sharded strategy, this is a collective."""
        return self._unsharded or {name: _full_tensor(average) for name, average in self.averages.items()}

    # --- training ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Reset the averages before training. Raises ConfigError if a process does not hold all weights."""
        if not trainer.strategy.has_all_weights and stage == "fit":
            raise ConfigError(
                f"{type(self).__name__} needs all weights in each process, but with strategy={trainer.strategy.name}, "
                f"some are in other processes (pipeline stages or remote modules). "
                f"Remove the callback, set pipeline to 1, or keep the modules local."
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
        """Shard the averages that another process sent, and repeat an update that the change interrupted."""
        self._shard_averages(task)
        if trainer.global_step != self._step:
            self.on_step_end(trainer, task)

    def should_update(self, step: int, epoch: int) -> bool:
        """Return whether to average the weights after optimizer step `step`, counted from 1."""
        return True

    def average(self, averages: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Update `averages` in place with `weights` of the same shape. The first update does not call this method."""
        # a running mean, since a growing sum would lose precision
        averages.lerp_(weights, 1.0 / (self.updates + 1))

    def update(self, task: "Task") -> None:
        """Add the task's current weights to the averages."""
        import torch

        with torch.no_grad():
            for name, tensor in self._averaged(task).items():
                # at least float32: an update scaled by (1 - decay) is usually below bfloat16's resolution
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                # the first update copies the weights, so that the average is not biased towards zero
                if name not in self.averages:
                    self.averages[name] = tensor.detach().to(dtype, copy=True)
                else:
                    self.average(_local_shard(self.averages[name]), _local_shard(tensor.detach()).to(dtype))
        self.updates += 1

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the averages in the task."""
        self.leave_averages(task)
        # gather while all processes exist, since the next run may shard the averages over other devices
        self._unsharded = {name: _full_tensor(average).cpu() for name, average in self.averages.items()}

    def leave_averages(self, task: "Task") -> None:
        """Put the averages into the task permanently."""
        self._swap_in(task)
        self._trained = {}

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Put the trained weights back into the task."""
        self._swap_out(task)

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Swap in the averages."""
        self._swap_in(task)

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Put the trained weights back into the task before a checkpoint is saved."""
        self._swap_out(task)

    def on_validation_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Put the trained weights back into the task, even after an exception."""
        self._swap_out(task)

    # the last hook of every evaluation, even if it fails: no run may continue with the averages
    on_test_model_train = on_predict_model_train = on_validation_model_train

    def _swap_in(self, task: "Task") -> None:
        import torch

        # already swapped in: a second swap would save the averages as trained weights
        if self._trained:
            return
        self._shard_averages(task)
        with torch.no_grad():
            for name, tensor in self._averaged(task).items():
                if name in self.averages:
                    # copied in place, since optimizers and compiled graphs hold references to the parameter
                    shard = _local_shard(tensor.detach())
                    self._trained[name] = shard.clone()
                    shard.copy_(_local_shard(self.averages[name]))
        if self.use_buffers:
            task.trainer.strategy.align_buffers()  # each process averaged the buffers of its local replicas

    def _swap_out(self, task: "Task") -> None:
        import torch

        # called twice after a successful validation; the second call has nothing to do
        trained, self._trained = self._trained, {}
        with torch.no_grad():
            for name, tensor in self._averaged(task).items() if trained else ():
                if name in trained:
                    _local_shard(tensor.detach()).copy_(trained[name])

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the averages. Under a sharded strategy, this is a collective."""
        averages = self.averaged_state_dict()
        return {"updates": self.updates, "averages": averages, "step": self._step} if averages else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the averages. They are sharded when training or evaluation begins."""
        self.updates, self._unsharded, self.averages = state_dict["updates"], dict(state_dict["averages"]), {}
        # the step is missing if on_load_checkpoint replaces a state that the checkpoint lacks
        self._step = state_dict.get("step", -1)

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Raise TaskError while the task holds the averages instead of the trained weights."""
        if self._trained:
            raise TaskError(
                f"save_checkpoint was called during evaluation, when the task held averages from {type(self).__name__} "
                f"instead of the trained weights. Call save_checkpoint in on_validation_end or later."
            )
        if "callbacks" not in checkpoint:  # a weights-only checkpoint stores the averages
            weights = checkpoint["state_dict"]
            for name in self.averages.keys() & weights.keys():
                weights[name] = self.averages[name].to(weights[name].dtype)

    def on_load_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Load the averages when an evaluation loads the checkpoint."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if trainer.stage != "fit":
            self.load_state_dict(state or {"updates": 0, "averages": {}})

    def _shard_averages(self, task: "Task") -> None:
        """Shard loaded averages like the task's parameters."""
        unsharded, self._unsharded = self._unsharded, {}
        for name, tensor in self._averaged(task).items():
            if name in unsharded:
                self.averages[name] = _distribute_like(unsharded[name], tensor.detach())

    def _averaged(self, task: "Task") -> "dict[str, torch.Tensor]":
        """Return the tensors to average, by name."""
        tensors: dict[str, torch.Tensor] = dict(task.named_parameters())
        if self.use_buffers:
            tensors.update(task.named_buffers())
        # counters, such as num_batches_tracked of a batch norm, have no mean
        return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


class ExponentialMovingAverage(WeightAveraging):
    """Keeps an exponential moving average of the weights: average = decay * average + (1 - decay) * weights.

    The first update copies the weights. The averages match those of torch.optim.swa_utils.AveragedModel with
    get_ema_avg_fn(decay). As with `WeightAveraging`, evaluations use the averages and `fit` leaves them in the task.

    Args:
        decay: Weight of the previous average in each update; at least 0 and less than 1.
        every_n_steps: Number of optimizer steps between updates.
        start_step: First optimizer step that may update the averages, counted from 1.
        use_buffers: Average floating-point buffers in addition to parameters.

    Raises ConfigError if a value is out of range, or if the strategy's processes do not each hold all weights.
    """

    def __init__(
        self, decay: float = 0.999, *, every_n_steps: int = 1, start_step: int = 0, use_buffers: bool = False
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ExponentialMovingAverage: decay must be at least 0 and less than 1, got {decay!r}.")
        if every_n_steps < 1 or start_step < 0:
            raise ConfigError(
                f"ExponentialMovingAverage: every_n_steps must be at least 1 and start_step at least 0, got "
                f"{every_n_steps!r} and {start_step!r}."
            )
        super().__init__(use_buffers)
        self.decay, self.every_n_steps, self.start_step = decay, every_n_steps, start_step

    def should_update(self, step: int, epoch: int) -> bool:
        """Return whether to average the weights after this optimizer step."""
        return step >= self.start_step and step % self.every_n_steps == 0

    def average(self, averages: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Update `averages` in place with `weights`."""
        averages.lerp_(weights, 1.0 - self.decay)


def _local_shard(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return this rank's shard of a tensor as a view."""
    from ..base.tensors import local_part

    return local_part(tensor)


def _full_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the full tensor. For a DTensor, this is a collective."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _distribute_like(full: "torch.Tensor", like: Any) -> "torch.Tensor":
    """Return a full tensor distributed like `like`. For a DTensor, this is a collective."""
    import torch

    with torch.inference_mode(False), torch.no_grad():  # in-place updates do not work on inference tensors
        if not hasattr(like, "full_tensor"):
            return full.to(like.device, copy=True)
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)
