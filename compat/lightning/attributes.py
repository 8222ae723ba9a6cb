"""TrainerAttributes: Trainer attributes that programs read, with Lightning's names and values."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import CombinedLoader, Trainer
from ...loggers.logger import Logger
from ...tasks.data_hooks import DataHooks
from ...tasks.task import Task
from ...trainer.hooks import overrides
from ...trainer.metrics.reduce import sort_out, total
from ...trainer.optimization.optimization import ManualOptimizer
from ...trainer.setup.data import LOADERS, make_training_data
from .accelerators import AcceleratorConnector
from .aliases import alias
from .loggers import WithoutFiles
from .optimizers import LightningOptimizer
from .placeholders import OwnParts
from .plugins import Precision
from .states import TrainerState, TrainerStatus

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ...callbacks.callback import Callback
    from ...trainer.state import State
    from .module import LightningModule


class Values(dict[str, Any]):
    """A dict of values keyed by name. Copying or pickling it creates a plain dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class LoggedMetrics(Values):
    """The values passed to loggers, as tensors.

    Values that only rank 0 logs are not shared between ranks. They are added only to rank 0's `callback_metrics`.
    """

    def __init__(self, trainer: "TrainerAttributes", values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.owner = trainer  # not named `trainer`, because the Tuner searches for an attribute with that name
        self.of_rank_0: set[str] = set()

    def update(self, values: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Replace the values."""
        # Legato publishes logged values last
        self.of_rank_0 |= values.keys() - self.owner.agreed_metrics.keys() - self.owner._own_values.keys()
        super().update({name: torch.as_tensor(value) for name, value in values.items()})
        self.owner.show_local({name: float(values[name]) for name in self.of_rank_0 & values.keys()})


class MetricsOfProcess(Values):
    """The values that all ranks share, updated with newer values from this process.

    Values that a program sets are treated as shared.
    """

    def __init__(self, agreed: dict[str, Any], local: Mapping[str, Any]) -> None:
        super().__init__({**agreed, **local})
        self.agreed = agreed

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.agreed[name] = value

    def update(self, *values: Any, **named: Any) -> None:
        """Set values."""
        for name, value in dict(*values, **named).items():
            self[name] = value


class TrainerAttributes(OwnParts, Trainer):
    """Attributes that have Lightning's values before, during and after a run."""

    epoch_is_cut = False
    """Whether training stopped in the middle of an epoch; Lightning counts that epoch."""
    in_epoch = False
    """Whether a training epoch is running."""
    _model_registry = None  # private in Lightning, like the next two; programs read them
    _detect_anomaly = alias("detect_anomaly")
    logged_ahead = 0
    """Number of steps by which the x-axis of loggers is ahead of the completed steps."""
    _own_values: "dict[str, tuple[Tensor, Tensor | None]]"
    """Values in callback_metrics that only this process has, by name, each with the shared value that it replaces."""
    fitted: "tuple[list[Optimizer], list[Any]]" = ([], [])
    """Optimizers and schedulers of the latest fit."""
    _handles: "tuple[Any, list[LightningOptimizer]]" = (None, [])
    """The latest run's optimization, and the optimizers that its module receives."""
    predictions: list[Any]
    """The result of the latest call to `predict`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the optimizers of the latest fit, which other processes do not need."""
        return {name: value for name, value in vars(self).items() if name not in ("fitted", "_handles")}

    # --- state ------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> TrainerState:
        """The loop state, including `fn`, `stage` and `status`."""
        state: TrainerState = self.__dict__["_state"]
        return state

    @state.setter
    def state(self, value: "State") -> None:
        self.__dict__["_state"] = TrainerState.of(value, self)

    @property
    def interrupted(self) -> bool:
        """Whether the last call ended with an exception."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def evaluating(self) -> bool:
        """Whether validation, a sanity check or a test is running."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def received_sigterm(self) -> bool:
        """Whether the run has received a stop signal."""
        return self.run is not None and bool(self.run.preemption.signal)

    @property
    def current_epoch(self) -> int:
        """The index of the current epoch, counted from 0; after a run, the number of epochs started."""
        # Lightning counts an epoch that stopped in the middle; Legato does not, because a resumed run continues it
        return self.state.epoch + self.epoch_is_cut

    @property
    def global_step(self) -> int:
        """Number of optimizer steps; with manual optimization, the number of calls to `step`."""
        # in manual optimization, Legato counts batches and Lightning counts calls to `step`
        manual = self.run is not None and not self.run.task.automatic_optimization
        return self.state.optimizer_steps if manual else self.state.global_step

    def batches_done(self) -> tuple[int, int, bool]:
        """Return the number of completed batches in the epoch and the run, and whether another batch is in progress."""
        state, run = self.state, self.run
        inside = run is not None and run.loop.open and run.metrics.step == state.global_step
        more = max(0, run.metrics.batches_of_step - 1) if inside and run is not None else 0
        in_epoch = state.epoch_rounds + more
        # between epochs, Lightning still shows the batches of the completed epoch
        if state.rounds and not in_epoch and not inside and self.num_training_batches != float("inf"):
            in_epoch = int(self.num_training_batches)
        return in_epoch, state.rounds + more, inside

    @property
    def step_is_ending(self) -> bool:
        """Whether the current step has already been counted, as in on_train_batch_end and during validation in fit."""
        run, state = self.run, self.state
        if run is None or not self.in_epoch or not state.epoch_steps:
            return False
        metrics = run.metrics
        in_hooks = metrics.stage == "train" and metrics.in_step and metrics.step == state.global_step - 1
        return in_hooks or run.loop.doing == "validation"

    def evaluation_batches_done(self, doing: str) -> int:
        """Return the number of batches that the given evaluation has completed."""
        return 0 if self.run is None else self.run.metrics.batches.get(doing, 0)

    @property
    def is_last_batch(self) -> bool:
        """Whether the epoch's last batch is in progress or has completed."""
        if self.run is None:
            return False
        return (self.state.rounds > 0 and not (self.in_epoch or self.epoch_is_cut)) or super().is_last_batch

    # --- the run's parts --------------------------------------------------------------------------------------------
    @property
    def lightning_module(self) -> "LightningModule":
        """The run's module, or None before a run."""
        module: LightningModule = None if self.run is None else self.run.task  # type: ignore[assignment]
        return module

    model = alias("lightning_module")

    @property
    def datamodule(self) -> Any:
        """The run's data module, or the data module that was set; None if there is neither."""
        datamodule = None if self.run is None else self.run.datamodule
        return self.__dict__.get("_datamodule") if datamodule is None else datamodule

    @datamodule.setter
    def datamodule(self, value: Any) -> None:
        self.__dict__["_datamodule"] = value

    @property
    def optimizers(self) -> "list[Optimizer]":
        """The run's optimizers or, if there is no run, those of the latest fit. Programs can set them during a run."""
        # the optimizers of the latest fit can be read during a later test, which has no optimizers
        current = [] if self.run is None else super().optimizers
        return current or list(self.fitted[0])

    @optimizers.setter
    def optimizers(self, value: "list[Optimizer]") -> None:
        self.current_run.optimization.take_optimizers(value)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The run's schedulers or, if there is no run, those of the latest fit."""
        current = [] if self.run is None else super().lr_scheduler_configs
        return list(current or self.fitted[1])

    @property
    def manual_optimizers(self) -> list[ManualOptimizer]:
        """The optimizers of the run or the latest fit, wrapped in the form that the module receives."""
        optimizers = [] if self.run is None else super().optimizers
        if not optimizers:
            return [LightningOptimizer(optimizer) for optimizer in self.fitted[0]]
        optimization = self.current_run.optimization
        # each call returns the same objects, because programs set functions on them
        if self._handles[0] is not optimization or [handle.optimizer for handle in self._handles[1]] != optimizers:
            self._handles = optimization, [LightningOptimizer(optimizer, optimization) for optimizer in optimizers]
        return list(self._handles[1])

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        loggers: list[Logger] = self.__dict__.get("_loggers", [])
        return loggers

    @loggers.setter
    def loggers(self, value: list[Logger] | None) -> None:
        self.__dict__["_loggers"] = list(value or [])

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        if "_loggers" not in self.__dict__:
            return self.__dict__.get("_wanted_logger")
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, value: Any) -> None:
        if "_loggers" not in self.__dict__:
            self.__dict__["_wanted_logger"] = value
        elif value not in self.loggers[:1]:
            self.loggers = [value] if value else []

    @property
    def log_dir(self) -> str | None:
        """The first logger's folder, or its `save_dir` if it writes no files; the root folder if there is no logger."""
        if not self.loggers:
            return str(self.default_root_dir)
        first = self.loggers[0]
        folder = first.save_dir if isinstance(first, WithoutFiles) else first.log_dir or first.save_dir
        return None if folder is None else str(folder)

    @property
    def ckpt_path(self) -> str | Path | None:
        """The checkpoint that the run started from, or the one that was set for the next run."""
        path: str | Path | None = self.__dict__.get("_ckpt_path")
        source = getattr(self.run, "source", None)  # unknown until the call's processes exit
        return str(source) if path is None and source is not None else path

    @ckpt_path.setter
    def ckpt_path(self, value: str | Path | None) -> None:
        self.__dict__["_ckpt_path"] = value

    # --- values -----------------------------------------------------------------------------------------------------
    @property
    def callback_metrics(self) -> "dict[str, Tensor]":
        """The latest logged values, by name. Until the next logging point, new values are local to this process."""
        agreed = self.newest_agreed()
        # each publication creates new tensors: while the shared tensor is the same, the local value is newer
        local = {name: value for name, (value, before) in self._own_values.items() if agreed.get(name) is before}
        return MetricsOfProcess(agreed, local) if local else agreed

    def newest_agreed(self) -> "dict[str, Tensor]":
        """Return the values shared by all ranks, for joint decisions. With one process, these are the latest values."""
        self._read_newest()
        return self.agreed_metrics

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The latest values passed to loggers, by name, including those from the latest batch."""
        self._read_newest()
        metrics: dict[str, Any] = self.__dict__["_logged_metrics"]
        return metrics

    @logged_metrics.setter
    def logged_metrics(self, value: dict[str, Any]) -> None:
        self.__dict__["_logged_metrics"], self._own_values = LoggedMetrics(self, value), {}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest values shown in progress bars, by name, including those from the latest batch."""
        self._read_newest()
        metrics: dict[str, float] = self.__dict__["_progress_bar_metrics"]
        return metrics

    @progress_bar_metrics.setter
    def progress_bar_metrics(self, value: dict[str, float]) -> None:
        self.__dict__["_progress_bar_metrics"] = value

    def show_local(self, values: "dict[str, float]") -> None:
        """Add values to `callback_metrics` in this process only."""
        tensors = {name: torch.tensor(value) for name, value in values.items()}
        if self.world_size == 1:
            self.agreed_metrics.update(tensors)
        else:
            self._own_values.update({name: (tensor, self.agreed_metrics.get(name)) for name, tensor in tensors.items()})

    def _read_newest(self) -> None:
        """Read the values that this process has logged since the last call, except those from evaluation steps."""
        run = self.run
        if run is None or run.metrics.shares or run.metrics.series is None:
            return
        metrics = run.metrics
        if metrics.in_step and not (self.training and metrics.stage == "train"):
            return
        metrics.flush()
        values, of_step = [], metrics.in_step
        for series in (metrics.series or {}).values():
            # a value from before the latest logging point is already published, reduced across all ranks
            sums = (series.step if series.step_at >= self.state.logged_at else {}) if of_step else series.sums
            if sums and series.in_step is of_step and not (series.synced and metrics.processes > 1):
                values.append((series, total(series.kind, sums)))
        reduced = sort_out(values, "_step" if of_step else "_epoch")
        self.show_local(reduced.all)
        if metrics.processes == 1:
            newest = [item for item in values if not of_step or item[0].step_at == metrics.step]
            measured = sort_out(newest, "_step" if of_step else "_epoch").all
            metrics.measured_at.update(dict.fromkeys(measured, self.state.global_step))
        self.__dict__["_progress_bar_metrics"].update(reduced.progress_bar)
        self.__dict__["_logged_metrics"].update(reduced.loggers)

    # --- data -------------------------------------------------------------------------------------------------------
    def _loaders(self, word: str) -> Any:
        """Return a stage's loaders as the program passed them. A CombinedLoader is unwrapped."""
        loaders = None if self.run is None else self.run.data.loaders.get(word)
        if loaders is None and self.run is not None and word in self.lengths and not self.run.loop.open:
            source = self.run.datamodule or self.run.task  # the worker processes that held the loaders have exited
            loader = self.run.request_loaders.get(word)  # `is not None`, because stream loaders have no truth value
            loaders = self.run.data.loaders[word] = getattr(source, LOADERS[word])() if loader is None else loader
        return loaders.iterables if isinstance(loaders, CombinedLoader) else loaders

    @property
    def train_dataloader(self) -> Any:
        """The training loader, or None if it has not been created yet."""
        return self._loaders("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders, or None if they have not been created yet."""
        return self._loaders("validation")

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders, or None if they have not been created yet."""
        return self._loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders, or None if they have not been created yet."""
        return self._loaders("predict")

    @property
    def num_training_batches(self) -> int | float:
        """Number of batches in an epoch; infinity if the number is unknown, for example before a run."""
        return float("inf") if self.run is None else super().num_training_batches

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Number of sanity-check batches for each validation loader."""
        # Legato's limit counts the batches of all replicas; Lightning's limit counts the batches of each replica
        most = self.num_sanity_val_steps
        rounds = most if most == float("inf") else -(-most // self.state.replicas)
        return [min(rounds, count) for count in self.num_val_batches]

    @property
    def val_check_batch(self) -> int | float | None:
        """Number of batches between validation runs; None before a run or if validation is scheduled by time."""
        if self.run is None or self.run.data.validation_seconds is not None:
            return None
        rounds = self.run.data.validation_rounds
        return self.num_training_batches if rounds is None else rounds

    @property
    def enable_validation(self) -> bool:
        """Whether fit runs validation. Before the loaders exist, this depends on whether fit can obtain loaders."""
        run, task = self.run, self.lightning_module
        if run is None or not self.limit_val_batches:
            return False
        if "validation" in run.data.evaluations:
            return True
        source = self.datamodule or task
        has_loader = run.request_loaders.get("validation") is not None or overrides(source, DataHooks, "val_dataloader")
        return run.stage == "fit" and has_loader and overrides(task, Task, "validation_step")

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of steps in the entire run. Creates the training loader if it does not exist yet."""
        # in configure_optimizers, the step count of an unlimited run is not known yet
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        run = self.run
        if run is not None and run.stage == "fit" and run.loop.open and run.data.training is None:
            make_training_data(run)
            run.request_loaders["train"] = run.data.loaders["train"]
        steps = self.steps_per_epoch
        if steps == float("inf"):
            return self.max_steps
        total = int(steps) * max(int(self.max_epochs or 0), 1)
        return total if self.max_steps == -1 else min(total, self.max_steps)

    @property
    def world_size(self) -> int:
        """The number of processes, which is available even before they start."""
        # before the processes start, the strategy describes a single process
        size = self.strategy.place.world_size
        if size > 1 or self.running:
            return size
        return max(1, self.strategy.local_processes(self.device_list) * self.num_nodes)

    # --- processes and devices --------------------------------------------------------------------------------------
    @property
    def _accelerator_connector(self) -> AcceleratorConnector:
        """The selected devices. Third-party packages read this private attribute."""
        connector = AcceleratorConnector(self.accelerator, self.devices, self.num_nodes)
        connector.strategy, connector.use_distributed_sampler = self.strategy, bool(self.use_distributed_sampler)
        connector.cluster_environment = getattr(self.strategy, "cluster_environment", None)
        return connector

    @property
    def device_ids(self) -> list[int]:
        """The device indices on this machine."""
        return [device.index or index for index, device in enumerate(self.device_list)]

    @property
    def _val_check_time_interval(self) -> float | None:
        return None if self.run is None else self.run.data.validation_seconds

    @property
    def precision_plugin(self) -> Precision:
        """The run's precision, including its gradient scaler."""
        precision = Precision()
        precision.precision, precision.scaler = str(self.precision), self.strategy.precision.scaler
        return precision

    scaler = alias("strategy.precision.scaler")
    """The gradient scaler for float16, or None."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments for a DistributedSampler; None if there is only one process."""
        # a DistributedSampler with one replica would still reshuffle a loader
        if self.world_size == 1:
            return None
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def early_stopping_callbacks(self) -> "list[Callback]":
        """All EarlyStopping callbacks."""
        from ...callbacks.early_stopping import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]
