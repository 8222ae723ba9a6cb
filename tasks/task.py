"""Task: a model with its steps and optimizers. Its methods have the same names as Lightning's."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..base.errors import TaskError
from ..base.location import to_location
from ..base.tensors import require_samples
from .data_hooks import DataHooks
from .hyperparameters import Hyperparameters
from .optimizers import SchedulerConfig, read_optimizers, unknown_arguments, unknown_parameters
from .task_hooks import TaskHooks

if TYPE_CHECKING:
    from ..base.contracts import Callback, Logger, Trainer
    from ..trainer.resume.rebuild import MapLocation

TaskType = TypeVar("TaskType", bound="Task")
Value = TypeVar("Value")


class Task(nn.Module, TaskHooks, DataHooks, Hyperparameters):
    """Base class for a model with its steps and optimizers.

    Define `training_step` and `configure_optimizers`, and override other methods as needed. `callbacks/callback.py`
    lists all hooks in call order.

    `training_step` returns a scalar loss, a dict with the key "loss", or None to skip the batch. With multiple
    optimizers, return a list with one loss per optimizer, directly or under the key "loss". Each loss contributes
    gradients only to the parameters of its own optimizer.
    """

    automatic_optimization = True
    """True: the trainer runs the backward pass and steps the optimizers; False: `training_step` does so."""
    strict_loading = True
    """Whether a checkpoint's parameters must match this task's exactly."""

    example_input_array: Any = None

    # --- the run ----------------------------------------------------------------------------------------------------
    @property
    def trainer(self) -> "Trainer":
        """The run's trainer. Raises RuntimeError if the task has not been passed to a trainer."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            # not AttributeError: nn.Module.__getattr__ would replace its message with "no attribute 'trainer'"
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer: call trainer.fit(task) first.")
        return trainer

    @trainer.setter
    def trainer(self, trainer: "Trainer | None") -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def current_epoch(self) -> int:
        """Number of the current epoch, counted from 0."""
        return self._of_trainer("current_epoch", 0)

    @property
    def global_step(self) -> int:
        """Number of completed optimizer steps."""
        return self._of_trainer("global_step", 0)

    @property
    def global_rank(self) -> int:
        """Rank of this process in the run."""
        return self._of_trainer("global_rank", 0)

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes on its machine."""
        return self._of_trainer("local_rank", 0)

    @property
    def logger(self) -> "Logger | None":
        """The first logger, or None."""
        logger: Logger | None = self._of_trainer("logger", None)
        return logger

    @property
    def loggers(self) -> "list[Logger]":
        """All loggers."""
        loggers: list[Logger] = self._of_trainer("loggers", [])
        return loggers

    def _of_trainer(self, name: str, default: Value) -> Value:
        """Return an attribute of the trainer or, without a trainer (for example, in a unit test), `default`."""
        trainer = self.__dict__.get("_trainer")
        return default if trainer is None else getattr(trainer, name)

    @property
    def device(self) -> torch.device:
        """Device for inputs of this task."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is not None and trainer.running:
            return trainer.strategy.device
        return next((tensor.device for tensor in self.parameters()), torch.device("cpu"))

    @property
    def devices(self) -> list[torch.device]:
        """Devices for this task's modules: multiple devices with ddp_model_parallel, otherwise `[device]`."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        devices: list[torch.device] | None = self.__dict__.get("_devices")
        if devices is not None:
            return devices
        return (trainer.strategy.parts if trainer is not None and trainer.running else []) or [self.device]

    @devices.setter
    def devices(self, value: Any) -> None:
        # settable: LightningModule has no such attribute, so tasks may use the name
        self.__dict__["_devices"] = value

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter."""
        floating = (tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())
        return next(floating, torch.get_default_dtype())

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.trainer.is_global_zero:
            print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather `data` from all ranks. All ranks must call this.

        Tensors are stacked along a new first dimension: shape (ranks, ...). If their first dimensions differ between
        ranks, for example because the evaluation data does not divide evenly, the result is a list with one tensor per
        rank. `torch.cat(list(...))` works for both forms. Under a mesh, ranks that share a batch contribute a single
        tensor. If you call this method in a step, batches must divide evenly among replicas. In `training_step`, each
        process must also run exactly one replica.

        Args:
            data: A tensor, a number, or a collection of them.
            group: Process group to gather from. Default: all ranks.
            sync_grads: Propagate the gradients of all ranks' losses to this rank's tensor. Each gradient is scaled by
                the weight of its loss. Every rank's loss must depend on the gathered data.

        Raises DisagreementError if dtypes or any other dimensions differ between ranks, and TaskError if not all ranks
        take part in the step.
        """
        return self.trainer.all_gather(data, group, sync_grads)

    # --- model and steps --------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        raise NotImplementedError(f"{type(self).__name__} has no forward.")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss for a batch. Parameters: (batch) or (batch, batch_idx).

        Return a scalar tensor that is a mean over samples. If the loss is a mean over other units, such as tokens,
        return {"loss": loss, "weight": number_of_tokens}. A step's gradient is then the weighted mean of its batches'
        gradients. Return None to skip the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step.")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch. Parameters: (batch), (batch, batch_idx) or (batch, batch_idx, dataloader_idx)."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step.")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a test batch. Parameters: (batch), (batch, batch_idx) or (batch, batch_idx, dataloader_idx)."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step.")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch. The default is `self(batch)`."""
        return self(args[0])

    def configure_model(self) -> None:
        """Build modules that are too large to fit in each process's CPU memory. This is called once per stage."""

    def configure_blocks(self) -> Sequence[nn.Module] | None:
        """Return the model as a list of blocks, each of which receives the previous block's output.

        Pipeline parallelism splits the list into stages. None (default): use the blocks of the nn.Sequential that
        contains all parameters.
        """
        return None

    def remote_modules(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return factories, by attribute name, for modules that are too large to replicate in every process.

        The ddp_rpc strategy places the modules in server processes. With other strategies, each process builds them.
        """
        return {}

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan, a mapping from module name patterns to "column", "row" or "replicated".

        The mesh strategy applies the plan along its `tensor` axis; trainer/strategies/mesh/tensor_plan.py explains the
        values. If the plan is empty, Legato uses the models' own plans, such as `tp_plan` in Hugging Face Transformers.
        """
        return {}

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list of them, a dict with "optimizer" and "lr_scheduler", or None for no optimizer."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers.")

    def make_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
        """Return the optimizers and learning rate schedulers for fit, parsed from `configure_optimizers`.

        Raises TaskError if that method's return value has an unknown form, or if an optimizer has parameters that do
        not belong to the task.
        """
        optimizers, schedulers = read_optimizers(self.configure_optimizers(), self.automatic_optimization)
        fault = unknown_parameters(self, optimizers)
        if self.automatic_optimization and type(self).lr_scheduler_step is Task.lr_scheduler_step:
            fault = fault or unknown_arguments(schedulers)
        if fault:
            raise TaskError(fault)
        return optimizers, schedulers

    def configure_callbacks(self) -> "list[Callback] | Callback":
        """Return additional callbacks. Each one replaces any callback of the same type in the trainer."""
        return []

    # --- logged values ----------------------------------------------------------------------------------------------
    def log(  # noqa: PLR0913 (Lightning's signature)
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | Tensor | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number, a tensor with a single value, or a torchmetrics.Metric.

        The value is not copied to the host. At the next logging point, it is reduced over batches and ranks, weighted
        by the number of samples.

        Args:
            name: Name of the metric.
            value: Value for this batch.
            prog_bar: Show the metric in the progress bar.
            logger: Write the metric to the loggers. Default: True.
            on_step: Log at logging points. Default: True in `training_step`, False elsewhere.
            on_epoch: Log the reduction over the epoch. Default: in `training_step`, True only if `on_step` is False;
                elsewhere, True. If both are True, the metric is logged as `name_step` and `name_epoch`.
            reduce_fx: Reduction over batches and ranks: "mean", "sum", "min", "max" or a function.
            sync_dist: Sum the values over all processes. Needed only with reduce_fx="sum" in a hook that runs once per
                step or epoch.
            add_dataloader_idx: With multiple loaders, append `/dataloader_idx_N` to the name.
            batch_size: Weight to use instead of the number of samples: a number or a tensor with a single value.
            rank_zero_only: Log only rank 0's value.
            enable_graph, sync_dist_group, metric_attribute: Accepted for compatibility with Lightning; no effect.

        Raises TaskError outside a run.
        """
        options = prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist
        # not through `self.trainer`: torch.compile would trace into the metrics and then warn about `.grad`
        trainer: Trainer | None = self.__dict__.get("_trainer")
        run = None if trainer is None else trainer.run
        (self.trainer.current_run if run is None else run).metrics.log(name, value, batch_size, options)

    def log_dict(  # noqa: PLR0913 (Lightning's signature)
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | Tensor | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log each item of `dictionary`. See `log` for the other arguments."""
        options = prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist
        if type(self).log is not Task.log or "log" in self.__dict__:  # the task overrides `log`
            names = "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "rank_zero_only"
            kwargs: dict[str, Any] = dict(zip((*names, "sync_dist"), options, strict=True))
            kwargs |= {"enable_graph": enable_graph}
            kwargs |= {} if sync_dist_group is None else {"sync_dist_group": sync_dist_group}
            # if it is left out, the override's default applies
            kwargs |= {} if batch_size is None else {"batch_size": batch_size}
            for name, value in dictionary.items():
                self.log(name, value, **kwargs)
            return
        self.trainer.current_run.metrics.log_dict(dictionary, batch_size, options)

    # --- optimization -----------------------------------------------------------------------------------------------
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of all optimizers, for manual optimization."""
        optimizers = self.trainer.manual_optimizers if use_pl_optimizer else self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, a list if there are multiple schedulers, or None if there are none."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass for manual optimization, with loss scaling and gradient reduction."""
        self.trainer.current_run.optimization.manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Disable gradients for parameters that `optimizer` does not update. `untoggle_optimizer` restores them."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        before: dict[nn.Parameter, bool] = self.__dict__.setdefault("_toggled", {})
        for parameter in self.parameters():
            # setdefault: a second toggle must not record the first toggle's False
            before.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad_(id(parameter) in ids and before[parameter])

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad_(required)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of `optimizer`'s parameters. Defaults are the Trainer arguments with the same names."""
        self.trainer.current_run.optimization.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch.

        This method is called for iterable datasets and for batches that a strategy splits. By default, it returns the
        size of the first dimension of the batch's tensors, or the number of graphs or packed sequences in the batch. If
        the tensors differ in size, it returns the number of items that the loader collated. Override this method if the
        default is wrong for your batches. For a loss that is not a mean over samples, see `training_step`.
        """
        return require_samples(batch)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before a step. Override this method for custom clipping."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass on the weighted and scaled loss."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer after computing gradients. The first `optimizer_closure()` call returns the loss."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Zero the gradients before the first backward pass of a step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a learning rate scheduler. `metric` is the value that ReduceLROnPlateau monitors."""
        # a timm scheduler counts either steps or epochs, and ignores calls for the other
        if hasattr(scheduler, "step_update"):
            scheduler.step_update(self.global_step, metric)
            scheduler.step(self.current_epoch + 1, metric)
        elif metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # --- display ----------------------------------------------------------------------------------------------------
    def describe_batch(self, batch: Any) -> str | None:
        """Return a description of a batch for `legato samples --show`, or None to show tensor shapes and ranges."""
        return None

    # --- rest -------------------------------------------------------------------------------------------------------
    def freeze(self) -> None:
        """Disable gradients for all parameters and switch to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Enable gradients for all parameters and switch to training mode."""
        self.requires_grad_(True)
        self.train()

    @classmethod
    def load_from_checkpoint(
        cls: type[TaskType],
        checkpoint_path: str | Path,
        map_location: "MapLocation" = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> TaskType:
        """Build the task from the hyperparameters in a checkpoint and load its weights.

        Args:
            checkpoint_path: A checkpoint directory, a Lightning `.ckpt`, a `torch.save` file of weights, or a
                `.safetensors` file.
            map_location: Device for the weights, as in torch.load.
            hparams_file: YAML file of hyperparameters that override those in the checkpoint.
            strict: Whether the parameters must match exactly. Default: the task's `strict_loading`.
            kwargs: Arguments for `__init__` that override the saved hyperparameters.

        Raises CheckpointError if the checkpoint is damaged or belongs to a different model. In the latter case, the
        message lists the parameters that differ.
        """
        from ..trainer.resume.rebuild import rebuild_task

        return rebuild_task(cls, to_location(checkpoint_path), map_location, hparams_file, strict, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer, so that copying a task does not copy its run."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_trainer", None)
        return state
