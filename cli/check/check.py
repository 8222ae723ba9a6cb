"""`legato check`: runs a few steps of every stage in the real layout of processes, to find what would fail later.

Trains and validates, resumes from the checkpoint that this wrote, tests and predicts (trial.py), then compares what the
ranks recorded with what the run will need (report.py). The files go to a temporary folder beside the run directories,
so that the same disk and network are used.
"""

import logging
import pickle
import re
import shutil
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...base.arguments import ARGUMENT_NAMES, TrainerArguments
from ...base.errors import ConfigError, LegatoError, TaskError, WorkerError
from ...base.messages import is_quiet
from ...base.run_names import CHECKPOINTS
from ...callbacks.callback import Callback
from ...tasks.data_module import DataModule
from ...tasks.task import Task
from ...trainer.checkpoints import find, manifest
from ...trainer.hooks import CALLBACK_HOOKS, TASK_METHODS, check_names, overrides
from ...trainer.processes import environment, transport
from ...trainer.resume import contents
from ...trainer.run import Request
from ...trainer.setup.checks import check_task
from ...trainer.trainer import Trainer
from .report import Report, check_disk_space, check_gradients, check_graph_breaks, check_monitors
from .trial import make_trial, needs_every_gradient, own_loggers, read_records

TRIAL_STEPS = 2


def run_check(options: Namespace) -> None:
    """Check the run of a command line and print the report. Raises ConfigError with all problems."""
    from ..config.build import build_config
    from ..config.read import read_strategy
    from ..config.resumed import load_to_fit

    quiet, log = is_quiet(), logging.getLogger("legato")
    if log.level != logging.DEBUG:
        log.setLevel(logging.WARNING)  # no messages of the trial runs, whose layout the report tells
    config = load_to_fit(options.words)
    if environment.find_place(config.values["trainer"]["cluster"]) is None:
        trainer = config.values["trainer"]
        environment.warm_up_for(read_strategy(trainer)[0], trainer)  # it imports while this process builds the run
    found = build_config(config)
    try:
        report = try_run(found.trainer, found.task, found.data)
    finally:
        environment.leave_process_group()
    place = environment.find_place(found.trainer.cluster)
    if place is not None and place.rank > 0:  # rank 0 prints the report
        raise SystemExit(0 if report.ok else 2)
    if not quiet:
        print(report.text())
    if not report.ok:
        count = len(report.problems)
        indented = [problem.replace("\n", "\n     ") for problem in report.problems]
        listed = "\n".join(f"  {index + 1}. {problem}" for index, problem in enumerate(indented))
        raise ConfigError(f"the check found {count} problem{'s' if count > 1 else ''}:\n{listed}")
    print("All is well.")


def try_run(arguments: TrainerArguments, task: Task, data: DataModule | None = None) -> Report:
    """Return a report of everything that would fail in a run.

    Processes are started as fit would start them, even a single one, so that the caller's objects do not change. The
    task and data themselves are used under a launcher such as torchrun, and in a run of one process whose objects
    cannot be pickled.
    """
    given = {name: getattr(arguments, name) for name in ARGUMENT_NAMES}
    original = arguments if isinstance(arguments, Trainer) else Trainer(**given)
    report = Report(find_refusals(original, task, data))
    if report.problems:  # the trials would fail in the same way
        return report
    with temporary_folder(original, report) as folder:
        Trials(original, task, data, folder, report).run()
    check_gradients(original, task, report)
    check_monitors(original, report)
    check_disk_space(original, report)
    check_graph_breaks(report)
    return report


def find_refusals(trainer: Trainer, task: Task, data: DataModule | None) -> list[str]:
    """Return errors found without a trial: misspelt hooks, missing steps, two callbacks of one state_key."""
    found: list[str] = []
    attempts: list[Callable[[], Any]] = [
        partial(check_task, task, Request.of("fit", task, None)),
        partial(contents.callback_states, trainer),
        *(partial(check_names, callback, Callback, CALLBACK_HOOKS) for callback in trainer.callbacks),
    ]
    if data is not None:
        attempts.append(partial(check_names, data, DataModule, ("setup", "teardown"), TASK_METHODS))
    for attempt in attempts:
        try:
            attempt()
        except LegatoError as error:
            found.append(str(error))
    return found


@contextmanager
def temporary_folder(trainer: Trainer, report: Report) -> Iterator[Path | None]:
    """Make a folder in the run root, and remove it with all created parents on exit; None on other ranks than 0.

    If the run root is not writable, that is reported and the system's temporary folder is used.
    """
    place, made = environment.find_place(trainer.cluster), []
    if place is not None and place.rank > 0:
        yield None
        return
    root = Path(trainer.default_root_dir).absolute()
    try:
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".check-", dir=root))
    except OSError as error:
        report.problems.append(f"The run root {root} cannot be written to: {error.strerror}. Set run.root elsewhere.")
        folder = Path(tempfile.mkdtemp(prefix="legato-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # another run has started in it
                parent.rmdir()


class Trials:
    """The stages of a run, each tried with fresh objects in fresh processes."""

    def __init__(
        self, original: Trainer, task: Task, data: DataModule | None, folder: Path | None, report: Report
    ) -> None:
        self.original, self.task, self.data, self.folder, self.report = original, task, data, folder, report
        self.find_unused = False
        self.place = environment.find_place(original.cluster)
        self.local = original.strategy.local_processes(original.device_list)
        self.processes = self.local * original.num_nodes if self.place is None else self.place.world_size

    def run(self) -> None:
        """Try every stage, and read the ranks' records."""
        report, own = self.report, own_loggers(self.original)
        skipped = [type(logger).__name__ for logger in self.original.loggers if logger not in own]
        if skipped:
            report.remarks.append(f"{', '.join(skipped)} was not tried, since it may write elsewhere.")
        fit = self.make("fit", TRIAL_STEPS)
        error = self.attempt("fit", fit, "fit")
        if isinstance(error, TaskError) and needs_every_gradient(self.original):
            error = self.retry_with_unused(error)
        if self.place is not None:
            fit.strategy.collectives.barrier()  # until all records are written
        self.folder = fit.run_dir or self.folder  # under a launcher it is rank 0's
        if self.folder is not None:
            report.records = read_records(self.folder, "fit")
        saved = None if self.folder is None else find.newest_complete(self.folder / CHECKPOINTS)
        if saved is not None:
            report.checkpoint_bytes = sum(path.stat().st_size for path in saved.iterdir())
            report.weights_bytes = (saved / manifest.MODEL_FILE).stat().st_size
        if error is None and self.original.checkpoint_callback is not None:
            self.attempt("resume", self.make("resume", 1), "fit", saved)
        for stage in ("test", "predict"):
            if self.has_stage(stage):
                self.attempt(stage, self.make(stage, 0), stage)
        if self.place is not None:
            fit.strategy.collectives.barrier()  # keep the folder until every rank is done

    def retry_with_unused(self, error: Exception) -> Exception | None:
        """Train again with find_unused_parameters; return None if that works and names parameters, else `error`.

        Without it, the first rank with such a parameter ends the run before the others can report theirs.
        """
        assert self.folder is not None
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        self.find_unused = True
        if self.attempt("fit", self.make("fit", TRIAL_STEPS), "fit") is not None:
            return error
        if any(names for record in read_records(self.folder, "fit") for names in record.without_gradient):
            self.report.problems = [one for one in self.report.problems if not one.endswith(describe_error(error))]
        return None

    def make(self, name: str, steps: int) -> Trainer:
        """Return the trainer of one trial."""
        warm = name == "fit"
        return make_trial(self.original, name, steps, self.folder, self.processes, self.find_unused, warm)

    def attempt(self, name: str, trainer: Trainer, stage: str, resume: Path | None = None) -> Exception | None:
        """Run a stage and return its error. Under a launcher the error is raised, because other ranks cannot go on."""
        work = partial(run_stage, trainer, stage, self.task, self.data, resume)
        if self.place is not None:
            work()
        else:
            try:
                if self.processes > 1 or is_picklable(work):
                    environment.run_workers(
                        partial(run_then_disconnect, work), self.local, nodes=self.original.num_nodes
                    )
                else:
                    work()
            except Exception as error:
                if not any(problem.endswith(describe_error(error)) for problem in self.report.problems):
                    self.report.problems.append(f"{name}: {describe_error(error)}")
                return error
        self.report.tried.append(name)
        return None

    def has_stage(self, stage: str) -> bool:
        """Return whether the task has the step, and the task or data module the loader, of a stage."""
        loader = f"{stage}_dataloader"
        of_data = self.data is not None and overrides(self.data, DataModule, loader)
        return overrides(self.task, Task, f"{stage}_step") and (of_data or overrides(self.task, Task, loader))


def run_stage(trainer: Trainer, stage: str, task: Task, data: DataModule | None, resume: Path | None) -> None:
    """Run fit, test or predict."""
    if stage == "fit":
        trainer.fit(task, datamodule=data, resume=resume)
    elif stage == "test":
        trainer.test(task, datamodule=data, verbose=False)
    else:
        trainer.predict(task, datamodule=data, return_predictions=False)


def run_then_disconnect(work: Callable[[], None]) -> None:
    """Run `work` in a worker, then leave the process group."""
    try:
        work()
    finally:
        environment.leave_process_group()


def is_picklable(work: Callable[[], None]) -> bool:
    """Return whether `work` can be pickled for a worker."""
    try:
        return bool(transport.pack(work))
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError):
        return False


def describe_error(error: Exception) -> str:
    """Return the message of a Legato error; of any other error also its rank and its place in the user's code."""
    if isinstance(error, LegatoError):
        return str(error)
    ours = str(Path(contents.__file__).parents[1]), str(Path(torch.__file__).parent)
    where, frames = "", traceback.format_tb(error.__traceback__)
    if isinstance(error.__cause__, WorkerError):  # which has the traceback of a process that is gone
        where = f" (rank {error.__cause__.rank})"
        frames = re.findall(r'^  File ".*\n(?:    .*\n)*', f"{error.__cause__}\n", re.MULTILINE)
    places = [frame for frame in frames if not frame.startswith(tuple(f'  File "{folder}' for folder in ours))]
    return f"{type(error).__name__}{where}: {error}\n{''.join(places or frames).rstrip()}"
