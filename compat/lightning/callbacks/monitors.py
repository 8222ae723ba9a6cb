"""LearningRateMonitor and Timer, with Lightning's attributes."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ....base.errors import ConfigError
from ....callbacks import learning_rate_monitor, timer
from ..rank_zero import rank_zero_warn
from ..states import RunningStage
from ..utilities import LightningEnum
from .callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .... import Task, Trainer


class LearningRateMonitor(learning_rate_monitor.LearningRateMonitor, Callback):
    """Logs learning rates, stores them in `lrs`, and adds them to `trainer.callback_metrics`."""

    lrs: dict[str, list[float]]
    """All logged values by name."""
    last_momentum_values: dict[str, float | None]
    last_weight_decay_values: dict[str, float | None]

    def __init__(
        self, logging_interval: Any = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        super().__init__(logging_interval, log_momentum, log_weight_decay)
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}

    def on_train_start(self, trainer: "Trainer", *args: Any, **kwargs: Any) -> None:
        """Clear the values from the previous run. Raises MisconfigurationException if there is no logger."""
        if not trainer.loggers:
            raise ConfigError("Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger.")
        if self.log_momentum and not any({"momentum", "betas"} & item.defaults.keys() for item in trainer.optimizers):
            rank_zero_warn("log_momentum=True, but the optimizers do not have momentum.", category=RuntimeWarning)
        optimizers = [(name, optimizer) for name, optimizer, _ in self._optimizers(trainer)]
        names = [group for name, optimizer in optimizers for group in self._names(name, optimizer)]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(self, trainer: "Trainer", *args: Any, **kwargs: Any) -> None:
        """Log the learning rates before a logging point, with the number of completed steps on the x-axis."""
        step = trainer.state.global_step
        if (step + 1) % trainer.log_every_n_steps == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, step, self._rates(trainer, "step"))

    def on_train_epoch_start(self, trainer: "Trainer", *args: Any, **kwargs: Any) -> None:
        """Log the epoch's learning rates unless the run resumed mid-epoch."""
        self._logged_step = -1
        if trainer.state.epoch_steps == 0:
            self._log(trainer, trainer.state.global_step, self._rates(trainer, "epoch"))

    def _rates(self, trainer: "Trainer", interval: str) -> dict[str, float]:
        """Return the values to log at an interval ("step" or "epoch"), by name."""
        values: dict[str, float] = {}
        if self.logging_interval not in (None, interval):
            return values
        for name, optimizer, own_interval in self._optimizers(trainer):
            names = self._names(name, optimizer)
            for full in names:
                # when a second group is added, the list of the first group continues under a new name
                alone = full.removesuffix("/pg1")
                self.lrs.setdefault(full, self.lrs.pop(alone, []) if alone != full else [])
            # an optimizer without a scheduler is logged at both intervals
            if self.logging_interval or own_interval in (interval, "any"):
                values |= self._values_of(names, optimizer)
        # on every rank, as in Lightning
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        return values

    def _optimizers(self, trainer: "Trainer") -> "Iterator[tuple[str, Optimizer, str]]":
        """Yield the name, optimizer and interval of each scheduler, then of each optimizer without a scheduler.

        Names are numbered per optimizer class. If an SGD optimizer has two schedulers, their names are lr-SGD and
        lr-SGD-1.
        """
        seen, kinds = set(), Counter[type]()
        configs = [config for config in trainer.lr_scheduler_configs if hasattr(config.scheduler, "optimizer")]
        rows: list[tuple[str | None, Any, str]]
        rows = [(config.name, config.scheduler.optimizer, config.interval) for config in configs]
        # the zero1 strategy wraps the optimizers that the module returned
        rows += [(None, getattr(optimizer, "original", optimizer), "any") for optimizer in trainer.optimizers]
        for chosen, optimizer, interval in rows:
            if interval == "any" and id(optimizer) in seen:
                continue
            seen.add(id(optimizer))
            kinds[type(optimizer)] += chosen is None
            name, count = chosen or f"lr-{type(optimizer).__name__}", kinds[type(optimizer)]
            yield name if count < 2 else f"{name}-{count - 1}", optimizer, interval

    def _values_of(self, names: list[str], optimizer: "Optimizer") -> dict[str, float]:
        """Return the learning rate, momentum and weight decay of each parameter group by name, and store them."""
        values: dict[str, float] = {}
        for name, group in zip(names, optimizer.param_groups, strict=True):
            values[name] = float(group["lr"])
            self.lrs[name].append(values[name])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in optimizer.defaults else group.get("momentum", 0)
                values[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = momentum
            if self.log_weight_decay:
                decay = group.get("weight_decay", 0.0)
                values[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        return values

    @staticmethod
    def _names(name: str, optimizer: "Optimizer") -> list[str]:
        """Return the names of an optimizer's parameter groups."""
        groups = optimizer.param_groups
        words = [group.get("name", f"pg{number}" if len(groups) > 1 else "") for number, group in enumerate(groups, 1)]
        return [f"{name}/{suffix}" if suffix else name for suffix in words]

    def _log(self, trainer: "Trainer", step: int, values: dict[str, float]) -> None:
        if trainer.is_global_zero:
            super()._log(trainer, step, values)


class Interval(LightningEnum):
    """When a Timer checks the clock."""

    step = "step"
    epoch = "epoch"


class Timer(timer.Timer, Callback):
    """Sets `trainer.should_stop` when training has run for `duration`. Also measures how long each stage takes."""

    def __init__(self, duration: Any = None, interval: Any = "step", verbose: bool = True) -> None:
        super().__init__(duration, interval, verbose)
        self._starts: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._earlier: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        """Name of the class, as in Lightning."""
        return type(self).__qualname__

    def start_time(self, stage: str = "train") -> float | None:
        """Return the monotonic clock time at the start of a stage."""
        return self._starts.get(RunningStage(stage).value)

    def end_time(self, stage: str = "train") -> float | None:
        """Return the monotonic clock time at the end of a stage."""
        return self._ends.get(RunningStage(stage).value)

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the time spent in a stage, in seconds, including the time before a resume."""
        start = self.start_time(stage)
        now = 0.0 if start is None else self._ends.get(stage, time.monotonic()) - start
        return now + self._earlier.get(stage, 0.0)

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the time remaining, in seconds; None if no duration is set."""
        return None if self.duration is None else self.duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        """Return the time spent in each stage, in seconds."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in ("train", "validate", "test")}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the time spent in each stage before the resume."""
        self._earlier = dict(state_dict["time_elapsed"])

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock and stop the run immediately if no time is left."""
        self._start("train")
        super().on_train_start(trainer, task)

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._ends["train"] = time.monotonic()

    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._start("validate")

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._ends["validate"] = time.monotonic()

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock."""
        self._start("test")

    def on_test_end(self, trainer: "Trainer", task: "Task") -> None:
        """Stop the clock."""
        self._ends["test"] = time.monotonic()

    def _start(self, stage: str) -> None:
        """Start a stage's clock. The total includes the time from earlier runs of the stage."""
        if stage in self._starts:
            self._earlier[stage] = self.time_elapsed(stage)
        self._ends.pop(stage, None)
        self._starts[stage] = time.monotonic()
