"""`legato check`: runs a few steps of every stage in the real process layout, to catch errors before the run.

The command trains and validates, resumes from the checkpoint that was just written, tests and predicts. Each stage runs
the config with some values replaced (`trial_of`). Trials write to a temporary folder next to the run directories, so
that they use the same disk and network as the run. A callback on every rank records measurements (recorder.py).
"""

import logging
import math
import re
import shutil
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import ConfigError, LegatoError, WorkerError, did_you_mean
from ..base.location import Address, to_absolute
from ..base.messages import is_quiet
from ..base.place import find_place
from ..base.quantities import counted, first_validation, format_bytes, time_taken
from ..base.run_names import CHECKPOINTS
from ..callbacks.checkpoint import Checkpoint
from ..callbacks.checkpoint_callback import CheckpointCallback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.model_summary import ModelSummary
from ..callbacks.progress_bar import ProgressDisplay
from ..loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from ..tasks.data_module import DataModule
from ..tasks.task import Task
from ..trainer.checkpoints import find, manifest
from ..trainer.hooks import overrides
from ..trainer.processes.rendezvous import leave_process_group
from .config.build import build_config
from .config.resumed import load_to_fit
from .recorder import Record, Recorder, layout_of, read_records
from .run import warm_up_if_several

if TYPE_CHECKING:
    from .config.build import ConfiguredRun
    from .config.check import Config

SKIPPED = (CheckpointCallback, EarlyStopping, ProgressDisplay, ModelSummary)
"""Callbacks to leave out of a trial: they would end it early, write elsewhere, or print."""
LOCAL_LOGGERS = (TensorBoardLogger, JSONLinesLogger, CSVLogger)
"""Loggers that a trial includes, because they only write to the run directory."""
OVERLAY = {
    "fast_dev_run": False,
    "log_every_n_steps": 1,
    # validate after the first batch, so that checkpoints find their monitored metrics
    "val_check_interval": 1,
    "check_val_every_n_epoch": None,
    "min_steps": None,
    "min_epochs": None,
    # a trial that fails must not be restarted
    "max_restarts": 0,
}
"""Trainer arguments for a trial. `max_steps` is left unchanged, because learning rate schedules depend on it."""
WARM_STEPS = 6
"""Minimum number of steps for a representative step time. With fewer steps, even the second half may be slow."""


@dataclass
class Report:
    """The findings of a check. The check passes if there are no problems."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Differences between the check and the run, and findings that may be intended."""
    tried: list[str] = field(default_factory=list)
    """Stages that succeeded."""
    records: list[Record] = field(default_factory=list)
    """Training measurements of every rank."""
    checkpoint_bytes: int | None = None
    base_bytes: int = 0
    """Bytes of frozen weights that are stored once, beside the checkpoints."""
    weights_bytes: int = 0
    disk: list[str] = field(default_factory=list)
    """Disk space that each Checkpoint callback needs for the checkpoints that it keeps and one in progress."""

    @property
    def seconds(self) -> float | None:
        """Seconds per step including data loading: the median over the second half of the steps on the slowest rank.

        The first few steps also load code, start loader workers and allocate memory.
        """
        # all ranks wait for the slowest rank's gradients
        later = [record.seconds[len(record.seconds) // 2 :] for record in self.records if record.seconds]
        return max(map(median, later), default=None)

    def text(self) -> str:
        """Return the measurements as text for a terminal, without the problems."""
        return "\n".join(f"{name:<16}{value}" for name, value in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "Worked", ", ".join(self.tried) or "nothing"
        records = self.records
        if records:
            yield "Processes", layout_of(records).replace("\n", f"\n{'':<16}")
        if self.seconds is not None:
            total = next((record.total_steps for record in records if record.total_steps is not None), None)
            length = "" if total is None else f"; {time_taken(self.seconds * total)} for {total:,} steps"
            if max(len(record.seconds) for record in records) < WARM_STEPS:
                length += ", or less: only the first steps were timed"
            yield "Seconds/step", f"{self.seconds:.3g}{length}"
        if records:
            yield "Memory", _largest([record.host_bytes for record in records])
            if records[0].device_bytes is not None:
                yield "Device memory", _largest([record.device_bytes or 0 for record in records])
        if self.checkpoint_bytes is not None:
            beside = [f"{format_bytes(self.base_bytes)} shared by all checkpoints"] if self.base_bytes else []
            yield "Checkpoint", "; ".join([format_bytes(self.checkpoint_bytes), *beside, *self.disk])
        for record in records:
            if record.bits and (record is records[0] or record.bits != records[0].bits):
                yield "Bits depend on" if record is records[0] else f"  on rank {record.rank}", record.bits
        logged = next((record.logged for record in records if record.logged is not None), None)
        if logged is not None:
            yield "Logged", ", ".join(logged) or "nothing"
        for remark in self.remarks:
            yield "Remark", remark


def run_check(options: Namespace) -> None:
    """Check the run that the command line describes, and print the report. Raises ConfigError if there are problems."""
    quiet, log = is_quiet(), logging.getLogger("legato")
    if log.level != logging.DEBUG:
        log.setLevel(logging.WARNING)  # hide messages from the trials; the report shows the process layout
    config = load_to_fit(options.words, warm_up_if_several)
    try:
        report = check_config(config)
    finally:
        leave_process_group()
    place = find_place(config.values["trainer"]["cluster"])
    if place is not None and place.rank > 0:  # rank 0 prints the report
        raise SystemExit(2 if report.problems else 0)
    if not quiet:
        print(report.text())
    if report.problems:
        indented = [problem.replace("\n", "\n     ") for problem in report.problems]
        listed = "\n".join(f"  {index + 1}. {problem}" for index, problem in enumerate(indented))
        raise ConfigError(f"the check found {counted(len(report.problems), 'problem')}:\n{listed}")
    print("No problems found.")


def check_config(config: "Config") -> Report:
    """Run a config's trials and return a report of the problems."""
    original, report = build_config(config), Report()
    # on the disk that holds the runs, since the check should also detect problems with that disk
    with temporary_folder(original, report) as folder:
        try_stages(config, original, folder, report)
    check_gradients(original, report)
    check_monitors(original, report)
    check_disk_space(original, report)
    return report


@contextmanager
def temporary_folder(original: "ConfiguredRun", report: Report) -> Iterator[Path]:
    """Create a folder in the run root or its nearest existing parent and remove it on exit.

    If the run root is not writable, report a problem and use the system's temporary folder. Under a launcher, rank 0
    creates the folder for all ranks.
    """
    root, place = to_absolute(original.trainer.default_root_dir), find_place(original.trainer.cluster)
    if isinstance(root, Address):
        find.checkpoints_in(root / original.trainer.run_name)  # raises an error if the store is not accessible
        root = Path(gettempdir())
    if place is not None and place.rank > 0:
        yield root
        return
    try:
        made = TemporaryDirectory(prefix=".check-", dir=nearest(root), ignore_cleanup_errors=True)
    except OSError as error:
        report.problems.append(f"Cannot write to the run root {root}: {error.strerror}. Choose another run.root.")
        made = TemporaryDirectory(prefix="legato-check-", ignore_cleanup_errors=True)
    with made as folder:
        yield Path(folder)


def nearest(folder: Path) -> Path:
    """Return the folder itself or, if it doesn't exist yet, its nearest existing parent, which is on the same disk."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def try_stages(config: "Config", original: "ConfiguredRun", folder: Path, report: Report) -> None:
    """Run fit, resume, test and predict, and read the records that the ranks wrote during fit."""
    trainer = original.trainer
    skipped = [type(logger).__name__ for logger in trainer.loggers if not isinstance(logger, LOCAL_LOGGERS)]
    if skipped:
        report.remarks.append(f"Not tried, to avoid writing to a server: {', '.join(skipped)}.")
    trial = attempt("fit", config, original, folder, report).trainer
    is_launched = find_place(trainer.cluster) is not None
    if is_launched:
        trial.strategy.collectives.barrier()  # wait until all records are written
    saved = None
    if trial.run_dir is not None:
        report.records, newest = read_records(trial.run_dir), find.newest_complete(trial.run_dir / CHECKPOINTS)
        saved = None if newest is None else Path(newest)
    if saved is not None:
        report.checkpoint_bytes = sum(path.stat().st_size for path in saved.iterdir())
        report.base_bytes = sum(path.stat().st_size for path in (saved.parent / manifest.BASE).glob("*"))
        report.weights_bytes = (saved / manifest.MODEL_FILE).stat().st_size
    if "fit" in report.tried and trainer.checkpoint_callback is not None:
        attempt("resume", config, original, folder, report, resume=saved)
    if has_stage(original, "test"):
        attempt("test", config, original, folder, report, verbose=False)
    if has_stage(original, "predict"):
        attempt("predict", config, original, folder, report, return_predictions=False)
    if is_launched:
        trial.strategy.collectives.barrier()  # keep the folder until every rank is done


def attempt(
    name: str, config: "Config", original: "ConfiguredRun", folder: Path, report: Report, **options: Any
) -> "ConfiguredRun":
    """Run a stage and report each error once. Under a launcher, raise the error, since other ranks cannot continue."""
    trial = trial_of(config, original, name, folder)
    stage = getattr(trial.trainer, "fit" if name == "resume" else name)
    try:
        stage(trial.task, datamodule=trial.data, **options)
    except Exception as error:
        if find_place(trial.trainer.cluster) is not None:
            raise
        message = describe_error(error)
        if not any(problem.endswith(message) for problem in report.problems):
            report.problems.append(f"{name}: {message}")
    else:
        report.tried.append(name)
    return trial


def trial_of(config: "Config", original: "ConfiguredRun", name: str, folder: Path) -> "ConfiguredRun":
    """Build a config's objects for a run of a few steps in `folder`, with validation after each step.

    Each replica uses one batch from each evaluation loader.
    """
    trainer, values = original.trainer, dict(config.values["trainer"])
    place = find_place(trainer.cluster)
    local = trainer.strategy.local_processes(trainer.device_list)
    # one batch per replica, to detect a loader that is too short
    batches = trainer.replicas or (local * trainer.num_nodes if place is None else place.world_size)
    for argument in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        limit = getattr(trainer, argument)
        values[argument] = min(limit, batches) if isinstance(limit, int) else batches if limit else 0
    values |= OVERLAY | {"num_sanity_val_steps": min(1, abs(trainer.num_sanity_val_steps))}
    strategy = values["strategy"]
    if isinstance(strategy, dict) and strategy.get("elastic"):  # no process leaves or joins in a trial
        # an elastic run accepts parameters without gradients
        values["strategy"] = {**strategy, "elastic": False, "find_unused_parameters": True}
    run = {**config.values["run"], "root": str(folder), "save_code": False}
    trial = build_config(config.changed(values, run=run))
    # built again for each stage, since callbacks keep state
    watching = [callback for callback in trial.trainer.callbacks if not isinstance(callback, SKIPPED)]
    # a checkpoint at the end shows how large it is and whether the state can be stored
    share = getattr(trainer.checkpoint_callback, "share_frozen", None)
    saving = [] if trainer.checkpoint_callback is None else [Checkpoint(every_n_epochs=0, share_frozen=share)]
    trial.trainer.callbacks = [Recorder(name), *watching, *saving]
    loggers = [logger for logger in trial.trainer.loggers if isinstance(logger, LOCAL_LOGGERS)]
    # the records need a run directory, which a run without loggers doesn't have
    trial.trainer.loggers = [*loggers] or [JSONLinesLogger()]
    return trial


def has_stage(run: "ConfiguredRun", stage: str) -> bool:
    """Return whether the task defines a stage's step, and the task or data module defines the stage's loader."""
    loader = f"{stage}_dataloader"
    # a stage needs both
    of_data = run.data is not None and overrides(run.data, DataModule, loader)
    return overrides(run.task, Task, f"{stage}_step") and (of_data or overrides(run.task, Task, loader))


def describe_error(error: Exception) -> str:
    """Return an error's message. Unless Legato raised the error, add the rank and the user's stack frames."""
    if isinstance(error, LegatoError):
        return str(error)
    worker = error.__cause__ if isinstance(error.__cause__, WorkerError) else None
    rank = f" (rank {worker.rank})" if worker else ""
    # a worker's frames are gone with its process, but the error holds them as text
    text = f"{worker}\n" if worker else "".join(traceback.format_tb(error.__traceback__))
    frames = re.findall(r'^  File ".*\n(?:    .*\n)*', text, re.MULTILINE)
    ours = tuple(f'  File "{folder}' for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
    # leaves out frames in Legato and torch, which users cannot fix
    places = [frame for frame in frames if not frame.startswith(ours)]
    return f"{type(error).__name__}{rank}: {error}\n{''.join(places or frames).rstrip()}"


# --- findings in the records ------------------------------------------------------------------------------------------
def check_gradients(run: "ConfiguredRun", report: Report) -> None:
    """Report parameters that received no gradient on any rank. That is a problem unless the strategy accepts them."""
    missing = [set(record.without_gradient) for record in report.records if record.without_gradient is not None]
    if "fit" in report.tried and missing and (names := sorted(set.intersection(*missing))):
        findings = report.remarks if run.trainer.strategy.finds_unused else report.problems
        findings.append(
            f"No gradient reaches {', '.join(names)}. Freeze parameters that the loss does not use "
            f"(requires_grad_(False)), or remove them."
        )


def check_monitors(run: "ConfiguredRun", report: Report) -> None:
    """Report monitored metrics that nothing logs, or that would be logged only after the run ends."""
    record, trainer = next((record for record in report.records if record.logged is not None), None), run.trainer
    if record is None or record.logged is None:
        return
    strict = [callback for callback in trainer.callbacks if getattr(callback, "strict", True)]
    monitors = [(type(callback).__name__, getattr(callback, "monitor", None)) for callback in strict]
    monitored = [(user, name) for user, name in monitors if isinstance(name, str)]
    epoch, total = record.steps_per_epoch, record.total_steps
    every, accumulate = trainer.check_val_every_n_epoch, trainer.accumulate_grad_batches
    first = first_validation(trainer.val_check_interval, every, accumulate, math.inf if epoch is None else epoch)
    late = [f"{name!r} ({user})" for user, name in monitored if name in record.validated]
    if late and first is not None and total is not None and total < first:
        limit = f"max_steps={trainer.max_steps}" if total == trainer.max_steps else f"max_epochs={trainer.max_epochs}"
        report.problems.append(
            f"{limit} ends training before the first validation (step {first}), which logs {', '.join(late)}. Train "
            f"longer, or validate earlier (val_check_interval)."
        )
    for user, name in [*monitored, *(("A learning rate scheduler", name) for name in record.plateaus)]:
        if name not in record.logged:
            report.problems.append(
                f"{user} monitors {name!r}, but nothing logged it.{did_you_mean(name, record.logged)} "
                f"Logged: {', '.join(record.logged) or 'nothing'}."
            )


def check_disk_space(run: "ConfiguredRun", report: Report) -> None:
    """Report checkpoints that will not fit on their folder's disk."""
    if report.checkpoint_bytes is None:
        return
    complete = next((record for record in report.records if record.logged is not None), Record())
    for callback in run.trainer.callbacks:
        if not isinstance(callback, Checkpoint):
            continue
        place = to_absolute(callback.dirpath or run.trainer.default_root_dir)
        if isinstance(place, Address):
            report.disk.append(f"{place} is an object store, whose free space is unknown")
            continue
        size = report.weights_bytes if callback.save_weights_only else report.checkpoint_bytes
        count = count_kept(callback, complete.total_steps, complete.steps_per_epoch)
        # if the number is unknown, at least one checkpoint must fit
        asked = size * (1 if count is None else count) + report.base_bytes
        folder = nearest(place)
        free = shutil.disk_usage(folder).free
        beside = f" and {format_bytes(report.base_bytes)} shared by all" if report.base_bytes else ""
        kept = "unknown number of checkpoints" if count is None else f"{format_bytes(asked)} at once"
        report.disk.append(f"{kept}, {format_bytes(free)} free")
        if asked > free:
            report.problems.append(
                f"Checkpoints will take {format_bytes(asked)} in {folder}, which has {format_bytes(free)} free: "
                f"{format_bytes(size)} each{beside}. Free some space, lower save_top_k, or set run.root."
            )


def count_kept(callback: Checkpoint, total_steps: int | None, steps_per_epoch: int | None) -> int | None:
    """Return the maximum number of checkpoints on disk, including one that is being written.

    Returns None if all checkpoints are kept and the number of saves is unknown.
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
    # a new checkpoint is complete before the oldest is deleted
    kept = callback.save_top_k + newest_counts_extra
    return min(kept + 1, saves if saves is not None else kept + 1) if kept else 0


def _largest(sizes: list[int]) -> str:
    rank = f", on rank {sizes.index(max(sizes))}" if len(sizes) > 1 else ""
    return f"{format_bytes(max(sizes))}{rank}"
