"""Reading of what `configure_optimizers` returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..base.errors import TaskError, did_you_mean, first_names

FORMS = (
    "an optimizer; a list or tuple of optimizers; a pair (optimizers, schedulers); a dict with 'optimizer' and maybe "
    "'lr_scheduler'; a list or tuple of such dicts; or None"
)


@dataclass
class SchedulerConfig:
    """A learning rate scheduler and its interval; the fields are the keys of Lightning's `lr_scheduler` dict."""

    scheduler: Any
    """Any object with `step` and `state_dict`."""
    interval: Literal["step", "epoch"] = "epoch"
    """Whether it steps after optimizer steps or after epochs."""
    frequency: int = 1
    """Number of intervals between two steps."""
    monitor: str | None = None
    """Metric passed to ReduceLROnPlateau."""
    strict: bool = True
    """Whether a missing metric is an error."""
    name: str | None = None
    """Name under which its learning rate is logged."""
    reduce_on_plateau: bool = False
    """Whether `step` takes the monitored metric."""

    def is_due(self, interval: str, count: int) -> bool:
        """Return whether it steps after `count` intervals of this kind."""
        return self.interval == interval and count % self.frequency == 0


def read_optimizers(returned: Any, automatic: bool = True) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in any return value that Lightning allows. Raises TaskError."""
    optimizers, schedulers = _read_returned(returned)
    for config in schedulers:
        if automatic and config.reduce_on_plateau and config.monitor is None:
            raise TaskError(
                "ReduceLROnPlateau needs a metric: return {'scheduler': ..., 'monitor': 'val/loss'} for it in "
                "configure_optimizers."
            )
        if getattr(config.scheduler, "optimizer", None) not in [None, *optimizers]:
            raise TaskError(
                f"configure_optimizers returned a {type(config.scheduler).__name__} of an optimizer that it did not "
                f"return, so it would have no effect; return that optimizer too."
            )
    return optimizers, schedulers


def unknown_parameters(task: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return what is wrong with parameters that optimizers train and that are not the task's; "" if there are none."""
    known = set(map(id, task.parameters()))
    found = [
        tuple(parameter.shape)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if not found:
        return ""
    return (
        f"configure_optimizers gave an optimizer parameters that are not among the task's, {len(found)} of shape "
        f"{first_names([str(shape) for shape in found])}: they are neither moved to the device, nor averaged over "
        f"processes, nor saved in checkpoints. Assign them to the task as nn.Parameter, and modules in a list or dict "
        f"as nn.ModuleList or nn.ModuleDict."
    )


def _read_returned(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _read_dicts([returned])
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        if returned and all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
        if returned and all(isinstance(item, Mapping) for item in returned):
            return _read_dicts(returned)
        if len(returned) == 2 and isinstance(returned[0], Sequence):
            optimizers, schedulers = returned
            schedulers = schedulers if isinstance(schedulers, Sequence) else [schedulers]
            for item in optimizers:
                _require_optimizer(item)
            return list(optimizers), [_read_scheduler(item) for item in schedulers]
    raise TaskError(f"configure_optimizers must return {FORMS}; it returned {_describe(returned)}.")


def _read_dicts(dicts: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers, schedulers = [], []
    for entry in dicts:
        unknown = entry.keys() - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or "optimizer" not in entry:
            wrong = sorted(unknown)[0] if unknown else ""
            reason = f"has the unknown key {wrong!r}" if unknown else "has no 'optimizer'"
            hint = did_you_mean(wrong, ("optimizer", "lr_scheduler", "monitor")) if unknown else ""
            raise TaskError(f"The dict that configure_optimizers returned {reason}.{hint}")
        optimizers.append(_require_optimizer(entry["optimizer"]))
        if entry.get("lr_scheduler") is not None:
            schedulers.append(_read_scheduler(entry["lr_scheduler"], entry.get("monitor")))
    return optimizers, schedulers


def _read_scheduler(entry: Any, monitor: str | None = None) -> SchedulerConfig:
    values = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    names = SchedulerConfig.__dataclass_fields__
    for key in values:
        if key not in names:
            raise TaskError(f"The lr_scheduler dict has the unknown key {key!r}.{did_you_mean(key, names)}")
    if "scheduler" not in values:
        raise TaskError("The lr_scheduler dict has no 'scheduler'.")
    config = SchedulerConfig(**values)
    if not hasattr(config.scheduler, "step"):
        raise TaskError(f"A learning rate scheduler needs a method `step`; got {_describe(config.scheduler)}.")
    if config.interval not in ("step", "epoch"):
        raise TaskError(f"lr_scheduler interval must be 'step' or 'epoch', got {config.interval!r}.")
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise TaskError(f"lr_scheduler frequency must be a positive integer, got {config.frequency!r}.")
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
    config.monitor = config.monitor or monitor
    return config


def _require_optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise TaskError(f"configure_optimizers must return {FORMS}; expected an optimizer, got {_describe(value)}.")
    return value


def _describe(value: Any) -> str:
    if isinstance(value, (LRScheduler, Optimizer)):
        return f"a {type(value).__name__}"
    return f"{type(value).__name__}: {value!r:.80}"
