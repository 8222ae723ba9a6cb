"""`legato check`: everything that can fail later, now.

A few steps of the real run, in the processes of the real layout (trial.py): train and validate, resume from the
checkpoint that this wrote, test, predict. What the ranks saw is held against what the run will ask for. It all happens
in a temporary folder beside the run directories, since that is the disk and the network that the run will use.
"""

import logging
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....callbacks.callback import Callback
from ....tasks.data_module import DataModule
from ....tasks.task import Task
from ... import build, torch_private
from ...arguments import ARGUMENT_NAMES, TrainerArguments
from ...checkpoints import contents, manifest, store
from ...errors import ConfigError, LegatoError, TaskError
from ...hooks import CALLBACK_HOOKS, TASK_METHODS, check_names, overrides
from ...processes import environment, transport
from ...run import Request
from ...trainer import Trainer
from .report import Report, judge_gradients, judge_monitors, judge_space
from .trial import make_trial, needs_every_gradient, own_loggers, read_notes

TRIAL_STEPS = 2


def run_check(arguments: Sequence[str]) -> None:
    """Check what a command line asks for, and print the report; raises ConfigError with every problem."""
    from ...config.build import build_config
    from ...config.check import load_config

    logging.getLogger("legato").setLevel(logging.WARNING)  # what trial runs tell of themselves was not asked for
    config = load_config(arguments)
    if environment.find_place(config.values["trainer"]["cluster"]) is None:
        environment.warm_up()  # workers' imports, beside our own
    found = build_config(config)
    try:
        report = try_run(found.trainer, found.task, found.data)
    finally:
        environment.leave_process_group()
    place = environment.find_place(found.trainer.cluster)
    if place is not None and place.rank > 0:  # rank 0 says it for all
        raise SystemExit(0 if report.ok else 2)
    print(report.text())
    if not report.ok:
        count = len(report.problems)
        listed = "\n".join(f"  {index + 1}. {_indented(one)}" for index, one in enumerate(report.problems))
        raise ConfigError(f"the check found {count} problem{'s' if count > 1 else ''}:\n{listed}")
    print("All is well.")


def try_run(arguments: TrainerArguments, task: Task, data: DataModule | None = None) -> Report:
    """Try what a run needs, and report what would fail.

    The run's processes are started as fit would start them, even one alone, so that the caller's objects stay as they
    are. The task and the data are used themselves where a launcher such as torchrun has started this process, and where
    the run takes one process and they cannot be sent to another.
    """
    given = {name: getattr(arguments, name) for name in ARGUMENT_NAMES}
    original = arguments if isinstance(arguments, Trainer) else Trainer(**given)
    report = Report(find_refusals(original, task, data))
    if report.problems:  # a run would not even begin
        return report
    if environment.wants_public_torch():
        torch_private.take_public_ways()
    report.remarks.extend(torch_private.remarks())
    with work_room(original, report) as room:
        Trials(original, task, data, room, report).run()
    judge_gradients(original, task, report)
    judge_monitors(original, report)
    judge_space(original, report)
    return report


def find_refusals(trainer: Trainer, task: Task, data: DataModule | None) -> list[str]:
    """Return what a run is refused for at once: misspelt hooks, missing steps, two callbacks of one state_key."""
    found: list[str] = []
    attempts: list[Callable[[], Any]] = [
        partial(build.check_task, task, Request.of("fit", task, None)),
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
def work_room(trainer: Trainer, report: Report) -> Iterator[Path | None]:
    """Make a folder in the run root, and remove it with all that had to be made for it; None where rank 0 makes it.

    Where the run root cannot be written to, that is a problem, and the folder is the system's temporary one.
    """
    place, made = environment.find_place(trainer.cluster), []
    if place is not None and place.rank > 0:
        yield None
        return
    root = Path(trainer.default_root_dir).absolute()
    try:
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(prefix=".check-", dir=root))
    except OSError as error:
        report.problems.append(f"The run root {root} cannot be written to: {error.strerror}. Set run.root elsewhere.")
        room = Path(tempfile.mkdtemp(prefix="legato-check-"))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # another run has begun in it meanwhile
                folder.rmdir()


class Trials:
    """The stages of a run, each tried with fresh objects in fresh processes, as the real ones will be."""

    def __init__(
        self, original: Trainer, task: Task, data: DataModule | None, room: Path | None, report: Report
    ) -> None:
        self.original, self.task, self.data, self.room, self.report = original, task, data, room, report
        self.find_unused = False
        self.place = environment.find_place(original.cluster)
        self.local = original.strategy.local_processes(original.device_list)
        self.processes = self.local * original.num_nodes if self.place is None else self.place.world_size

    def run(self) -> None:
        """Try every stage that there is, and read what the ranks noted."""
        report, own = self.report, own_loggers(self.original)
        left_out = [type(logger).__name__ for logger in self.original.loggers if logger not in own]
        if left_out:
            report.remarks.append(f"{', '.join(left_out)} was left out, since it may write elsewhere.")
        fit = self.make("fit", TRIAL_STEPS)
        error = self.attempt("fit", fit, "fit")
        if isinstance(error, TaskError) and needs_every_gradient(self.original):
            error = self.tell_unused(error)
        if self.place is not None:
            fit.strategy.collectives.barrier()  # until all notes are written
        self.room = fit.run_dir or self.room  # under a launcher it is rank 0's
        if self.room is not None:
            report.notes = read_notes(self.room, "fit")
        saved = None if self.room is None else store.newest_complete(self.room / store.FOLDER)
        if saved is not None:
            report.checkpoint_bytes = sum(path.stat().st_size for path in saved.iterdir())
            report.weights_bytes = (saved / manifest.MODEL_FILE).stat().st_size
        if error is None and self.original.checkpoint_callback is not None:
            self.attempt("resume", self.make("resume", 1), "fit", saved)
        for stage in ("test", "predict"):
            if self.is_there(stage):
                self.attempt(stage, self.make(stage, 0), stage)
        if self.place is not None:
            fit.strategy.collectives.barrier()  # nobody removes the folder while another still needs it

    def tell_unused(self, error: Exception) -> Exception | None:
        """Train again without minding parameters that get no gradient; where that works, they were the problem.

        The first rank that lacks one ends the run, before the others can say which ones they lack.
        """
        assert self.room is not None
        shutil.rmtree(self.room / store.FOLDER, ignore_errors=True)
        self.find_unused = True
        if self.attempt("fit", self.make("fit", TRIAL_STEPS), "fit") is not None:
            return error
        if any(names for notes in read_notes(self.room, "fit") for names in notes.without_gradient):
            self.report.problems = [one for one in self.report.problems if not one.endswith(describe_error(error))]
        return None

    def make(self, name: str, steps: int) -> Trainer:
        """Return the trainer of one trial."""
        warm = name == "fit"
        return make_trial(self.original, name, steps, self.room, self.processes, self.find_unused, warm)

    def attempt(self, name: str, trainer: Trainer, stage: str, resume: Path | None = None) -> Exception | None:
        """Run a stage; return what it raised. Under a launcher that is raised here: no other rank can go on."""
        work = partial(run_stage, trainer, stage, self.task, self.data, resume)
        if self.place is not None:
            work()
        else:
            try:
                if self.processes > 1 or can_be_sent(work):
                    environment.run_workers(partial(leave_after, work), self.local, nodes=self.original.num_nodes)
                else:
                    work()
            except Exception as error:
                if not any(problem.endswith(describe_error(error)) for problem in self.report.problems):
                    self.report.problems.append(f"{name}: {describe_error(error)}")
                return error
        self.report.tried.append(name)
        return None

    def is_there(self, stage: str) -> bool:
        """Return whether the task has the step and somebody the loader of a stage."""
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


def leave_after(work: Callable[[], None]) -> None:
    """Work in a worker, which then leaves the process group."""
    try:
        work()
    finally:
        environment.leave_process_group()


def can_be_sent(work: Callable[[], None]) -> bool:
    """Return whether a worker can be given what the work needs; a run in one process does not need that."""
    try:
        return bool(transport.pack(work))
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError):
        return False


def describe_error(error: Exception) -> str:
    """Return the message of one of our errors; of any other, with its rank and where in the user's code it was."""
    if isinstance(error, LegatoError):
        return str(error)
    rank = getattr(error.__cause__, "rank", None)
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
    places = traceback.format_list([frame for frame in frames if not frame.filename.startswith(ours)] or frames)
    where = f" (rank {rank})" if rank is not None else ""
    return f"{type(error).__name__}{where}: {error}\n{''.join(places).rstrip()}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n     ")
