"""LearningRateMonitor, Timer, ThroughputMonitor and SpikeDetection, with Lightning's attributes."""

import json
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ....base.errors import ConfigError
from ....callbacks import learning_rate_monitor, timer
from ..aliases import alias
from ..rank_zero import rank_zero_warn
from ..states import RunningStage
from ..utilities import LightningEnum
from .callback import Callback, with_optional_arguments

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ....tasks.task import Task
    from ....trainer.trainer import Trainer


@with_optional_arguments("on_train_start", "on_train_batch_start", "on_train_epoch_start")
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
        names = [name for own, *_ in self._named_optimizers(trainer) for name in own]
        self.lrs = {name: [] for name in names}
        if self.log_momentum and not any({"momentum", "betas"} & one.defaults.keys() for one in trainer.optimizers):
            rank_zero_warn("log_momentum=True, but the optimizers do not have momentum.", category=RuntimeWarning)
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Log the rates of a logging step before it, at the number of steps done."""
        step = trainer.state.global_step
        if (step + 1) % trainer.log_every_n_steps == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, step, self._rates(trainer, "step"))

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Log the epoch's rates, unless a resume continues within it."""
        self._logged_step = -1
        if trainer.state.epoch_steps == 0:
            self._log(trainer, trainer.state.global_step, self._rates(trainer, "epoch"))

    def _rates(self, trainer: "Trainer", interval: str) -> dict[str, float]:
        """Return the rates to log in an interval, by name, on every rank."""
        if self.logging_interval not in (None, interval):
            return {}
        return self._extract_stats(trainer, "any" if self.logging_interval else interval)

    # --- private in Lightning, and called and overridden by programs ------------------------------------------------
    def _extract_stats(self, trainer: "Trainer", interval: str) -> dict[str, float]:
        """Return the values of the optimizers that are logged in an interval; "any": of all."""
        values: dict[str, float] = {}
        for names, optimizer, own_interval in self._named_optimizers(trainer):
            self._remap_keys([names])
            # an optimizer without a scheduler is logged in either interval
            if interval == "any" or own_interval in (interval, "any"):
                values |= self._get_optimizer_stats(optimizer, names)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        return values

    def _get_optimizer_stats(self, optimizer: "Optimizer", names: list[str]) -> dict[str, float]:
        """Return the values of an optimizer, whose parameter groups have these names."""
        values: dict[str, float] = {}
        for name, group in zip(names, optimizer.param_groups, strict=False):
            values |= self._extract_lr(group, name)
            momentum: dict[str, Any] = {
                "param_group": group,
                "name": f"{name}-momentum",
                "use_betas": "betas" in optimizer.defaults,
            }
            values |= self._extract_momentum(**momentum)
            values |= self._extract_weight_decay(group, f"{name}-weight_decay")
        return values

    def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, float]:
        """Return and keep the rate of a parameter group."""
        lr = float(param_group["lr"])
        self.lrs.setdefault(name, []).append(lr)
        return {name: lr}

    def _extract_momentum(self, param_group: dict[str, Any], name: str, use_betas: bool) -> dict[str, float]:
        """Return and keep the momentum of a parameter group, with `log_momentum`."""
        if not self.log_momentum:
            return {}
        momentum = param_group["betas"][0] if use_betas else param_group.get("momentum", 0)
        self.last_momentum_values[name] = momentum
        return {name: momentum}

    def _extract_weight_decay(self, param_group: dict[str, Any], name: str) -> dict[str, float]:
        """Return and keep the weight decay of a parameter group, with `log_weight_decay`."""
        if not self.log_weight_decay:
            return {}
        decay = param_group.get("weight_decay", 0.0)
        self.last_weight_decay_values[name] = decay
        return {name: decay}

    def _named_optimizers(self, trainer: "Trainer") -> "list[tuple[list[str], Optimizer, str]]":
        """Return the names of each optimizer's groups, it, and its interval: those of schedulers first, then others."""
        configs = [one for one in trainer.lr_scheduler_configs if hasattr(one.scheduler, "optimizer")]
        names, seen, kinds = self._find_names_from_schedulers(configs)
        found = [(own, one.scheduler.optimizer, one.interval) for own, one in zip(names, configs, strict=True)]
        given = [getattr(one, "original", one) for one in trainer.optimizers]  # zero1 wraps what the task returned
        names, others = self._find_names_from_optimizers(given, seen_optimizers=seen, seen_optimizer_types=kinds)
        return found + [(own, one, "any") for own, one in zip(names, others, strict=True)]

    def _find_names_from_schedulers(
        self, lr_scheduler_configs: list[Any]
    ) -> "tuple[list[list[str]], list[Optimizer], defaultdict[type[Optimizer], int]]":
        """Return the names of the schedulers' optimizers, these, and how many of each kind were named by it."""
        seen: list[Optimizer] = []
        kinds: defaultdict[type[Optimizer], int] = defaultdict(int)
        names = []
        for config in lr_scheduler_configs:
            optimizer = config.scheduler.optimizer
            name = f"lr-{type(optimizer).__name__}" if config.name is None else config.name
            names.append(self._check_duplicates_and_update_name(optimizer, name, seen, kinds, config))
        return names, seen, kinds

    def _find_names_from_optimizers(
        self,
        optimizers: list[Any],
        seen_optimizers: "list[Optimizer]",
        seen_optimizer_types: "defaultdict[type[Optimizer], int]",
    ) -> "tuple[list[list[str]], list[Optimizer]]":
        """Return the names of the optimizers that were not seen yet, and these."""
        others = [one for one in optimizers if not any(one is other for other in seen_optimizers)]
        names = [
            self._check_duplicates_and_update_name(
                one, f"lr-{type(one).__name__}", seen_optimizers, seen_optimizer_types, None
            )
            for one in others
        ]
        return names, others

    def _check_duplicates_and_update_name(
        self,
        optimizer: "Optimizer",
        name: str,
        seen_optimizers: "list[Optimizer]",
        seen_optimizer_types: "defaultdict[type[Optimizer], int]",
        lr_scheduler_config: Any,
    ) -> list[str]:
        """Return the names of an optimizer's groups. Raises ConfigError where two groups have one name."""
        seen_optimizers.append(optimizer)
        if lr_scheduler_config is None or lr_scheduler_config.name is None:
            seen_optimizer_types[type(optimizer)] += 1
        twice = self._duplicate_param_group_names(optimizer.param_groups)
        if twice:
            raise ConfigError(
                f"A single `Optimizer` cannot have multiple parameter groups with identical `name` values. {name} has "
                f"duplicated parameter group names {sorted(twice)}"
            )
        name = self._add_prefix(name, type(optimizer), seen_optimizer_types)
        return [self._add_suffix(name, optimizer.param_groups, index) for index in range(len(optimizer.param_groups))]

    def _duplicate_param_group_names(self, param_groups: list[dict[str, Any]]) -> set[str]:
        """Return the names that several groups have."""
        names = [group.get("name", f"pg{number}") for number, group in enumerate(param_groups, start=1)]
        return {name for name in names if names.count(name) > 1}

    def _add_prefix(
        self, name: str, optimizer_cls: "type[Optimizer]", seen_optimizer_types: "defaultdict[type[Optimizer], int]"
    ) -> str:
        """Return a name with the number of an optimizer among those of its kind, from the second on."""
        count = seen_optimizer_types.get(optimizer_cls, 0)
        return f"{name}-{count - 1}" if count > 1 else name

    def _add_suffix(
        self, name: str, param_groups: list[dict[str, Any]], param_group_index: int, use_names: bool = True
    ) -> str:
        """Return a name with that of a group, or with its number where there are several."""
        own = param_groups[param_group_index].get("name") if use_names else None
        if own is None and len(param_groups) > 1:
            own = f"pg{param_group_index + 1}"
        return f"{name}/{own}" if own else name

    def _remap_keys(self, names: list[list[str]], token: str = "/pg1") -> None:
        """Begin the lists of new names; a lone group that is the first of several now takes its list along."""
        for name in (name for own in names for name in own):
            alone = name.removesuffix(token)
            if name != alone and alone in self.lrs:
                self.lrs[name] = self.lrs.pop(alone)
            self.lrs.setdefault(name, [])

    def _log(self, trainer: "Trainer", step: int, values: dict[str, float]) -> None:
        if trainer.is_global_zero:
            super()._log(trainer, step, values)


class Interval(LightningEnum):
    """Moments at which a Timer looks at the clock."""

    step = "step"
    epoch = "epoch"


@with_optional_arguments("on_fit_start", "on_train_batch_end", "on_train_epoch_end")
class Timer(timer.Timer, Callback):
    """Sets `trainer.should_stop` when training has taken `duration`, and measures the time of stages."""

    @property
    def state_key(self) -> str:
        """The class's name, as in Lightning."""
        return type(self).__qualname__

    # --- private in Lightning, and read, set and overridden by programs ---------------------------------------------
    _duration, _verbose = alias("duration"), alias("verbose")
    _interval = property(lambda timer: Interval(timer.interval))
    _start_time = property(lambda timer: {**dict.fromkeys(RunningStage), **timer._starts})
    _end_time = property(lambda timer: {**dict.fromkeys(RunningStage), **timer._ends})

    @property
    def _offset(self) -> float:
        return self._earlier.get("train", 0)

    @_offset.setter
    def _offset(self, seconds: float) -> None:
        self._earlier["train"] = seconds

    def _check(self, trainer: "Trainer") -> None:
        if self.duration is not None:
            self._check_time_remaining(trainer)

    def _check_time_remaining(self, trainer: "Trainer") -> None:
        """Stop the run if its time is over."""
        super()._check(trainer)


class TrainingSpikeException(RuntimeError):
    """The loss of a batch is a spike."""

    def __init__(self, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *args, **kwargs)


class SpikeDetection(Callback):
    """Ends training by TrainingSpikeException where the loss of a batch leaves the mean of the last `window` ones.

    The indices of that batch and of the one before go to a file. Legato's SpikeWatch names the samples, and goes on.

    Args:
        mode: "min" or "max": in which direction a loss gets better.
        warmup: batches at the beginning of an epoch that are not judged.
        atol: least distance from the mean.
        rtol: least distance from the mean, as a share of it.
        exclude_batches_path: the file, or its folder; by default in the trainer's root.
        finite_only: a loss that is not finite is a spike.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: Any = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"Invalid mode. Has to be min or max, found {mode}")
        self.mode, self.warmup, self.atol, self.rtol = mode, warmup, atol, rtol
        self.exclude_batches_path, self.finite_only = exclude_batches_path, finite_only
        self.bad_batches: list[int] = []
        self.last_val = 0.0
        self._newest: deque[float] = deque(maxlen=window)

    def on_train_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, *given: Any
    ) -> None:
        """Judge the batch; a spike on any rank ends all. Raises TrainingSpikeException."""
        loss = float(outputs["loss"] if isinstance(outputs, Mapping) else outputs)
        strategy: Any = trainer.strategy
        if strategy.reduce_boolean_decision(batch_idx >= self.warmup and self._is_spike(loss), all=False):
            self.bad_batches += [batch_idx - 1, batch_idx]
            path = Path(self.exclude_batches_path or trainer.default_root_dir)
            path = path if path.suffix == ".json" else path / "skip_batches.json"
            self.exclude_batches_path = str(path)
            if trainer.is_global_zero:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(self.bad_batches, indent=4), encoding="utf-8")
            raise TrainingSpikeException(batch_idx)
        if self.finite_only or strategy.reduce_boolean_decision(math.isfinite(loss), all=True):
            self.last_val = loss
            self._newest.append(loss)

    def _is_spike(self, loss: float) -> bool:
        if self.finite_only and not math.isfinite(loss):
            return True
        if loss <= self.last_val if self.mode == "min" else loss >= self.last_val:
            return False
        mean = statistics.fmean(self._newest) if self._newest else 0.0
        far = [abs(self.atol)] if self.atol is not None else []
        far += [abs(self.rtol * mean)] if self.rtol is not None else []
        return all(abs(loss - mean) >= least for least in far)

    def state_dict(self) -> dict[str, Any]:
        """Return the newest losses and the batches to leave out."""
        return {"last_val": self.last_val, "bad_batches": self.bad_batches, "newest": list(self._newest)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the newest losses and the batches to leave out."""
        self.last_val, self.bad_batches = state_dict["last_val"], list(state_dict["bad_batches"])
        self._newest.extend(state_dict["newest"])
