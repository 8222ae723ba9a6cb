"""What `legato check` found: the figures, and what the ranks saw held against what the run asks for."""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ....callbacks.callback import Callback
from ....callbacks.checkpoint import Checkpoint
from ....tasks.task import Task
from ...errors import did_you_mean
from ...trainer import Trainer
from ..plan.state_size import shown
from .trial import Notes, needs_every_gradient

WARM = 6
"""Steps; where fewer were tried, the later half of them may have been slow ones, too."""
SHOWN_LINES = 8
"""Ranks; of more than these only the largest figure is shown."""


@dataclass
class Report:
    """What a check found. All is well where there are no problems."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What the check did otherwise than the run will, and what may or may not be meant so."""
    tried: list[str] = field(default_factory=list)
    """The stages that worked."""
    notes: list[Notes] = field(default_factory=list)
    """What each rank saw while it trained."""
    checkpoint_bytes: int | None = None
    weights_bytes: int = 0
    asked_bytes: int | None = None
    """What all checkpoints take that the run keeps at once, and one more; None: nobody can say."""
    free_bytes: int = 0
    """What is free where checkpoints go."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, with its data: the median of the later half of those tried, of the slowest rank.

        The first steps also load code, start a loader's workers and fill memory.
        """
        later = [notes.seconds[len(notes.seconds) // 2 :] for notes in self.notes if notes.seconds]
        return max(map(median, later), default=None)

    def text(self) -> str:
        """Return the figures for a terminal, without the problems."""
        return "\n".join(f"{name:<16}{value}" for name, value in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "Worked", ", ".join(self.tried) or "nothing"
        notes = self.notes
        if notes:
            yield "Processes", str(len(notes))
        if self.seconds is not None:
            total = next((one.total_steps for one in notes if one.total_steps is not None), None)
            whole = "" if total is None else f"; {_duration(self.seconds * total)} for {total:,} steps"
            if max(len(one.seconds) for one in notes) < WARM:
                whole += ", or less: only the first steps were tried"
            yield "Seconds a step", f"{self.seconds:.3g}{whole}"
        if notes:
            yield "Memory", _by_rank({one.rank: one.host_bytes for one in notes})
        on_device = {one.rank: one.device_bytes for one in notes if one.device_bytes is not None}
        if on_device:
            yield "On the device", _by_rank(on_device)
        if self.checkpoint_bytes is not None:
            asked = "as many as it will be" if self.asked_bytes is None else f"{shown(self.asked_bytes)} at once"
            yield "A checkpoint", f"{shown(self.checkpoint_bytes)}; {asked}, {shown(self.free_bytes)} free"
        logged = next((one.logged for one in notes if one.logged is not None), None)
        if logged is not None:
            yield "Logged", ", ".join(logged) or "nothing"
        for remark in self.remarks:
            yield "Remark", remark


def judge_gradients(trainer: Trainer, task: Task, report: Report) -> None:
    """Name the parameters that got no gradient: in one step of one rank where that ends a run, else in all of all."""
    notes = [one for one in report.notes if one.without_gradient]
    strict = needs_every_gradient(trainer) and len(report.notes) > 1 and task.automatic_optimization
    lacking: dict[str, list[int]] = {}
    for one in notes:
        steps = [set(names) for names in one.without_gradient]
        for name in sorted(set.union(*steps) if strict else set.intersection(*steps)):
            lacking.setdefault(name, []).append(one.rank)
    if not strict:
        lacking = {name: ranks for name, ranks in lacking.items() if len(ranks) == len(notes)}
    if not lacking:
        return
    parts = [f"{name} (rank {', '.join(map(str, ranks))})" if len(ranks) < len(notes) else name
             for name, ranks in lacking.items()]  # fmt: skip
    remedy = "Freeze what no loss uses (requires_grad_(False)) or remove it"
    declared = getattr(trainer.strategy, "module_options", {}).get("find_unused_parameters", False)
    if strict:
        remedy += "; if only some batches use it, set trainer.strategy.find_unused_parameters=true"
    found = report.remarks if declared else report.problems
    found.append(f"No gradient reaches {', '.join(parts)}. {remedy}.")


def judge_monitors(trainer: Trainer, report: Report) -> None:
    """Name every monitored metric that was not logged."""
    notes = next((one for one in report.notes if one.logged is not None), None)
    if notes is None or notes.logged is None:
        return
    monitors = [(type(one).__name__, getattr(one, "monitor", None)) for one in trainer.callbacks if is_strict(one)]
    wanted = [(user, name) for user, name in monitors if isinstance(name, str)]
    for user, name in [*wanted, *(("A learning rate scheduler", name) for name in notes.plateaus)]:
        if name not in notes.logged:
            report.problems.append(
                f"{user} monitors {name!r}, which was not logged.{did_you_mean(name, notes.logged)} "
                f"Logged: {', '.join(notes.logged) or 'nothing'}."
            )


def is_strict(callback: Callback) -> bool:
    """Return whether a callback minds that what it monitors is absent."""
    return bool(getattr(callback, "strict", True))


def judge_space(trainer: Trainer, report: Report) -> None:
    """See whether the checkpoints that the run keeps at once fit on the disk that they go to."""
    if report.checkpoint_bytes is None:
        return
    length = next(((n.total_steps, n.steps_per_epoch) for n in report.notes if n.logged is not None), (None, None))
    disks: dict[int, tuple[Path, int]] = {}
    report.asked_bytes = 0
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpoint):
            size = report.weights_bytes if callback.save_weights_only else report.checkpoint_bytes
            count = count_kept(callback, *length)
            if count is None or report.asked_bytes is None:
                report.asked_bytes = None
            else:
                report.asked_bytes += count * size
            folder = (callback.dirpath or Path(trainer.default_root_dir)).absolute()
            folder = next(one for one in (folder, *folder.parents) if one.is_dir())
            disk = os.stat(folder).st_dev
            disks[disk] = folder, disks.get(disk, (folder, 0))[1] + (count or 1) * size
    for folder, asked in disks.values():
        report.free_bytes = shutil.disk_usage(folder).free
        if asked > report.free_bytes:
            report.problems.append(
                f"Checkpoints will take {shown(asked)} in {folder}, where {shown(report.free_bytes)} are free: "
                f"{shown(report.checkpoint_bytes)} each. Free some space, keep fewer (save_top_k), or set run.root."
            )


def count_kept(callback: Checkpoint, total_steps: int | None, steps_per_epoch: int | None) -> int | None:
    """Return how many checkpoints there are at once at most, with the one that is written before another goes.

    None where all are kept and nobody can say how many there will be.
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


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _by_rank(sizes: dict[int, int]) -> str:
    if len(sizes) > SHOWN_LINES:
        rank = max(sizes, key=lambda one: sizes[one])
        return f"at most {shown(sizes[rank])}, on rank {rank}"
    return ", ".join(f"rank {rank} {shown(size)}" for rank, size in sizes.items())
