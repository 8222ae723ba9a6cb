"""Fingerprint of a run: its settings besides config text, data and seed, stored in each checkpoint.

A resume compares the checkpoint's with its own (`compare`): settings that decide which samples make up a step, other
settings that change the training, and those that are restored from the checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from ...base.arguments import TrainerArguments
from ..data.combined import CombinedLoader, loaders_in
from ..data.loaders import is_plain_shuffle, length_of
from ..optimization import kernels

if TYPE_CHECKING:
    from ...tasks.optimizers import SchedulerConfig
    from ..optimization.optimization import Optimization

PLAIN = (bool, int, float, str, type(None))
POSITION = {"base_lrs", "_last_lr"}
"""Keys of a new scheduler's state that follow from the optimizer's learning rate, which is compared by itself."""
SCHEDULER = "learning rate scheduler"
SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Settings of a parameter group that a schedule depends on."""
LAYOUT = {"threads", "cpu_capability", "cpu_features", "micro_batches", "optimizers"}
"""Keys of `kernels.numerics` that may differ between machines and layouts, and change last bits only."""
LEFT_OUT_SAMPLES = "leave_out_samples"
"""The setting of samples that may change within an epoch, and under bitwise: all other samples keep their step."""
MISSING = object()


class SettingChange(NamedTuple):
    """Setting that differs from the checkpoint's."""

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.was} -> {self.now}"


@dataclass
class Changes:
    """Differences between a checkpoint and the run that resumes from it."""

    samples: list[SettingChange] = field(default_factory=list)
    """Settings that decide which samples make up a step."""
    changed: list[SettingChange] = field(default_factory=list)
    """Other settings that change the training; the current value counts."""
    restored: list[SettingChange] = field(default_factory=list)
    """Settings restored from the checkpoint, though they are set to other values now."""
    end_epoch: bool = False
    """Whether the rest of the epoch is skipped, as its steps would have other samples."""


# --- taking it --------------------------------------------------------------------------------------------------------
def fingerprint_of(trainer: TrainerArguments, optimization: "Optimization") -> dict[str, Any]:
    """Return the fingerprint of a run whose optimizers were just made; for its samples see `samples_of`."""
    names = optimization.strategy.state_dicts.parameter_names
    limit = trainer.gradient_clip_val or None
    return {
        "training": {
            "reproducible": trainer.reproducible,
            "gradient_clip_val": limit,
            "gradient_clip_algorithm": None if limit is None else trainer.gradient_clip_algorithm,
            "nan": trainer.nan,
            "sync_batchnorm": trainer.sync_batchnorm,
            "automatic_optimization": optimization.automatic,
            LEFT_OUT_SAMPLES: sorted(trainer.leave_out_samples or ()),
        },
        "optimizers": [
            _describe_optimizer(optimizer, names(optimization.task, optimizer)) for optimizer in optimization.optimizers
        ],
        "schedulers": [_describe_scheduler(config) for config in optimization.schedulers],
    }


def record_groups(found: dict[str, Any], optimization: "Optimization") -> None:
    """Add the parameter groups that were added to optimizers in the course of a run to its fingerprint."""
    for described, optimizer in zip(found["optimizers"], optimization.optimizers, strict=True):
        names = optimization.strategy.state_dicts.parameter_names(optimization.task, optimizer)
        now = _describe_optimizer(optimizer, names)
        for part in ("parameters", "groups"):
            if described[part] is not None and now[part] is not None:
                described[part] += now[part][len(described[part]) :]


def samples_of(trainer: TrainerArguments, loader: Any, rounds: int | None, dealt_out: bool) -> dict[str, Any]:
    """Return the settings that decide which samples make up a step, as far as the training loader has them.

    rounds: batches that each replica has in an epoch, if that is known.
    dealt_out: whether samples are dealt out to the processes, rather than that each brings its own share.
    """
    found: dict[str, Any] = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "limit_train_batches": trainer.limit_train_batches,
        "overfit_batches": trainer.overfit_batches,
        "use_distributed_sampler": dealt_out,
        "batches of an epoch": rounds,
    }
    several = isinstance(loader, CombinedLoader)
    if several:
        found |= {"loaders": len(loader.names), "mode": loader.mode}
    for name, part in zip(loader.names if several else [""], loaders_in(loader), strict=False):
        described = _describe_loader(part, dealt_out)
        found |= {f"{name}.{key}" if several else key: value for key, value in described.items()}
    return found


def _describe_loader(loader: Any, dealt_out: bool) -> dict[str, Any]:
    """Return a loader's settings that decide its samples; without the length if it may be one process's share."""
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    dataset = getattr(loader, "dataset", None)
    samples = length_of(dataset) if dataset is not None else length_of(loader)
    order: Any = None
    if sampler is not None and samples is not None:
        # exactly torch's class: one derived from it may group samples in its own way
        own_batches = type(batch_sampler) is not torch.utils.data.BatchSampler and batch_sampler is not None
        chosen = batch_sampler if own_batches else sampler
        order = None if own_batches else is_plain_shuffle(sampler, samples)
        order = type(chosen).__name__ if order is None else order
    # each worker of a stream reads a part of it, and they take turns: their number decides which samples come together
    workers = {"num_workers": loader.num_workers} if isinstance(dataset, IterableDataset) else {}
    return {
        "batch_size": _plain_or_missing(getattr(loader, "batch_size", None)),
        "dataset length" if dataset is not None else "batches": samples if dealt_out else None,
        "shuffle": order,
        "drop_last": _plain_or_missing(getattr(loader, "drop_last", None)),
        **workers,
    }


def _describe_optimizer(optimizer: Optimizer, names: Any) -> dict[str, Any]:
    return {
        "class": kernels.class_of(optimizer),
        "groups": [settings_of(group) for group in optimizer.param_groups],
        "parameters": names,
    }


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings of an optimizer's parameter group, except those that choose a kernel."""
    values = {name: _plain_or_missing(value) for name, value in group.items() if name not in ("params", *kernels.FLAGS)}
    return {name: value for name, value in values.items() if value is not MISSING}


def _describe_scheduler(config: "SchedulerConfig") -> dict[str, Any]:
    scheduler = config.scheduler
    state = _plain_or_missing(scheduler.state_dict())
    return {
        "class": type(scheduler).__name__,
        "interval": config.interval,
        "frequency": config.frequency,
        "state": _flat(state) if isinstance(state, dict) else {},
    }


def _flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names; a sequence of schedulers has one name each."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, dict) and any(isinstance(item, dict) for item in inner.values()):
            found |= _flat({str(number): item for number, item in inner.items()}, f"{prefix}{key}.")
        elif isinstance(value, dict) and value and not any(name.isdigit() for name in value):
            found |= _flat(value, f"{prefix}{key}.")
        elif key not in POSITION:
            found[prefix + key] = value
    return found


def _plain_or_missing(value: Any) -> Any:
    """Return numbers, text and containers of those; MISSING for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:  # a learning rate may be a tensor
        return value.item()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        inner = {str(key): _plain_or_missing(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not MISSING}
    if isinstance(value, (list, tuple)):
        items = [_plain_or_missing(item) for item in value]
        return MISSING if MISSING in items else items
    return MISSING


# --- comparing --------------------------------------------------------------------------------------------------------
def compare(
    saved: Mapping[str, Any], samples: Mapping[str, Any], own: Mapping[str, Any], rescheduled: Collection[int]
) -> Changes:
    """Return the differences between a checkpoint's contents and a run's fingerprint; unknown settings count as equal.

    `rescheduled`: optimizers whose learning rates follow a new schedule from here on.
    """
    was, found = saved.get("fingerprint") or {}, Changes()
    found.samples = _changed_samples(was.get("samples", {}), samples)
    found.changed = _changed_values(was.get("training", {}), own["training"])
    for index, now in enumerate(own["optimizers"]):
        number = f"[{index}]" if len(own["optimizers"]) > 1 else ""
        before = _at(was.get("optimizers", ()), index)
        if before is None:  # a file of another program does not tell
            continue
        for group, (one, other) in enumerate(zip(in_group_order(before, now), now["groups"], strict=False)):
            place = f"{now['class']}{number}" + (f".param_groups[{group}]" if len(now["groups"]) > 1 else "")
            # a scheduler sets initial_lr to lr: one change of the config is told once
            same_rate = one.get("lr") == other.get("lr")
            for change in _changed_values(
                one, {name: other[name] for name in other if same_rate or name != "initial_lr"}, f"{place}."
            ):
                new = index in rescheduled and change.name.rpartition(".")[2] in SCHEDULED
                (found.changed if new else found.restored).append(change)
        if None not in (before["parameters"], now["parameters"]) and before["parameters"] != now["parameters"]:
            found.changed.append(SettingChange(f"{now['class']}{number}.params", "another order", "matched by name"))
    for index, now in enumerate(own["schedulers"]):
        found.changed += changed_schedule(_at(was.get("schedulers", ()), index), now)
    return found


def in_group_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved settings of an optimizer's groups in the current order of groups."""
    groups, was, names = before["groups"], before["parameters"], now["parameters"]
    if was is None or names is None:
        return list(groups)
    places = {frozenset(group): index for index, group in enumerate(was)}
    return [groups[places.get(frozenset(group), min(index, len(groups) - 1))] for index, group in enumerate(names)]


def changed_schedule(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings of a learning rate scheduler that differ from the checkpoint's; none where it has none."""
    name = now["class"]
    if before is None:
        return []
    if before["class"] != name:
        return [SettingChange(SCHEDULER, before["class"], name)]
    how = _changed_values(before, {key: now[key] for key in ("interval", "frequency")}, f"{name} ")
    return how + _changed_values(before["state"], now["state"], f"{name}.")


def other_dtypes(task: nn.Module, saved: Mapping[str, Any]) -> list[SettingChange]:
    """Return how the dtypes of a task's weights differ from a checkpoint's: one change for each pair of dtypes."""
    weights = saved.get("state_dict") or {}
    found: dict[tuple[Any, Any], list[str]] = {}
    for name, parameter in task.named_parameters():
        was = getattr(weights.get(name), "dtype", parameter.dtype)
        if was != parameter.dtype:
            found.setdefault((was, parameter.dtype), []).append(name)
    return [
        SettingChange(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), *map(str, pair))
        for pair, names in found.items()
    ]


def numerics_changed(saved: Mapping[str, Any], own: Mapping[str, Any], every_bit: bool) -> list[SettingChange]:
    """Return differences in `kernels.numerics`; unless every bit counts, without those that depend on the machine."""
    return _changed_values(saved, {name: value for name, value in own.items() if every_bit or name not in LAYOUT})


def _changed_values(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[SettingChange]:
    """Return the differences under the keys that both have."""
    return [SettingChange(prefix + key, was[key], now[key]) for key in now if key in was and was[key] != now[key]]


def _changed_samples(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Drop a limit that leaves as many batches as before, and a number of batches that another change explains."""
    found, rounds = _changed_values(was, now), "batches of an epoch"
    names = {change.name for change in found}
    limits = {"limit_train_batches"} if now[rounds] is not None and rounds not in names else set()
    left_out = limits | ({rounds} if names - {rounds} else set())
    return [change for change in found if change.name not in left_out]


def _at(sequence: Sequence[Any], index: int) -> Any:
    return sequence[index] if index < len(sequence) else None
