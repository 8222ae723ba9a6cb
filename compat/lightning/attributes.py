"""TrainerAttributes: what a program reads of a Trainer, under Lightning's names and with its answers."""

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
    """Values by name, which are a plain dict in copies and in other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class LoggedMetrics(Values):
    """Values that loggers are given, as tensors.

    Those that are not agreed on, since rank 0 alone logs them, are shown in `callback_metrics` on this rank.
    """

    def __init__(self, trainer: "TrainerAttributes", values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.owner = trainer  # not `trainer`, by which the Tuner knows parts of a trainer that it copies
        self.of_rank_0: set[str] = set()

    def update(self, values: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take new values."""
        # Legato has published all other values before it publishes those of loggers
        self.of_rank_0 |= values.keys() - self.owner.agreed_metrics.keys() - self.owner._own_values.keys()
        super().update({name: torch.as_tensor(value) for name, value in values.items()})
        self.owner.take_own({name: float(values[name]) for name in self.of_rank_0 & values.keys()})


class MetricsOfProcess(Values):
    """The agreed values, and in place of some newer ones of this process; what a program puts here is agreed."""

    def __init__(self, agreed: dict[str, Any], own: Mapping[str, Any]) -> None:
        super().__init__({**agreed, **own})
        self.agreed = agreed

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.agreed[name] = value

    def update(self, *values: Any, **named: Any) -> None:
        """Put values here."""
        for name, value in dict(*values, **named).items():
            self[name] = value


class TrainerAttributes(OwnParts, Trainer):
    """Attributes that answer before, during and after a run as Lightning's do."""

    epoch_is_cut = False
    """Whether training has ended within an epoch, which Lightning counts."""
    in_epoch = False
    """Whether an epoch of training is under way."""
    _model_registry = None  # private in Lightning, as the next two are, and read by programs
    _detect_anomaly = alias("detect_anomaly")
    logged_ahead = 0
    """Steps by which loggers' x-axis is ahead of the steps done."""
    _own_values: "dict[str, tuple[Tensor, Tensor | None]]"
    """Values of callback_metrics that only this process has, each with the agreed one of then, by name."""
    fitted: "tuple[list[Optimizer], list[Any]]" = ([], [])
    """Optimizers and schedulers of the newest fit."""
    _handles: "tuple[Any, list[LightningOptimizer]]" = (None, [])
    """The newest run's optimization, and what the module gets of its optimizers."""
    predictions: list[Any]
    """Result of the newest predict."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the optimizers of the newest fit, which other processes do not need."""
        return {name: value for name, value in vars(self).items() if name not in ("fitted", "_handles")}

    # --- state ------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> TrainerState:
        """The loop state, with `fn`, `stage` and `status`."""
        found: TrainerState = self.__dict__["_state"]
        return found

    @state.setter
    def state(self, value: "State") -> None:
        self.__dict__["_state"] = TrainerState.of(value, self)

    @property
    def interrupted(self) -> bool:
        """Whether the last call ended by an exception."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def evaluating(self) -> bool:
        """Whether a validation, the sanity check or a test is under way."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def received_sigterm(self) -> bool:
        """Whether the run was told to end."""
        return self.run is not None and bool(self.run.preemption.signal)

    @property
    def current_epoch(self) -> int:
        """The epoch that is under way, from 0; after a run the number of those begun."""
        # Lightning counts an epoch that was stopped within; Legato does not, as a resume goes on in it
        return self.state.epoch + self.epoch_is_cut

    @property
    def global_step(self) -> int:
        """Steps of optimizers: in manual optimization the calls of their `step`."""
        # in manual optimization Legato counts batches, and Lightning calls of optimizers
        manual = self.run is not None and not self.run.task.automatic_optimization
        return self.state.optimizer_steps if manual else self.state.global_step

    def batches_done(self) -> tuple[int, int, bool]:
        """Return how many batches are done, in this epoch and in the run, and whether another one is under way."""
        state, run = self.state, self.run
        inside = run is not None and run.loop.open and run.metrics.step == state.global_step
        more = max(0, run.metrics.batches_of_step - 1) if inside and run is not None else 0
        in_epoch = state.epoch_rounds + more
        if state.rounds and not in_epoch and not inside and self.num_training_batches != float("inf"):
            in_epoch = int(self.num_training_batches)
        return in_epoch, state.rounds + more, inside

    @property
    def step_is_ending(self) -> bool:
        """Whether a step is counted, and its last batch is not: in on_train_batch_end, and in validations of a fit."""
        run, state = self.run, self.state
        if run is None or not self.in_epoch or not state.epoch_steps:
            return False
        metrics = run.metrics
        in_hooks = metrics.stage == "train" and metrics.in_step and metrics.step == state.global_step - 1
        return in_hooks or run.loop.doing == "validation"

    def evaluation_batches_done(self, doing: str) -> int:
        """Return how many batches of an evaluation are done."""
        return 0 if self.run is None else self.run.metrics.batches.get(doing, 0)

    @property
    def is_last_batch(self) -> bool:
        """Whether the epoch's last batch is under way, or done."""
        if self.run is None:
            return False
        return (self.state.rounds > 0 and not (self.in_epoch or self.epoch_is_cut)) or super().is_last_batch

    # --- the run's parts --------------------------------------------------------------------------------------------
    @property
    def lightning_module(self) -> "LightningModule":
        """The module of the run; None before one."""
        found: LightningModule = None if self.run is None else self.run.task  # type: ignore[assignment]
        return found

    model = alias("lightning_module")

    @property
    def datamodule(self) -> Any:
        """The data module of the run, or one that was set; None without."""
        own = None if self.run is None else self.run.datamodule
        return self.__dict__.get("_datamodule") if own is None else own

    @datamodule.setter
    def datamodule(self, value: Any) -> None:
        self.__dict__["_datamodule"] = value

    @property
    def optimizers(self) -> "list[Optimizer]":
        """The optimizers of the run, which may be set within one, or of the newest fit."""
        # those of the newest fit stay readable in a later test, whose run has none
        own = [] if self.run is None else super().optimizers
        return own or list(self.fitted[0])

    @optimizers.setter
    def optimizers(self, value: "list[Optimizer]") -> None:
        self.current_run.optimization.take_optimizers(value)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers of the run, or of the newest fit."""
        own = [] if self.run is None else super().lr_scheduler_configs
        return list(own or self.fitted[1])

    @property
    def manual_optimizers(self) -> list[ManualOptimizer]:
        """The optimizers of the run as the module gets them, or of the newest fit."""
        optimizers = [] if self.run is None else super().optimizers
        if not optimizers:
            return [LightningOptimizer(one) for one in self.fitted[0]]
        optimization = self.current_run.optimization
        # the same ones at each call: programs put functions of their own into them
        if self._handles[0] is not optimization or [one.optimizer for one in self._handles[1]] != optimizers:
            self._handles = optimization, [LightningOptimizer(one, optimization) for one in optimizers]
        return list(self._handles[1])

    @property
    def loggers(self) -> list[Logger]:
        """Every logger."""
        found: list[Logger] = self.__dict__.get("_loggers", [])
        return found

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
        """The folder of the first logger, or its save_dir where it writes no files; the root without one."""
        if not self.loggers:
            return str(self.default_root_dir)
        first = self.loggers[0]
        found = first.save_dir if isinstance(first, WithoutFiles) else first.log_dir or first.save_dir
        return None if found is None else str(found)

    @property
    def ckpt_path(self) -> str | Path | None:
        """The checkpoint that the run began from, or one that was set for the next run."""
        own: str | Path | None = self.__dict__.get("_ckpt_path")
        source = getattr(self.run, "source", None)  # which a call has once its processes have met
        return str(source) if own is None and source is not None else own

    @ckpt_path.setter
    def ckpt_path(self, value: str | Path | None) -> None:
        self.__dict__["_ckpt_path"] = value

    # --- values -----------------------------------------------------------------------------------------------------
    @property
    def callback_metrics(self) -> "dict[str, Tensor]":
        """The newest value of each name, up to the newest batch; until the next logging point of this process."""
        agreed = self.newest_agreed()
        # each publish makes new tensors, so that an own value is the newest one while the agreed tensor is the same
        own = {name: value for name, (value, before) in self._own_values.items() if agreed.get(name) is before}
        return MetricsOfProcess(agreed, own) if own else agreed

    def newest_agreed(self) -> "dict[str, Tensor]":
        """Return the values that every rank has, for decisions that all ranks take; on one process up to the newest."""
        self._read_newest()
        return self.agreed_metrics

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The newest value of each name that loggers are given, up to the newest batch."""
        self._read_newest()
        found: dict[str, Any] = self.__dict__["_logged_metrics"]
        return found

    @logged_metrics.setter
    def logged_metrics(self, value: dict[str, Any]) -> None:
        self.__dict__["_logged_metrics"], self._own_values = LoggedMetrics(self, value), {}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest value of each name that progress bars show, up to the newest batch."""
        self._read_newest()
        found: dict[str, float] = self.__dict__["_progress_bar_metrics"]
        return found

    @progress_bar_metrics.setter
    def progress_bar_metrics(self, value: dict[str, float]) -> None:
        self.__dict__["_progress_bar_metrics"] = value

    def take_own(self, values: "dict[str, float]") -> None:
        """Show values in `callback_metrics` that other processes, where there are any, do not have."""
        tensors = {name: torch.tensor(value) for name, value in values.items()}
        if self.world_size == 1:
            self.agreed_metrics.update(tensors)
        else:
            self._own_values.update({name: (one, self.agreed_metrics.get(name)) for name, one in tensors.items()})

    def _read_newest(self) -> None:
        """Read what this process has logged since the last look, but for what the steps of an evaluation have."""
        run = self.run
        if run is None or run.metrics.shares or run.metrics.series is None:
            return
        metrics = run.metrics
        if metrics.in_step and not (self.training and metrics.stage == "train"):
            return
        metrics.flush()
        values, of_step = [], metrics.in_step
        for series in (metrics.series or {}).values():
            # a value of a step before the newest point is there already, over all ranks
            sums = (series.step if series.step_at >= self.state.logged_at else {}) if of_step else series.sums
            if sums and series.in_step is of_step and not (series.synced and metrics.processes > 1):
                values.append((series, total(series.kind, sums)))
        reduced = sort_out(values, "_step" if of_step else "_epoch")
        self.take_own(reduced.all)
        if metrics.processes == 1:
            newest = [item for item in values if not of_step or item[0].step_at == metrics.step]
            measured = sort_out(newest, "_step" if of_step else "_epoch").all
            metrics.measured_at.update(dict.fromkeys(measured, self.state.global_step))
        self.__dict__["_progress_bar_metrics"].update(reduced.progress_bar)
        self.__dict__["_logged_metrics"].update(reduced.loggers)

    # --- data -------------------------------------------------------------------------------------------------------
    def _loaders(self, word: str) -> Any:
        """Return the loaders of one kind as they were given; those in a CombinedLoader without it."""
        found = None if self.run is None else self.run.data.loaders.get(word)
        if found is None and self.run is not None and word in self.lengths and not self.run.loop.open:
            source = self.run.datamodule or self.run.task  # after workers, whose loaders ended with them
            given = self.run.request_loaders.get(
                word
            )  # held against None: one of a stream has no length, and so no truth value
            found = self.run.data.loaders[word] = getattr(source, LOADERS[word])() if given is None else given
        return found.iterables if isinstance(found, CombinedLoader) else found

    @property
    def train_dataloader(self) -> Any:
        """The training loader; None before there is one."""
        return self._loaders("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders; None before there are any."""
        return self._loaders("validation")

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders; None before there are any."""
        return self._loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders; None before there are any."""
        return self._loaders("predict")

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch; infinity where that is not known, as before a run."""
        return float("inf") if self.run is None else super().num_training_batches

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check."""
        # the limit counts batches of all replicas, Lightning's those of each
        most = self.num_sanity_val_steps
        rounds = most if most == float("inf") else -(-most // self.state.replicas)
        return [min(rounds, count) for count in self.num_val_batches]

    @property
    def val_check_batch(self) -> int | float | None:
        """After how many batches validation runs; None before a run, and where it runs by time."""
        if self.run is None or self.run.data.validation_seconds is not None:
            return None
        rounds = self.run.data.validation_rounds
        return self.num_training_batches if rounds is None else rounds

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates; before there are loaders, whether it is given any, or a method makes them."""
        run, task = self.run, self.lightning_module
        if run is None or not self.limit_val_batches:
            return False
        if "validation" in run.data.evaluations:
            return True
        source = self.datamodule or task
        given = run.request_loaders.get("validation") is not None or overrides(source, DataHooks, "val_dataloader")
        return run.stage == "fit" and given and overrides(task, Task, "validation_step")

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Steps of the whole run; asks for the training loader where that was not done yet, as in `setup`."""
        # asked in configure_optimizers, before a run without an end has any number
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        run = self.run
        if run is not None and run.stage == "fit" and run.loop.open and run.data.training is None:
            make_training_data(run)
            run.request_loaders["train"] = run.data.loaders["train"]
        steps = self.steps_per_epoch
        if steps == float("inf"):
            return self.max_steps
        found = int(steps) * max(int(self.max_epochs or 0), 1)
        return found if self.max_steps == -1 else min(found, self.max_steps)

    @property
    def world_size(self) -> int:
        """The number of processes, also before they are there."""
        # before the processes are started the strategy's own place is that of one
        known = self.strategy.place.world_size
        if known > 1 or self.running:
            return known
        return max(1, self.strategy.local_processes(self.device_list) * self.num_nodes)

    # --- processes and devices --------------------------------------------------------------------------------------
    @property
    def _accelerator_connector(self) -> AcceleratorConnector:
        """The devices, under a private name that public packages read."""
        found = AcceleratorConnector(self.accelerator, self.devices, self.num_nodes)
        found.strategy, found.use_distributed_sampler = self.strategy, bool(self.use_distributed_sampler)
        found.cluster_environment = getattr(self.strategy, "cluster_environment", None)
        return found

    @property
    def device_ids(self) -> list[int]:
        """The indices of this machine's devices."""
        return [device.index or index for index, device in enumerate(self.device_list)]

    @property
    def _val_check_time_interval(self) -> float | None:
        return None if self.run is None else self.run.data.validation_seconds

    @property
    def precision_plugin(self) -> Precision:
        """The precision, with the scaler of the run."""
        found = Precision()
        found.precision, found.scaler = str(self.precision), self.strategy.precision.scaler
        return found

    scaler = alias("strategy.precision.scaler")
    """The scaler of float16's gradients, or None."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments of a DistributedSampler; None with one process."""
        # a DistributedSampler of one replica would still reshuffle a loader
        if self.world_size == 1:
            return None
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def early_stopping_callbacks(self) -> "list[Callback]":
        """Every EarlyStopping callback."""
        from ...callbacks.early_stopping import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]
