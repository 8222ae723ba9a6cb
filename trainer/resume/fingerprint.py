"""Fingerprint of a run: its effective settings, stored in each checkpoint as a flat dict.

    samples.*                    settings that determine each step's samples
    training.*, schedulers.0.*   other settings that affect training
    optimizers.0.groups.1.lr     settings of parameter groups, restored from the checkpoint on resume
    numerics.*                   settings and versions that affect the low-order bits of a result
    data.content                 content of the first batch that the run read, which is read again on resume

On resume, the checkpoint's fingerprint is compared with the current fingerprint (`compare`). Names that appear in only
one of the fingerprints are not reported.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ...base.arguments import TrainerArguments
from ..data.combined import CombinedLoader, loaders_in
from ..data.loaders import is_plain_shuffle, length_of
from ..optimization import kernels
from ..switches import processor

if TYPE_CHECKING:
    from ..optimization.optimization import Optimization

PLAIN = (bool, int, float, str, type(None))
POSITION = {"base_lrs", "_last_lr"}
"""Keys of a scheduler's state that depend only on the optimizer's learning rate, which is compared separately."""
SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Settings of a parameter group that a schedule depends on."""
LAYOUT = {"threads", "cpu_capability", "cpu_features", "micro_batches", "optimizers", "tensor_shards"}
"""Names below `numerics` that may differ between machines and layouts and change only low-order bits."""
NOT_REFUSED = {"legato", "python", "numpy"}
"""Names below `numerics` that can affect a step only through its samples, which are compared by content."""
ROUNDS = "batches of an epoch"
LEFT_OUT_SAMPLES = "leave_out_samples"
"""The only sample setting that may change within an epoch, even under `bitwise`: all other samples remain in place."""
CONTENT = "data.content"
SAMPLES, LISTED = "samples of the dataset", "files of the dataset"
DATA = (SAMPLES, LISTED, "dataset length")
"""Prefixes of changes that indicate that the run has different data."""
FILES = 256
"""Maximum number of files to examine in a dataset."""
MISSING = object()


class SettingChange(NamedTuple):
    """A setting that differs from the checkpoint."""

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.was} -> {self.now}"


@dataclass
class Changes:
    """Differences between a checkpoint and the run that resumes from it."""

    samples: list[SettingChange] = field(default_factory=list)
    """Settings that determine each step's samples."""
    changed: list[SettingChange] = field(default_factory=list)
    """Other settings that affect training; the current value is used."""
    restored: list[SettingChange] = field(default_factory=list)
    """Settings restored from the checkpoint although their current values differ."""
    rounding: list[SettingChange] = field(default_factory=list)
    """Differences that may change the low-order bits of results, in a run that does not guarantee these bits."""
    end_epoch: bool = False
    """Whether the rest of the epoch is skipped because its steps would have different samples."""


def below(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the section's prefix added to their names."""
    return {f"{section}.{name}": value for name, value in values.items()}


def section_of(fingerprint: Mapping[str, Any] | None, section: str) -> dict[str, Any]:
    """Return a section of a fingerprint, without the section's prefix."""
    start = f"{section}."
    return {name.removeprefix(start): value for name, value in (fingerprint or {}).items() if name.startswith(start)}


# --- computing --------------------------------------------------------------------------------------------------------
def fingerprint_of(trainer: TrainerArguments, optimization: "Optimization") -> dict[str, Any]:
    """Return a run's fingerprint before its optimizers are loaded, without `samples.*` and `numerics.*`."""
    limit = trainer.gradient_clip_val or None  # 0 turns clipping off, as None does
    fingerprint: dict[str, Any] = {
        "training.reproducible": trainer.reproducible,
        "training.gradient_clip_val": limit,
        "training.gradient_clip_algorithm": None if limit is None else trainer.gradient_clip_algorithm,
        "training.nan": trainer.nan,
        "training.sync_batchnorm": trainer.sync_batchnorm,
        "training.automatic_optimization": optimization.automatic,
        # not the number of each: under ddp_rpc, some of the parameters are on servers
        "training.dtypes": sorted({str(parameter.dtype) for parameter in optimization.task.parameters()}),
        f"training.{LEFT_OUT_SAMPLES}": sorted(trainer.leave_out_samples or ()),
    }
    for index, optimizer in enumerate(optimization.optimizers):
        fingerprint[f"optimizers.{index}.class"] = kernels.class_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            settings = settings_of(group)
            settings.pop("initial_lr", None)  # a scheduler sets it to lr: report a changed learning rate only once
            fingerprint |= below(f"optimizers.{index}.groups.{number}", settings)
    for index, config in enumerate(optimization.schedulers):
        plan = {"class": type(config.scheduler).__name__, "interval": config.interval, "frequency": config.frequency}
        state = _plain_or_missing(config.scheduler.state_dict())
        plan |= dict(_flat(state, "state")) if isinstance(state, dict) else {}
        fingerprint |= below(f"schedulers.{index}", plan)
    return fingerprint


def samples_of(trainer: TrainerArguments, loader: Any, rounds: int | None, dealt_out: bool) -> dict[str, Any]:
    """Return the settings that determine each step's samples, to the extent that the training loader reveals them.

    Args:
        rounds: number of batches per replica in an epoch; None if unknown.
        dealt_out: True if Legato shards the samples across processes, False if each process's loader yields a different
            shard.
    """
    settings: dict[str, Any] = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "limit_train_batches": trainer.limit_train_batches,
        "overfit_batches": trainer.overfit_batches,
        "use_distributed_sampler": dealt_out,
        ROUNDS: rounds,
    }
    if not isinstance(loader, CombinedLoader):
        return settings | _describe_loader(loader, dealt_out)
    settings |= {"loaders": len(loader.names), "mode": loader.mode}
    for name, inner in zip(loader.names, loaders_in(loader), strict=False):
        settings |= below(name, _describe_loader(inner, dealt_out))
    return settings


def _describe_loader(loader: Any, dealt_out: bool) -> dict[str, Any]:
    """Return the settings that determine a loader's samples, excluding its length if it may not yield all data."""
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    dataset = getattr(loader, "dataset", None)
    samples = length_of(dataset) if dataset is not None else length_of(loader)
    order: Any = None
    if sampler is not None and samples is not None:
        # exactly torch's class, because a subclass may group samples differently
        is_custom = type(batch_sampler) is not torch.utils.data.BatchSampler and batch_sampler is not None
        chosen = batch_sampler if is_custom else sampler
        order = None if is_custom else is_plain_shuffle(sampler, samples)
        order = type(chosen).__name__ if order is None else order
    # each worker reads a share of a stream, and workers take turns, so their number determines the samples of a batch
    workers = {"num_workers": loader.num_workers} if isinstance(dataset, IterableDataset) else {}
    return {
        "batch_size": _plain_or_missing(getattr(loader, "batch_size", None)),
        "dataset length" if dataset is not None else "batches": samples if dealt_out else None,
        LISTED: describe_files(dataset) if dealt_out else None,
        "shuffle": order,
        "drop_last": _plain_or_missing(getattr(loader, "drop_last", None)),
        **workers,
    }


def describe_files(dataset: Any) -> str | None:
    """Return the number of files in a dataset's file list, with a hash of some of their names and sizes."""
    while getattr(dataset, "dataset", None) is not None:  # a Subset
        dataset = dataset.dataset
    for listed in getattr(dataset, "__dict__", {}).values():
        if not isinstance(listed, (list, tuple)) or not listed or not os.path.isfile(_path_of(listed[0])):
            continue
        paths = [os.path.abspath(_path_of(item)) for item in listed[:: -(-len(listed) // FILES)]]
        sizes = [os.path.getsize(path) if os.path.isfile(path) else None for path in paths]
        root = os.path.commonpath(list(map(os.path.dirname, paths)))  # the folder may have moved
        names = [os.path.relpath(path, root) for path in paths]
        return f"{len(listed)} files {blake2b(repr((names, sizes)).encode(), digest_size=4).hexdigest()}"
    return None


def _path_of(item: Any) -> str:
    item = item[0] if isinstance(item, (list, tuple)) and item else item
    return os.fspath(item) if isinstance(item, (str, os.PathLike)) else ""


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings of an optimizer's parameter group, excluding those that select a kernel."""
    values = {name: _plain_or_missing(value) for name, value in group.items() if name not in ("params", *kernels.FLAGS)}
    return {name: value for name, value in values.items() if value is not MISSING}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings in a scheduler's state with dotted names, including those of nested schedulers."""
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    # milestones are a dict with numbers as keys, and are treated as a single setting
    has_names = isinstance(value, dict) and value and not any(str(key).isdigit() for key in value)
    if not has_names and not (isinstance(inner, dict) and any(isinstance(item, dict) for item in inner.values())):
        yield name, value
        return
    for key, item in inner.items():
        if key not in POSITION:
            yield from _flat(item, f"{name}.{key}")


def _plain_or_missing(value: Any) -> Any:
    """Convert a number, a string or a container of them to plain values. Return MISSING for anything else."""
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
def compare(saved: Mapping[str, Any], current: Mapping[str, Any], rescheduled: Collection[int], exact: bool) -> Changes:
    """Return the differences between a checkpoint's fingerprint and that of the current run.

    Args:
        rescheduled: optimizers whose learning rates follow a new schedule once the run resumes.
        exact: True to report machine-dependent numerics as changed settings.
    """
    changes = Changes()
    for name, now in current.items():
        if name not in saved or saved[name] == now:
            continue
        section, _, rest = name.partition(".")
        if section in ("optimizers", "schedulers"):
            is_restored = section == "optimizers" and not follows_schedule(name, rescheduled)
            (changes.restored if is_restored else changes.changed).append(SettingChange(name, saved[name], now))
        elif section == "samples":
            changes.samples.append(SettingChange(rest, saved[name], now))
        elif section == "numerics" and rest in (NOT_REFUSED if exact else NOT_REFUSED | LAYOUT):
            changes.rounding.append(SettingChange(rest, saved[name], now))
        else:
            changes.changed.append(SettingChange(rest, saved[name], now))
    # Two differences are not reported: a new limit that leaves the number of batches unchanged, and a new number of
    # batches that other changes explain.
    names, rounds = {change.name for change in changes.samples}, current.get(f"samples.{ROUNDS}")
    explained = {"limit_train_batches"} if ROUNDS not in names and rounds is not None else set()
    explained |= {ROUNDS} if names - {ROUNDS} else set()
    changes.samples = [change for change in changes.samples if change.name not in explained]
    return changes


def is_elsewhere(saved: Mapping[str, Any]) -> bool:
    """Return whether samples may differ in their low-order bits from those on the machine that wrote the checkpoint."""
    now = {"torch": str(torch.__version__), "numpy": np.__version__, **processor()}
    return any(saved.get(f"numerics.{name}") != value for name, value in now.items())


def follows_schedule(name: str, rescheduled: Collection[int]) -> bool:
    """Return whether a new schedule determines the setting of a parameter group."""
    section, index, *_, setting = name.split(".")
    return section == "optimizers" and int(index) in rescheduled and setting in SCHEDULED
