"""Task: the model with its steps and optimizers, under Lightning's names."""

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
    """A model with its steps and optimizers; override what you need (`callbacks/callback.py` lists all hooks in order).

    `training_step` returns a scalar loss, a dict with "loss", or None to skip the batch. With several optimizers it
    returns one loss per optimizer, as a list or as a dict's "loss"; each loss reaches only its own optimizer's
    parameters.
    """

    automatic_optimization = True
    """False: `training_step` calls backward and the optimizers itself."""
    strict_loading = True
    """Whether a checkpoint must have exactly this task's parameters."""

    example_input_array: Any = None

    # --- the run ----------------------------------------------------------------------------------------------------
    @property
    def trainer(self) -> "Trainer":
        """The trainer of the run. Raises RuntimeError before the task is passed to a trainer."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            # not AttributeError, in place of which nn.Module's __getattr__ would say that there is no `trainer`
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer; call trainer.fit(task) first.")
        return trainer

    @trainer.setter
    def trainer(self, trainer: "Trainer | None") -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def current_epoch(self) -> int:
        """Number of the current epoch, from 0."""
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
        """Rank of this process on its machine."""
        return self._of_trainer("local_rank", 0)

    @property
    def logger(self) -> "Logger | None":
        """The first logger, or None."""
        found: Logger | None = self._of_trainer("logger", None)
        return found

    @property
    def loggers(self) -> "list[Logger]":
        """Every logger."""
        found: list[Logger] = self._of_trainer("loggers", [])
        return found

    def _of_trainer(self, name: str, alone: Value) -> Value:
        """Return an attribute of the trainer, or `alone` without a trainer, as when a step is called by hand."""
        trainer = self.__dict__.get("_trainer")
        return alone if trainer is None else getattr(trainer, name)

    @property
    def device(self) -> torch.device:
        """Device for this task's inputs."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is not None and trainer.running:
            return trainer.strategy.device
        return next((tensor.device for tensor in self.parameters()), torch.device("cpu"))

    @property
    def devices(self) -> list[torch.device]:
        """Devices that this task may place its parts on: several under ddp_model_parallel, else `[device]`."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        own: list[torch.device] | None = self.__dict__.get("_devices")
        if own is not None:
            return own
        return (trainer.strategy.parts if trainer is not None and trainer.running else []) or [self.device]

    @devices.setter
    def devices(self, value: Any) -> None:
        self.__dict__["_devices"] = (
            value  # settable, since Lightning's module has no such attribute and tasks use the name
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating point parameter."""
        floating = (tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())
        return next(floating, torch.get_default_dtype())

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.trainer.is_global_zero:
            print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return `data` (tensors, numbers, collections of them) of every rank, or of every rank of `group`. Collective.

        Tensors are stacked, (ranks, ...); if their first dimensions differ between ranks, as for uneven evaluation
        shares, they are returned as a list by rank. `torch.cat(list(...))` joins both. Under a mesh only ranks with
        different batches count. In a step it requires that batches divide evenly into replicas, and in `training_step`
        a process per replica.

        sync_grads: propagate the gradients of all ranks' losses to this rank's tensor, each weighted as its loss is;
        every rank's loss must depend on the gathered data.

        Raises DisagreementError if ranks give tensors of other dtypes or shapes, TaskError in a step in which not all
        ranks take part.
        """
        return self.trainer.all_gather(data, group, sync_grads)

    # --- model and steps --------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the model."""
        raise NotImplementedError(f"{type(self).__name__} has no forward.")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one batch: (batch) or (batch, batch_idx).

        A tensor, or {"loss": loss, "weight": weight} where the loss is no mean over samples: the gradient of a step is
        the mean by these weights, such as numbers of tokens. None leaves the batch out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step.")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch: (batch), (batch, batch_idx) or (batch, batch_idx, dataloader_idx)."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step.")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test one batch: (batch), (batch, batch_idx) or (batch, batch_idx, dataloader_idx)."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step.")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for one batch; default: `self(batch)`."""
        return self(args[0])

    def configure_model(self) -> None:
        """Build modules that are too large for the CPU memory of every process; called once per stage."""

    def configure_blocks(self) -> Sequence[nn.Module] | None:
        """Return the model as a list of blocks, each one's output the next one's input; used to split it into stages.

        None: the one nn.Sequential that has all parameters.
        """
        return None

    def remote_modules(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Return factories of modules too large for every process, by attribute name.

        Strategy ddp_rpc places them in server processes; under any other strategy each process builds them.
        """
        return {}

    def tensor_plan(self) -> Mapping[str, str]:
        """Return how to split layers for tensor parallelism: name patterns to "column", "row" or "replicated".

        Used by strategy mesh with an axis `tensor`; see trainer/strategies/mesh/tensor_plan.py for the words. Without a
        plan of the task that of its models counts, such as `tp_plan` of transformers.
        """
        return {}

    def configure_optimizers(self) -> Any:
        """Return an optimizer, several, or a dict with "optimizer" and "lr_scheduler"; None to train nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers.")

    def make_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
        """Return the optimizers and learning rate schedulers of a fit, read from what configure_optimizers returns.

        Raises TaskError for any other form, and for parameters that are not the task's.
        """
        optimizers, schedulers = read_optimizers(self.configure_optimizers(), self.automatic_optimization)
        fault = unknown_parameters(self, optimizers)
        if self.automatic_optimization and type(self).lr_scheduler_step is Task.lr_scheduler_step:
            fault = fault or unknown_arguments(schedulers)
        if fault:
            raise TaskError(fault)
        return optimizers, schedulers

    def configure_callbacks(self) -> "list[Callback] | Callback":
        """Return additional callbacks; each replaces a callback of the same type given to the trainer."""
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
        """Log a number, a tensor with one value or a torchmetrics.Metric.

        The value stays on its device and is reduced over batches and ranks, weighted by samples, or by `batch_size` (a
        number, or a tensor with one), at the next logging point. The default is `on_step` in `training_step` and
        `on_epoch` elsewhere; with both, it is logged as `name_step` and `name_epoch`. `sync_dist` is not needed, but
        for a sum in a hook that runs once per step or epoch: with it the values of all processes are added up. Raises
        TaskError outside of a run.
        """
        options = prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist
        # not by `self.trainer`: torch.compile would trace on into the metrics, and end with a warning about `.grad`
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
        """Log each item of `dictionary`; the other arguments are those of `log`."""
        options = prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist
        if type(self).log is not Task.log or "log" in self.__dict__:  # overridden by the task
            names = "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "rank_zero_only"
            given: dict[str, Any] = dict(zip((*names, "sync_dist"), options, strict=True))
            given |= {"enable_graph": enable_graph}
            given |= {} if sync_dist_group is None else {"sync_dist_group": sync_dist_group}
            given |= {} if batch_size is None else {"batch_size": batch_size}  # else the override's default applies
            for name, value in dictionary.items():
                self.log(name, value, **given)
            return
        self.trainer.current_run.metrics.log_dict(dictionary, batch_size, options)

    # --- optimization -----------------------------------------------------------------------------------------------
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several, for manual optimization."""
        found = self.trainer.manual_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, a list of several, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return found[0] if len(found) == 1 else found or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward under manual optimization, with loss scaling and gradient reduction."""
        self.trainer.current_run.optimization.manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Require gradients only for the parameters of `optimizer`, until `untoggle_optimizer`."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        before: dict[nn.Parameter, bool] = self.__dict__.setdefault("_toggled", {})
        for parameter in self.parameters():
            # setdefault: a second toggle would else take the first one's False for the task's own; frozen ones stay so
            before.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad_(id(parameter) in own and before[parameter])

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad_(required)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of `optimizer`'s parameters; defaults are the Trainer's arguments."""
        self.trainer.current_run.optimization.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch of a stream, or in a batch that a strategy splits.

        By default the first dimension of its tensors, the number of its graphs or packed sequences, or where these
        differ the items that were collated. Override it where the loader does not tell, or they are no samples. Of
        map-style data the numbers are known. For a loss that is no mean over samples, see `training_step`.
        """
        return require_samples(batch)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before a step; override for custom clipping."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on the weighted and scaled loss."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer. `optimizer_closure` only returns the loss, since backward has run already."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients before a step's first backward."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a learning rate scheduler; `metric` is the monitored value of ReduceLROnPlateau."""
        if hasattr(
            scheduler, "step_update"
        ):  # timm's has a count by steps or by epochs, and leaves the other one alone
            scheduler.step_update(self.global_step, metric)
            scheduler.step(self.current_epoch + 1, metric)
        elif metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # --- what is said of it -----------------------------------------------------------------------------------------
    def describe_batch(self, batch: Any) -> str | None:
        """Return what `legato samples --show` prints of a batch; None: the shapes and ranges of its tensors."""
        return None

    # --- rest -------------------------------------------------------------------------------------------------------
    def freeze(self) -> None:
        """Disable gradients of all parameters, and switch to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Enable gradients of all parameters, and switch to training mode."""
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
        """Build the task from the hyperparameters in a checkpoint and load its weights; `kwargs` override them.

        Also accepts a Lightning `.ckpt`, a `torch.save` file of weights, or a `.safetensors` file.

        Raises CheckpointError for a broken checkpoint or one of another model, naming the parameters that differ.
        """
        from ..trainer.resume.rebuild import rebuild_task

        return rebuild_task(cls, to_location(checkpoint_path), map_location, hparams_file, strict, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the trainer out, so that a copy of a model is not a copy of its run."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_trainer", None)
        return state
