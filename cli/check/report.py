"""Report of `legato check`: measurements, and problems found by comparing the ranks' records with the run's needs."""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ...base.errors import did_you_mean
from ...base.quantities import first_validation, format_bytes, time_taken
from ...callbacks.callback import Callback
from ...callbacks.checkpoint import Checkpoint
from ...tasks.task import Task
from ...trainer.optimization.kernels import NOTHING_COMPILED
from ...trainer.processes.layout_report import describe_layout
from ...trainer.trainer import Trainer
from .trial import RankRecord, needs_every_gradient

WARM_STEPS = 6
"""Least number of steps for a typical step time; with fewer, even the later half may be slow."""
SHOWN_LINES = 8
"""Number of ranks above which only the largest value is shown."""


@dataclass
class Report:
    """Findings of a check; the run is fine if there are no problems."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Differences between the check and the run, and findings that may be intended."""
    tried: list[str] = field(default_factory=list)
    """The stages that worked."""
    records: list[RankRecord] = field(default_factory=list)
    """Records of the ranks in training."""
    checkpoint_bytes: int | None = None
    weights_bytes: int = 0
    required_bytes: int | None = None
    """Disk space for all checkpoints that the run keeps at once plus one in progress; None if unknown."""
    free_bytes: int = 0
    """Free disk space where checkpoints are written."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def seconds(self) -> float | None:
        """Seconds per step including data: median of the later half of the steps, on the slowest rank.

        The first steps also load code, start loader workers and allocate memory.
        """
        later = [one.seconds[len(one.seconds) // 2 :] for one in self.records if one.seconds]
        return max(map(median, later), default=None)

    def text(self) -> str:
        """Return the measurements for a terminal, without the problems."""
        return "\n".join(f"{name:<16}{value}" for name, value in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "Worked", ", ".join(self.tried) or "nothing"
        records = self.records
        if records:
            places = [one.place for one in records if one.place is not None]
            lines = describe_layout(places, records[0].origin, "").splitlines() if places else [str(len(records))]
            yield "Processes", f"\n{'':<16}".join(lines)
        if self.seconds is not None:
            total = next((one.total_steps for one in records if one.total_steps is not None), None)
            whole = "" if total is None else f"; {time_taken(self.seconds * total)} for {total:,} steps"
            if max(len(one.seconds) for one in records) < WARM_STEPS:
                whole += ", or less: only the first steps were tried"
            yield "Seconds a step", f"{self.seconds:.3g}{whole}"
        if records:
            yield "Memory", _by_rank({one.rank: one.host_bytes for one in records})
        on_device = {one.rank: one.device_bytes for one in records if one.device_bytes is not None}
        if on_device:
            yield "On the device", _by_rank(on_device)
        if self.checkpoint_bytes is not None:
            kept = "their number is not known"
            if self.required_bytes is not None:
                kept = f"{format_bytes(self.required_bytes)} at once"
            size, free = format_bytes(self.checkpoint_bytes), format_bytes(self.free_bytes)
            yield "A checkpoint", f"{size}; {kept}, {free} free"
        logged = next((one.logged for one in records if one.logged is not None), None)
        if logged is not None:
            yield "Logged", ", ".join(logged) or "nothing"
        for remark in self.remarks:
            yield "Remark", remark


def check_gradients(trainer: Trainer, task: Task, report: Report) -> None:
    """Report parameters without a gradient: in any step of any rank if that ends a run, else in all steps of all."""
    records = [one for one in report.records if one.without_gradient]
    strict = needs_every_gradient(trainer) and len(report.records) > 1 and task.automatic_optimization
    missing: dict[str, list[int]] = {}
    for one in records:
        steps = [set(names) for names in one.without_gradient]
        for name in sorted(set.union(*steps) if strict else set.intersection(*steps)):
            missing.setdefault(name, []).append(one.rank)
    if not strict:
        missing = {name: ranks for name, ranks in missing.items() if len(ranks) == len(records)}
    if not missing:
        return
    parts = [f"{name} (rank {', '.join(map(str, ranks))})" if len(ranks) < len(records) else name
             for name, ranks in missing.items()]  # fmt: skip
    remedy = "Freeze parameters that no loss uses (requires_grad_(False)) or remove them"
    if strict:
        remedy += "; if only some batches use them, set trainer.strategy.find_unused_parameters=true"
    found = report.remarks if trainer.strategy.finds_unused else report.problems
    found.append(f"No gradient reaches {', '.join(parts)}. {remedy}.")


def check_monitors(trainer: Trainer, report: Report) -> None:
    """Report monitored metrics that were not logged."""
    record = next((one for one in report.records if one.logged is not None), None)
    if record is None or record.logged is None:
        return
    monitors = [(type(one).__name__, getattr(one, "monitor", None)) for one in trainer.callbacks if is_strict(one)]
    wanted = [(user, name) for user, name in monitors if isinstance(name, str)]
    epoch, total = record.steps_per_epoch, record.total_steps
    every, accumulate = trainer.check_val_every_n_epoch, trainer.accumulate_grad_batches
    first = first_validation(trainer.val_check_interval, every, accumulate, math.inf if epoch is None else epoch)
    if first is not None and total is not None and total < first:
        limit = f"max_steps={trainer.max_steps}" if total == trainer.max_steps else f"max_epochs={trainer.max_epochs}"
        late = [f"{name!r} ({user})" for user, name in wanted if name in record.validated]
        if late:
            report.problems.append(
                f"{limit} ends before the first validation, at step {first}, which logs {', '.join(late)}. Train "
                f"longer, or validate earlier (val_check_interval)."
            )
    for user, name in [*wanted, *(("A learning rate scheduler", name) for name in record.plateaus)]:
        if name not in record.logged:
            report.problems.append(
                f"{user} monitors {name!r}, which was not logged.{did_you_mean(name, record.logged)} "
                f"Logged: {', '.join(record.logged) or 'nothing'}."
            )


def check_graph_breaks(report: Report) -> None:
    """Tell where torch.compile breaks the graph: what comes after is another one, with Python between."""
    for found in dict.fromkeys(place for one in report.records for place in one.graph_breaks):
        report.remarks.append(f"torch.compile breaks its graph at {found}.")
    if any(one.compiled_nothing for one in report.records):
        report.remarks.append(NOTHING_COMPILED)


def is_strict(callback: Callback) -> bool:
    """Return whether a callback requires its monitored metric."""
    return bool(getattr(callback, "strict", True))


def check_disk_space(trainer: Trainer, report: Report) -> None:
    """Report checkpoints that will not fit on their disk."""
    if report.checkpoint_bytes is None:
        return
    length = next(((n.total_steps, n.steps_per_epoch) for n in report.records if n.logged is not None), (None, None))
    disks: dict[int, tuple[Path, int]] = {}
    report.required_bytes = 0
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpoint):
            size = report.weights_bytes if callback.save_weights_only else report.checkpoint_bytes
            count = count_kept(callback, *length)
            if count is None or report.required_bytes is None:
                report.required_bytes = None
            else:
                report.required_bytes += count * size
            folder = (callback.dirpath or Path(trainer.default_root_dir)).absolute()
            folder = next(one for one in (folder, *folder.parents) if one.is_dir())
            disk = os.stat(folder).st_dev
            disks[disk] = folder, disks.get(disk, (folder, 0))[1] + (count or 1) * size
    for folder, asked in disks.values():
        report.free_bytes = shutil.disk_usage(folder).free
        if asked > report.free_bytes:
            report.problems.append(
                f"Checkpoints will take {format_bytes(asked)} in {folder}, where {format_bytes(report.free_bytes)} are "
                f"free: {format_bytes(report.checkpoint_bytes)} each. Free some space, keep fewer (save_top_k), or set "
                f"run.root."
            )


def count_kept(callback: Checkpoint, total_steps: int | None, steps_per_epoch: int | None) -> int | None:
    """Return the largest number of checkpoints on disk at once, including one in progress.

    None if all are kept and their number is unknown.
    """
    saves = None
    if total_steps is not None and steps_per_epoch and math.isinf(callback.seconds_between):
        by_steps = total_steps // callback.every_n_train_steps if callback.every_n_train_steps else 0
        epochs = total_steps // steps_per_epoch
        by_epochs = epochs // callback.every_n_epochs if callback.every_n_epochs else 0
        saves = by_steps + by_epochs + bool(callback.save_last)
    if callback.save_top_k == -1:
        return saves
    newest_counts_extra = callback.save_last and (callback.monitor is not None or callback.save_top_k == 0)
    kept = callback.save_top_k + newest_counts_extra
    return min(kept + 1, saves if saves is not None else kept + 1) if kept else 0


def _by_rank(sizes: dict[int, int]) -> str:
    if len(sizes) > SHOWN_LINES:
        rank = max(sizes, key=lambda one: sizes[one])
        return f"at most {format_bytes(sizes[rank])}, on rank {rank}"
    return ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in sizes.items())
