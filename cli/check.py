"""`legato check`: runs a few steps of every stage in the real layout of processes, to find what would fail later.

It trains and validates, resumes from the checkpoint that this wrote, tests and predicts. Each stage is the config
itself with an overlay (`trial_of`), built again and run in a temporary folder beside the run directories, so that the
same disk and network are used. A callback on every rank records what the run will need (recorder.py).
"""

import logging
import math
import os
import re
import shutil
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import ConfigError, LegatoError, WorkerError, did_you_mean
from ..base.messages import is_quiet
from ..base.quantities import first_validation, format_bytes, time_taken
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
from ..trainer.optimization.kernels import NOTHING_COMPILED
from ..trainer.processes.layout import describe_layout
from ..trainer.processes.place import find_place
from ..trainer.processes.rendezvous import leave_process_group
from .config.build import build_config
from .config.read import read_strategy
from .config.resumed import load_to_fit
from .recorder import Record, Recorder, read_records
from .run import warm_up_if_several

if TYPE_CHECKING:
    from .config.build import ConfiguredRun
    from .config.check import Config

SKIPPED = (CheckpointCallback, EarlyStopping, ProgressDisplay, ModelSummary)
"""Callbacks to leave out of a trial: they would end it early, write elsewhere, or print."""
LOCAL_LOGGERS = (TensorBoardLogger, JSONLinesLogger, CSVLogger)
"""Loggers to try: they write to the run directory, and to nobody's server."""
OVERLAY = {
    "fast_dev_run": False,
    "log_every_n_steps": 1,
    "val_check_interval": 1,
    "check_val_every_n_epoch": None,
    "min_steps": None,
    "min_epochs": None,
    "max_restarts": 0,
}
"""Arguments of Trainer in a trial. `max_steps` stays: learning rate schedules see the length of the whole run."""
WARM_STEPS = 6
"""Least number of steps for a typical step time; with fewer, even the later half may be slow."""
SHOWN_RANKS = 8
"""Number of ranks above which only the largest value is shown."""


@dataclass
class Report:
    """Findings of a check; the run is fine if there are no problems."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Differences between the check and the run, and findings that may be intended."""
    tried: list[str] = field(default_factory=list)
    """The stages that worked."""
    records: list[Record] = field(default_factory=list)
    """Records of the ranks in training."""
    checkpoint_bytes: int | None = None
    weights_bytes: int = 0
    disk: str = "their number is not known"
    """Disk space for all checkpoints that the run keeps at once plus one in progress."""

    @property
    def seconds(self) -> float | None:
        """Seconds per step including data: median of the later half of the steps, on the slowest rank.

        The first steps also load code, start loader workers and allocate memory.
        """
        later = [record.seconds[len(record.seconds) // 2 :] for record in self.records if record.seconds]
        return max(map(median, later), default=None)

    def text(self) -> str:
        """Return the measurements for a terminal, without the problems."""
        return "\n".join(f"{name:<16}{value}" for name, value in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "Worked", ", ".join(self.tried) or "nothing"
        records = self.records
        if records:
            layout = describe_layout([record.place for record in records], records[0].origin, "")
            yield "Processes", layout.replace("\n", f"\n{'':<16}")
        if self.seconds is not None:
            total = next((record.total_steps for record in records if record.total_steps is not None), None)
            length = "" if total is None else f"; {time_taken(self.seconds * total)} for {total:,} steps"
            if max(len(record.seconds) for record in records) < WARM_STEPS:
                length += ", or less: only the first steps were tried"
            yield "Seconds a step", f"{self.seconds:.3g}{length}"
        if records:
            yield "Memory", _by_rank([record.host_bytes for record in records])
            if records[0].device_bytes is not None:
                yield "On the device", _by_rank([record.device_bytes or 0 for record in records])
        if self.checkpoint_bytes is not None:
            yield "A checkpoint", f"{format_bytes(self.checkpoint_bytes)}; {self.disk}"
        logged = next((record.logged for record in records if record.logged is not None), None)
        if logged is not None:
            yield "Logged", ", ".join(logged) or "nothing"
        for remark in self.remarks:
            yield "Remark", remark


def run_check(options: Namespace) -> None:
    """Check the run of a command line and print the report. Raises ConfigError with all problems."""
    quiet, log = is_quiet(), logging.getLogger("legato")
    if log.level != logging.DEBUG:
        log.setLevel(logging.WARNING)  # no messages of the trial runs, whose layout the report tells
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
        count = len(report.problems)
        indented = [problem.replace("\n", "\n     ") for problem in report.problems]
        listed = "\n".join(f"  {index + 1}. {problem}" for index, problem in enumerate(indented))
        raise ConfigError(f"the check found {count} problem{'s' if count > 1 else ''}:\n{listed}")
    print("All is well.")


def check_config(config: "Config") -> Report:
    """Return a report of what would fail in the run of a config."""
    original, report = build_config(config), Report()
    with temporary_folder(original, report) as folder:
        try_stages(config, original, folder, report)
    check_gradients(original, report)
    check_monitors(original, report)
    check_disk_space(original, report)
    for place in dict.fromkeys(place for record in report.records for place in record.graph_breaks):
        report.remarks.append(f"torch.compile breaks its graph at {place}.")
    if any(record.compiled_nothing for record in report.records):
        report.remarks.append(NOTHING_COMPILED)
    return report


@contextmanager
def temporary_folder(original: "ConfiguredRun", report: Report) -> Iterator[Path]:
    """Make a folder in the run root, and remove it on exit with all parents that were made.

    If the run root is not writable, that is reported and the system's temporary folder is used. Of several processes
    that a launcher has started only rank 0 makes one, and decides for all.
    """
    root, place = Path(original.trainer.default_root_dir).absolute(), find_place(original.trainer.cluster)
    if place is not None and place.rank > 0:
        yield root
        return
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".check-", dir=root))
    except OSError as error:
        report.problems.append(f"The run root {root} cannot be written to: {error.strerror}. Set run.root elsewhere.")
        folder = Path(tempfile.mkdtemp(prefix="legato-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):  # another run has started in it
                parent.rmdir()


def try_stages(config: "Config", original: "ConfiguredRun", folder: Path, report: Report) -> None:
    """Run fit, resume, test and predict, and read what the ranks have recorded in fit."""
    trainer = original.trainer
    skipped = [type(logger).__name__ for logger in trainer.loggers if not isinstance(logger, LOCAL_LOGGERS)]
    if skipped:
        report.remarks.append(f"{', '.join(skipped)} was not tried, since it may write elsewhere.")
    is_launched = find_place(trainer.cluster) is not None
    trial = trial_of(config, original, "fit", folder)
    attempt(report, "fit", lambda: trial.trainer.fit(trial.task, datamodule=trial.data), is_launched)
    if is_launched:
        trial.trainer.strategy.collectives.barrier()  # until all records are written
    directory = trial.trainer.run_dir
    if directory is not None:
        report.records = read_records(directory)
    saved = None if directory is None else find.newest_complete(directory / CHECKPOINTS)
    if saved is not None:
        report.checkpoint_bytes = sum(path.stat().st_size for path in saved.iterdir())
        report.weights_bytes = (saved / manifest.MODEL_FILE).stat().st_size
    if "fit" in report.tried and trainer.checkpoint_callback is not None:
        again = trial_of(config, original, "resume", folder)
        attempt(
            report, "resume", lambda: again.trainer.fit(again.task, datamodule=again.data, resume=saved), is_launched
        )
    for stage, options in (("test", {"verbose": False}), ("predict", {"return_predictions": False})):
        if has_stage(original, stage):
            last: Any = trial_of(config, original, stage, folder)
            run = getattr(last.trainer, stage)
            attempt(report, stage, lambda: run(last.task, datamodule=last.data, **options), is_launched)  # noqa: B023
    if is_launched:
        trial.trainer.strategy.collectives.barrier()  # keep the folder until every rank is done


def trial_of(config: "Config", original: "ConfiguredRun", name: str, folder: Path) -> "ConfiguredRun":
    """Build the config once more, for a few steps in `folder` with a validation after each.

    Each replica takes one batch of each evaluation loader.
    """
    trainer, values = original.trainer, dict(config.values["trainer"])
    place = find_place(trainer.cluster)
    local = trainer.strategy.local_processes(trainer.device_list)
    batches = trainer.replicas or (local * trainer.num_nodes if place is None else place.world_size)
    for argument in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        limit = getattr(trainer, argument)
        values[argument] = min(limit, batches) if isinstance(limit, int) else batches if limit else 0
    values |= OVERLAY | {"num_sanity_val_steps": min(1, abs(trainer.num_sanity_val_steps))}
    strategy, options = read_strategy(values)
    if options.get("elastic"):  # no process leaves or joins a trial
        kept = {option: value for option, value in options.items() if option not in ("elastic", "min_processes")}
        # an elastic run takes what gradients there are
        values["strategy"] = {"name": strategy, **kept, "find_unused_parameters": True}
    run = {**config.values["run"], "root": str(folder), "save_code": False}
    trial = build_config(replace(config, values={**config.values, "trainer": values, "run": run}))
    watching = [callback for callback in trial.trainer.callbacks if not isinstance(callback, SKIPPED)]
    saving = [] if trainer.checkpoint_callback is None else [Checkpoint(every_n_epochs=0)]
    trial.trainer.callbacks = [Recorder(name), *watching, *saving]
    loggers = [logger for logger in trial.trainer.loggers if isinstance(logger, LOCAL_LOGGERS)]
    # a run that logs nothing has no directory for the records
    trial.trainer.loggers = [*loggers] or [JSONLinesLogger()]
    return trial


def attempt(report: Report, name: str, run: Any, is_launched: bool) -> None:
    """Run a stage and report its error, once. Under a launcher the error is raised: other ranks cannot go on."""
    try:
        run()
    except Exception as error:
        if is_launched:
            raise
        told = describe_error(error)
        if not any(problem.endswith(told) for problem in report.problems):
            report.problems.append(f"{name}: {told}")
    else:
        report.tried.append(name)


def has_stage(run: "ConfiguredRun", stage: str) -> bool:
    """Return whether the task has the step, and the task or data module the loader, of a stage."""
    loader = f"{stage}_dataloader"
    of_data = run.data is not None and overrides(run.data, DataModule, loader)
    return overrides(run.task, Task, f"{stage}_step") and (of_data or overrides(run.task, Task, loader))


def describe_error(error: Exception) -> str:
    """Return the message of a Legato error; of any other error also its rank and its place in the user's code."""
    if isinstance(error, LegatoError):
        return str(error)
    ours = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    where, frames = "", traceback.format_tb(error.__traceback__)
    if isinstance(error.__cause__, WorkerError):  # which has the traceback of a process that is gone
        where = f" (rank {error.__cause__.rank})"
        frames = re.findall(r'^  File ".*\n(?:    .*\n)*', f"{error.__cause__}\n", re.MULTILINE)
    places = [frame for frame in frames if not frame.startswith(tuple(f'  File "{folder}' for folder in ours))]
    return f"{type(error).__name__}{where}: {error}\n{''.join(places or frames).rstrip()}"


# --- what the records say of the run ----------------------------------------------------------------------------------
def check_gradients(run: "ConfiguredRun", report: Report) -> None:
    """Report parameters without a gradient: in any step of any rank if that ends a run, else in all steps of all."""
    records, trainer = [record for record in report.records if record.without_gradient], run.trainer
    if not records or "fit" not in report.tried:  # a step that failed has named them itself
        return
    # these reductions take what gradients there are
    own_reduction = trainer.reproducible == "bitwise" or trainer.strategy.elastic.changes
    strict = trainer.strategy.needs_every_gradient and not own_reduction and run.task.automatic_optimization
    strict = strict and len(records) > 1
    ranks_of: dict[str, list[int]] = {}
    for record in records:
        steps = [set(names) for names in record.without_gradient]
        for name in sorted(set.union(*steps) if strict else set.intersection(*steps)):
            ranks_of.setdefault(name, []).append(record.rank)
    everywhere = {name for name, ranks in ranks_of.items() if len(ranks) == len(records)}
    shown = [name if name in everywhere else f"{name} (rank {', '.join(map(str, ranks))})"
             for name, ranks in ranks_of.items() if strict or name in everywhere]  # fmt: skip
    if shown:
        remedy = "Freeze parameters that no loss uses (requires_grad_(False)) or remove them"
        if strict:
            remedy += "; if only some batches use them, set trainer.strategy.find_unused_parameters=true"
        findings = report.remarks if trainer.strategy.finds_unused else report.problems
        findings.append(f"No gradient reaches {', '.join(shown)}. {remedy}.")


def check_monitors(run: "ConfiguredRun", report: Report) -> None:
    """Report monitored metrics that were not logged, or that the run ends before."""
    record, trainer = next((record for record in report.records if record.logged is not None), None), run.trainer
    if record is None or record.logged is None:
        return
    strict = [callback for callback in trainer.callbacks if getattr(callback, "strict", True)]
    monitors = [(type(callback).__name__, getattr(callback, "monitor", None)) for callback in strict]
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


def check_disk_space(run: "ConfiguredRun", report: Report) -> None:
    """Report checkpoints that will not fit on their disk."""
    if report.checkpoint_bytes is None:
        return
    complete = next((record for record in report.records if record.logged is not None), Record())
    counts: list[int | None] = []
    asked_on: dict[int, tuple[Path, int]] = {}
    required = 0
    for callback in run.trainer.callbacks:
        if isinstance(callback, Checkpoint):
            size = report.weights_bytes if callback.save_weights_only else report.checkpoint_bytes
            count = count_kept(callback, complete.total_steps, complete.steps_per_epoch)
            counts.append(count)
            required += (count or 0) * size
            folder = (callback.dirpath or Path(run.trainer.default_root_dir)).absolute()
            folder = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
            disk = os.stat(folder).st_dev
            asked_on[disk] = folder, asked_on.get(disk, (folder, 0))[1] + (count or 1) * size
    for folder, asked in asked_on.values():
        free = shutil.disk_usage(folder).free
        kept = report.disk if None in counts else f"{format_bytes(required)} at once"
        report.disk = f"{kept}, {format_bytes(free)} free"
        if asked > free:
            report.problems.append(
                f"Checkpoints will take {format_bytes(asked)} in {folder}, where {format_bytes(free)} are free: "
                f"{format_bytes(report.checkpoint_bytes)} each. Free some space, keep fewer (save_top_k), or set "
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


def _by_rank(sizes: list[int]) -> str:
    if len(sizes) > SHOWN_RANKS:
        return f"at most {format_bytes(max(sizes))}, on rank {sizes.index(max(sizes))}"
    return ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(sizes))
