"""LearningRateMonitor, Timer and ThroughputMonitor, with Lightning's attributes."""

from typing import TYPE_CHECKING, Any

import torch

from ....callbacks import learning_rate_monitor, timer
from ....trainer.errors import ConfigError
from ..utilities import LightningEnum
from .callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ....tasks.task import Task
    from ....trainer.trainer import Trainer


class LearningRateMonitor(learning_rate_monitor.LearningRateMonitor, Callback):
    """Logs learning rates, keeps them in `lrs`, and puts them into `trainer.callback_metrics`."""

    lrs: dict[str, list[float]]
    """Every value that was logged, by name."""
    last_momentum_values: dict[str, float | None]
    last_weight_decay_values: dict[str, float | None]

    def __init__(
        self, logging_interval: Any = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        super().__init__(logging_interval, log_momentum, log_weight_decay)
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Forget the values of the run before. Raises MisconfigurationException without a logger."""
        if not trainer.loggers:
            raise ConfigError("Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger.")
        names = [name for key, optimizer, _ in self._optimizers(trainer) for name in self._group_names(key, optimizer)]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def _rates(self, trainer: "Trainer", interval: str) -> dict[str, float]:
        """Return the rates to log in an interval, by name, on every rank."""
        values: dict[str, float] = {}
        if self.logging_interval not in (None, interval):
            return values
        for key, optimizer, own_interval in self._optimizers(trainer):
            # an optimizer without a scheduler is logged in either interval
            if self.logging_interval is None and own_interval not in (interval, "any"):
                continue
            for name, group in zip(self._group_names(key, optimizer), optimizer.param_groups, strict=True):
                values[name] = float(group["lr"])
                self.lrs.setdefault(name, []).append(values[name])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                    values[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = momentum
                if self.log_weight_decay:
                    decay = group.get("weight_decay", 0.0)
                    values[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        return values

    def _optimizers(self, trainer: "Trainer") -> Any:
        """Yield (name, optimizer, interval): those of schedulers first, then the others, with interval "any"."""
        seen: list[Any] = []
        counts: dict[type, int] = {}

        def numbered(name: str | None, kind: type) -> str:
            if name is None:
                counts[kind] = counts.get(kind, 0) + 1
            count = counts.get(kind, 0)
            return (name or f"lr-{kind.__name__}") + (f"-{count - 1}" if count > 1 else "")

        for config in trainer.lr_scheduler_configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            if optimizer is not None:
                seen.append(optimizer)
                yield numbered(config.name, type(optimizer)), optimizer, config.interval
        for wrapped in trainer.optimizers:
            optimizer = getattr(wrapped, "original", wrapped)  # strategy zero1 wraps what the task returned
            if not any(optimizer is one for one in seen):
                yield numbered(None, type(optimizer)), optimizer, "any"

    def _group_names(self, key: str, optimizer: "Optimizer") -> list[str]:
        groups = optimizer.param_groups
        names = [group.get("name", f"pg{index}") for index, group in enumerate(groups, start=1)]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"A single `Optimizer` cannot have multiple parameter groups with identical `name` values. {key} has "
                f"duplicated parameter group names {sorted({name for name in names if names.count(name) > 1})}"
            )
        if len(groups) == 1 and "name" not in groups[0]:
            return [key]
        return [f"{key}/{name}" for name in names]

    def _log(self, trainer: "Trainer", step: int, values: dict[str, float]) -> None:
        if trainer.is_global_zero:
            super()._log(trainer, step, values)


class Interval(LightningEnum):
    """When a Timer looks at the clock."""

    step = "step"
    epoch = "epoch"


class Timer(timer.Timer, Callback):
    """Sets `trainer.should_stop` when training has taken `duration`, and measures the time of stages."""
