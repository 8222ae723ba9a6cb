"""Parses the return value of `configure_optimizers`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..base.errors import TaskError, correction, did_you_mean, first_names

FORMS = (
    "an optimizer; a list or tuple of optimizers; a pair (optimizers, schedulers); a dict with 'optimizer' and "
    "optionally 'lr_scheduler'; a list or tuple of such dicts; or None"
)
EXAMPLE = correction("return torch.optim.Adam", "return torch.optim.Adam(self.parameters(), lr=1e-3)")
SCHEDULED = correction("return optimizer, scheduler", "return [optimizer], [scheduler]")


@dataclass
class SchedulerConfig:
    """A learning rate scheduler and when it steps. The fields are the keys of Lightning's `lr_scheduler` dict."""

    scheduler: Any
    """Any object with the methods `step` and `state_dict`."""
    interval: Literal["step", "epoch"] = "epoch"
    """Whether the scheduler steps after optimizer steps or after epochs."""
    frequency: int = 1
    """Number of intervals between the scheduler's steps."""
    monitor: str | None = None
    """Name of the metric to pass to ReduceLROnPlateau."""
    strict: bool = True
    """Whether to raise an error if the metric is missing."""
    name: str | None = None
    """Name under which LearningRateMonitor logs the learning rate."""
    reduce_on_plateau: bool = False
    """Whether `step` accepts the monitored metric."""

    def is_due(self, interval: str, count: int) -> bool:
        """Return whether the scheduler steps after `count` steps or epochs, depending on `interval`."""
        return self.interval == interval and count % self.frequency == 0


def read_optimizers(returned: Any, automatic: bool = True) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in `returned`, which may have any form that Lightning accepts.

    Raises TaskError for any other form.
    """
    optimizers, schedulers = _read_returned(returned)
    for config in schedulers:
        if automatic and config.reduce_on_plateau and config.monitor is None:
            raise TaskError(
                "ReduceLROnPlateau needs a metric. In configure_optimizers, set its 'monitor': {'scheduler': ..., "
                "'monitor': 'val/loss'}."
            )
        # a custom scheduler without an optimizer is stepped too
        if getattr(config.scheduler, "optimizer", None) not in [None, *optimizers]:
            raise TaskError(
                f"configure_optimizers returned a {type(config.scheduler).__name__}, but did not return its optimizer, "
                f"so the scheduler would have no effect. Return that optimizer too."
            )
    return optimizers, schedulers


def unknown_parameters(task: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return a message about optimized parameters that do not belong to the task, or "" if there are none."""
    # compare ids, since `in` would compare tensor values
    task_ids = set(map(id, task.parameters()))
    shapes = [
        tuple(parameter.shape)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in task_ids
    ]
    if not shapes:
        return ""
    return (
        f"configure_optimizers returned an optimizer for tensors that are not parameters of the task (shapes: "
        f"{first_names([str(shape) for shape in shapes])}). They would not be moved to the device, averaged across "
        f"processes or saved in checkpoints. Assign them to the task as nn.Parameter, and modules in a list or "
        f"dict as nn.ModuleList or nn.ModuleDict."
    )


def unknown_arguments(schedulers: Sequence[SchedulerConfig]) -> str:
    """Return a message about a scheduler whose `step` needs arguments that the trainer cannot pass, or ""."""
    for config in schedulers:
        arguments = inspect.signature(config.scheduler.step).parameters.values()
        needed = [arg.name for arg in arguments if arg.default is arg.empty and arg.kind is arg.POSITIONAL_OR_KEYWORD]
        if len(needed) > config.reduce_on_plateau and not hasattr(config.scheduler, "step_update"):
            name = type(config.scheduler).__name__
            return (
                f"{name}.step requires {', '.join(needed)}, which the trainer cannot pass. Define lr_scheduler_step("
                f"self, scheduler, metric) in the task, and call scheduler.step({needed[0]}=...) there."
            )
    return ""


def _read_returned(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    entries, schedulers = returned, []
    if returned is None:
        return [], []
    if isinstance(returned, (Optimizer, Mapping)):
        entries = [returned]
    # two optimizers do not match the pair, since an optimizer is not a sequence
    elif isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[0], Sequence):
        entries, second = returned
        schedulers = [_read_scheduler(item) for item in (second if isinstance(second, Sequence) else [second])]
    elif not isinstance(returned, Sequence) or isinstance(returned, str) or not returned:
        raise TaskError(f"configure_optimizers must return {FORMS}. It returned {_describe(returned)}.{EXAMPLE}")
    optimizers = []
    for entry in entries:
        values = entry if isinstance(entry, Mapping) else {"optimizer": entry}
        _require_keys("The dict that configure_optimizers returned", values, ("optimizer", "lr_scheduler", "monitor"))
        if not isinstance(values["optimizer"], Optimizer):
            raise TaskError(
                f"configure_optimizers must return {FORMS}. Expected an optimizer, got "
                f"{_describe(values['optimizer'])}.{SCHEDULED if hasattr(values['optimizer'], 'step') else EXAMPLE}"
            )
        optimizers.append(values["optimizer"])
        if values.get("lr_scheduler") is not None:
            schedulers.append(_read_scheduler(values["lr_scheduler"], values.get("monitor")))
    return optimizers, schedulers


def _require_keys(place: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise TaskError if a key is not in `keys`, or if the first of `keys` is missing."""
    for key in values:
        if key not in keys:
            raise TaskError(f"{place} has the unknown key {key!r}.{did_you_mean(str(key), keys)}")
    if keys[0] not in values:
        raise TaskError(f"{place} has no key {keys[0]!r}.")


def _read_scheduler(entry: Any, monitor: str | None = None) -> SchedulerConfig:
    values = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    _require_keys("The lr_scheduler dict", values, tuple(SchedulerConfig.__dataclass_fields__))
    config = SchedulerConfig(**values)
    if not hasattr(config.scheduler, "step"):
        raise TaskError(f"A learning rate scheduler must have a `step` method, got {_describe(config.scheduler)}.")
    if config.interval not in ("step", "epoch") or not isinstance(config.frequency, int) or config.frequency < 1:
        raise TaskError(
            f"The lr_scheduler dict needs 'step' or 'epoch' as its interval and a positive integer as its frequency, "
            f"got {config.interval!r} and {config.frequency!r}."
        )
    in_epochs = getattr(config.scheduler, "t_in_epochs", None)  # timm's schedulers define their interval
    interval = config.interval if in_epochs is None else "epoch" if in_epochs else "step"
    if "interval" in values and config.interval != interval:
        raise TaskError(
            f"The lr_scheduler dict has interval={config.interval!r}, but its {type(config.scheduler).__name__} has "
            f"t_in_epochs={in_epochs}, so it would never change the learning rate. Remove the interval."
        )
    config.interval = interval
    # timm's plateau scheduler wraps torch's; for a custom scheduler that takes a metric, the dict may set the key
    inner = getattr(config.scheduler, "lr_scheduler", config.scheduler)
    config.reduce_on_plateau |= isinstance(inner, ReduceLROnPlateau)
    # `monitor` may also be in the optimizer's dict; the scheduler's dict takes precedence
    config.monitor = config.monitor or monitor
    return config


def _describe(value: Any) -> str:
    is_plain = not isinstance(value, (LRScheduler, Optimizer))
    return f"{type(value).__name__}: {value!r:.80}" if is_plain else f"a {type(value).__name__}"
