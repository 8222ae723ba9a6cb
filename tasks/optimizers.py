"""Reading of what `configure_optimizers` returns."""

import inspect
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
        # a scheduler of its own kind may have no optimizer, and is stepped all the same
        if getattr(config.scheduler, "optimizer", None) not in [None, *optimizers]:
            raise TaskError(
                f"configure_optimizers returned a {type(config.scheduler).__name__} of an optimizer that it did not "
                f"return, so it would have no effect; return that optimizer too."
            )
    return optimizers, schedulers


def unknown_parameters(task: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return what is wrong with parameters that optimizers train and that are not the task's; "" if there are none."""
    # by id: comparing tensors with `in` compares their values
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


def unknown_arguments(schedulers: Sequence[SchedulerConfig]) -> str:
    """Return what is wrong with schedulers whose `step` takes more than the loop knows; "" if there are none."""
    for config in schedulers:
        given = inspect.signature(config.scheduler.step).parameters.values()
        needed = [one.name for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        if len(needed) > config.reduce_on_plateau and not hasattr(config.scheduler, "step_update"):
            name = type(config.scheduler).__name__
            return (
                f"{name}.step takes {', '.join(needed)}, which only the task can know: define lr_scheduler_step(self, "
                f"scheduler, metric) there, and call scheduler.step({needed[0]}=...) in it."
            )
    return ""


def _read_returned(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    entries, schedulers = returned, []
    if returned is None:
        return [], []
    if isinstance(returned, (Optimizer, Mapping)):
        entries = [returned]
    # of two optimizers the first is no sequence, so the pair cannot be mistaken
    elif isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[0], Sequence):
        entries, others = returned
        schedulers = [_read_scheduler(item) for item in (others if isinstance(others, Sequence) else [others])]
    elif not isinstance(returned, Sequence) or isinstance(returned, str) or not returned:
        raise TaskError(f"configure_optimizers must return {FORMS}; it returned {_describe(returned)}.")
    optimizers = []
    for entry in entries:
        values = entry if isinstance(entry, Mapping) else {"optimizer": entry}
        _require_keys("The dict that configure_optimizers returned", values, ("optimizer", "lr_scheduler", "monitor"))
        if not isinstance(values["optimizer"], Optimizer):
            raise TaskError(
                f"configure_optimizers must return {FORMS}; expected an optimizer, got "
                f"{_describe(values['optimizer'])}."
            )
        optimizers.append(values["optimizer"])
        if values.get("lr_scheduler") is not None:
            schedulers.append(_read_scheduler(values["lr_scheduler"], values.get("monitor")))
    return optimizers, schedulers


def _require_keys(place: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise TaskError for a key that is none of `keys`, of which the first one is needed."""
    for key in values:
        if key not in keys:
            raise TaskError(f"{place} has the unknown key {key!r}.{did_you_mean(str(key), keys)}")
    if keys[0] not in values:
        raise TaskError(f"{place} has no {keys[0]!r}.")


def _read_scheduler(entry: Any, monitor: str | None = None) -> SchedulerConfig:
    values = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    _require_keys("The lr_scheduler dict", values, tuple(SchedulerConfig.__dataclass_fields__))
    config = SchedulerConfig(**values)
    if not hasattr(config.scheduler, "step"):
        raise TaskError(f"A learning rate scheduler needs a method `step`; got {_describe(config.scheduler)}.")
    if config.interval not in ("step", "epoch") or not isinstance(config.frequency, int) or config.frequency < 1:
        raise TaskError(
            f"The lr_scheduler dict takes the interval 'step' or 'epoch' and a positive integer as frequency; got "
            f"{config.interval!r} and {config.frequency!r}."
        )
    in_epochs = getattr(config.scheduler, "t_in_epochs", None)  # timm's schedulers know what they count
    interval = config.interval if in_epochs is None else "epoch" if in_epochs else "step"
    if "interval" in values and config.interval != interval:
        raise TaskError(
            f"The lr_scheduler dict has interval={config.interval!r}, but its {type(config.scheduler).__name__} has "
            f"t_in_epochs={in_epochs}, so it would never change a learning rate. Leave the interval out."
        )
    config.interval = interval
    # or as the dict says: a scheduler of the task's own may take a metric, too; timm's holds torch's
    inner = getattr(config.scheduler, "lr_scheduler", config.scheduler)
    config.reduce_on_plateau |= isinstance(inner, ReduceLROnPlateau)
    # it may also stand beside "optimizer"; what the scheduler's own dict says goes before that
    config.monitor = config.monitor or monitor
    return config


def _describe(value: Any) -> str:
    is_plain = not isinstance(value, (LRScheduler, Optimizer))
    return f"{type(value).__name__}: {value!r:.80}" if is_plain else f"a {type(value).__name__}"
