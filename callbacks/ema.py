"""ExponentialMovingAverage: keeps an average of the weights, with which the task is evaluated."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..trainer.errors import ConfigError, TaskError
from .callback import Callback

if TYPE_CHECKING:
    import torch

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer


class ExponentialMovingAverage(Callback):
    """Keeps average = decay * average + (1 - decay) * weights, updated after optimizer steps.

    The first update takes the weights as they are. Validation, test and prediction use the averages, and after `fit`
    the task holds them. A checkpoint has the weights that are trained as the model's and the averages as this
    callback's state, so that a resume goes on with both. As torch.optim.swa_utils.AveragedModel with get_ema_avg_fn.
    """

    after_every_step = True

    def __init__(
        self, decay: float = 0.999, *, every_n_steps: int = 1, start_step: int = 0, use_buffers: bool = False
    ) -> None:
        """`start_step`: the step from which on weights are averaged. `use_buffers`: average floating buffers too."""
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ExponentialMovingAverage: decay={decay!r}: expected a number from 0 to less than 1.")
        if every_n_steps < 1 or start_step < 0:
            raise ConfigError(
                f"ExponentialMovingAverage: every_n_steps={every_n_steps!r} must be at least 1, start_step="
                f"{start_step!r} at least 0."
            )
        self.decay, self.every_n_steps, self.start_step, self.use_buffers = (
            decay,
            every_n_steps,
            start_step,
            use_buffers,
        )
        self.updates = 0
        """How often the averages were updated."""
        self.averages: dict[str, torch.Tensor] = {}
        """By the task's names; of a sharded parameter this process's part."""
        self._whole: dict[str, torch.Tensor] = {}
        """The averages as a checkpoint has them, where they are not those of the run that is under way."""
        self._trained: dict[str, torch.Tensor] = {}
        """The weights that are trained, while the task holds the averages."""
        self._step = 0

    def averaged_state_dict(self) -> "dict[str, torch.Tensor]":
        """Return the averages, whole, by the task's names; under a sharded strategy every rank calls it."""
        return self._whole or {name: _whole_of(average) for name, average in self.averages.items()}

    # --- training ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Begin without averages, where this is a new training."""
        if not trainer.strategy.has_all_weights and stage == "fit":
            raise ConfigError(
                f"ExponentialMovingAverage averages all weights, of which a process of strategy "
                f"{trainer.strategy.name!r} has some only (those of its own stages, or none of the remote modules'): "
                f"leave it out, set pipeline to 1, or keep the modules here."
            )
        trainer.strategy.elastic.for_stage(stage).refuse(
            "ExponentialMovingAverage cannot hand its averages to processes that join an elastic run: leave it out, or "
            "elastic=true."
        )
        if stage == "fit":
            self.updates, self.averages, self._whole, self._step = 0, {}, {}, 0

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Take over the averages of the run that is resumed."""
        self._take_over(task)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update the averages after an optimizer step."""
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        if step >= self.start_step and step % self.every_n_steps == 0:
            self.update(task)

    def update(self, task: "Task") -> None:
        """Take the present weights into the averages."""
        import torch

        with torch.no_grad():
            for name, tensor in self._averaged(task).items():
                # in float32 at least: what (1 - decay) adds is mostly less than bfloat16 can tell
                kind = torch.promote_types(tensor.dtype, torch.float32)
                if name not in self.averages:
                    self.averages[name] = tensor.detach().to(kind, copy=True)
                else:
                    _own(self.averages[name]).lerp_(_own(tensor.detach()).to(kind), 1.0 - self.decay)
        self.updates += 1

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the averages in the task."""
        self._put_in(task)
        self._trained = {}
        self._whole = {name: _whole_of(average).cpu() for name, average in self.averages.items()}

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Leave the weights that are trained in the task."""
        self._take_out(task)

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Evaluate with the averages."""
        self._put_in(task)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Take them out before anyone saves a checkpoint."""
        self._take_out(task)

    def on_validation_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Take them out of a validation that was left, too."""
        self._take_out(task)

    def on_test_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Test with the averages."""
        self._put_in(task)

    def on_test_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Take them out."""
        self._take_out(task)

    def on_predict_model_eval(self, trainer: "Trainer", task: "Task") -> None:
        """Predict with the averages."""
        self._put_in(task)

    def on_predict_model_train(self, trainer: "Trainer", task: "Task") -> None:
        """Take them out."""
        self._take_out(task)

    def _put_in(self, task: "Task") -> None:
        import torch

        if self._trained:
            return
        self._take_over(task)
        with torch.no_grad():
            for name, tensor in self._averaged(task).items():
                if name in self.averages:
                    own = _own(tensor.detach())
                    self._trained[name] = own.clone()
                    own.copy_(_own(self.averages[name]))
        if self.use_buffers:
            task.trainer.strategy.align_buffers()  # a process averages those of its own replicas

    def _take_out(self, task: "Task") -> None:
        import torch

        trained, self._trained = self._trained, {}
        with torch.no_grad():
            for name, tensor in self._averaged(task).items() if trained else ():
                if name in trained:
                    _own(tensor.detach()).copy_(trained[name])

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the averages; under a sharded strategy every rank calls it."""
        whole = self.averaged_state_dict()
        return {"updates": self.updates, "averages": whole} if whole else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over averages."""
        self.updates, self._whole, self.averages = state_dict["updates"], dict(state_dict["averages"]), {}

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Refuse to save the averages in the place of the weights that are trained."""
        if self._trained:
            raise TaskError(
                "save_checkpoint was called within an evaluation, while the task holds the averaged weights of "
                "ExponentialMovingAverage. Call it from on_validation_end on."
            )

    def on_load_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Evaluate with the averages of the checkpoint whose weights are evaluated."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if trainer.stage != "fit":
            self.load_state_dict(state or {"updates": 0, "averages": {}})

    def _take_over(self, task: "Task") -> None:
        """Turn averages that were loaded into those of this process."""
        whole, self._whole = self._whole, {}
        for name, tensor in self._averaged(task).items():
            if name in whole:
                self.averages[name] = _part_of(whole[name], tensor.detach())

    def _averaged(self, task: "Task") -> "dict[str, torch.Tensor]":
        """Return the tensors that are averaged, by name."""
        found: dict[str, torch.Tensor] = dict(task.named_parameters())
        if self.use_buffers:
            found.update(task.named_buffers())
        return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def _own(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return this process's part of a tensor, sharing its memory."""
    from ..trainer.torch_private import local_part

    return local_part(tensor)


def _whole_of(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a tensor whole; of a DTensor every rank calls it."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _part_of(whole: "torch.Tensor", like: Any) -> "torch.Tensor":
    """Return a whole tensor as this process has `like`; of a DTensor every rank calls it."""
    import torch

    with torch.inference_mode(False), torch.no_grad():  # or it could not be updated later
        if not hasattr(like, "full_tensor"):
            return whole.to(like.device, copy=True)
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
