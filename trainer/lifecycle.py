"""Begin and end of a run: every undo runs whatever fails, and the caller sees the first error."""

import logging
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import Errors, TaskError, WorkerError, first_names
from .processes.signals import RESUME_ME
from .request import DOING_OF_STAGE, Request
from .run import Call, Run
from .runs.run_file import identity_of
from .setup import outputs
from .setup.checks import check_task
from .setup.start import make_call, set_up

if TYPE_CHECKING:
    from ..base.contracts import Trainer

log = logging.getLogger("legato")

SECOND_BACKWARD = "Trying to backward through the graph a second time"
"""Beginning of what torch says of a graph whose backward has freed it."""

DEBUGGERS = ("bdb.py", "pdb.py", "cmd.py")
"""Files of the debugger itself."""


@contextmanager
def begin(trainer: "Trainer", request: Request) -> Iterator[Run]:
    """Build the requested run, and close it whatever happens. Raises the first error, with notes of later ones."""
    if trainer.running:
        raise TaskError(
            f"{request.stage} was called within {trainer.stage} of the same Trainer. Call it when that is over; within "
            f"a run, validation comes by val_check_interval and check_val_every_n_epoch."
        )
    check_task(trainer, request.task, request)
    trainer.command["fit"] += request.stage == "fit"  # by which a replay of a script tells its fits apart
    call = trainer.run = make_call(trainer, request)
    # now, and not at the first value: a run that fails before would show those of the run before it
    trainer.agreed_metrics, trainer.logged_metrics, trainer.progress_bar_metrics = {}, {}, {}
    own = ("train", "validation") if request.stage == "fit" else (DOING_OF_STAGE[request.stage],)
    trainer.lengths = {word: length for word, length in trainer.lengths.items() if word not in own}
    errors = call.errors
    try:
        yield set_up(call, request)
    except BaseException as caught:
        errors.first = error = named(trainer.run, caught)
        if error is not caught:
            error.__cause__ = caught  # before run.json, which shows its traceback
        # trainer.run and not `call`: the phase that the run had reached, whose parts are the ones to close
        close(trainer.run, errors)
        if error is not caught:
            raise error from caught
        raise
    close(trainer.run, errors)
    if errors.first is not None:
        raise errors.first


def named(run: Call, error: BaseException) -> BaseException:
    """Return the error to raise: one that names ranks and cause for an exit, a debugger or a failed collective."""
    # a preempted run exits by RESUME_ME on purpose, once its checkpoint is complete
    if type(error) is SystemExit and error.code != RESUME_ME and run.loop.remaining == "steps":
        error = describe_exit(run, error)
    if isinstance(error, RuntimeError) and str(error).startswith(SECOND_BACKWARD) and run.task.automatic_optimization:
        return TaskError(
            f"Backward ran twice through one graph. Legato calls loss.backward() itself: if "
            f"{type(run.task).__name__}.training_step calls it too, only return the loss, or set "
            f"self.automatic_optimization = False. To keep a tensor between batches, keep tensor.detach()."
        )
    if isinstance(error, NotImplementedError) and "storage of SparseTensorImpl" in str(error):
        return TaskError(
            "A parameter has a sparse gradient, but no Embedding(sparse=True) holds it, so that DDP cannot send it. "
            "Look its rows up by nn.Embedding(..., sparse=True), or by embedding(...) without sparse=True."
        )
    if not isinstance(error, BdbQuit) or run.strategy.place.world_size == 1:
        return run.watchdog.explain(error)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).name not in DEBUGGERS]
    where = f"rank {run.strategy.place.rank} ({frames[-1].filename}:{frames[-1].lineno})"
    return TaskError(
        f"A debugger was left in {where}: one process of several has no terminal to ask. Debug with trainer.devices=1 "
        f"(and strategy=single)."
    )


def describe_exit(run: Call, error: SystemExit) -> BaseException:
    """Return a WorkerError for an exit with code 0, which would pass for success; log any other, and return it."""
    place, exits = run.strategy.place, traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in exits if "_sitebuiltins" not in frame.filename][-1]  # where exit() is defined
    where = f"{frame.name} ({frame.filename}:{frame.lineno})"
    rank = f" of rank {place.rank}" if place.world_size > 1 else ""
    step = run.state.global_step
    said = f"sys.exit({error.code!r}) in {where}{rank} ended {run.stage} at step {step}, before it was done."
    if error.code:
        log.error("%s", said)
        return error
    return WorkerError(f"{said} To stop training early, set trainer.should_stop = True.", place.rank)


def close(run: Call, errors: Errors) -> None:
    """Call the hooks that end a run, also a failed one, and undo what it changed in the process."""
    trainer, attempt, failed = run.trainer, errors.attempt, errors.first is not None
    # first: an exception raised by a signal's handler would skip what follows
    run.preemption.expect_end(failed=errors.first is not None)
    attempt(trainer.saver.writer.wait)  # the last whole state may be on its way to the disk
    # collective, so only where all ranks come here; and before the hooks, which find the whole task
    if errors.first is None:
        attempt(gather_metrics, run)
        attempt(run.strategy.finish)
    if errors.first is not None:
        tell_of_error(run, errors)
    if run.datamodule is not None:
        attempt(run.datamodule.teardown, run.stage)
    for hook in (*run.hooks.of_callbacks["teardown"], *run.hooks.of_task["teardown"]):
        attempt(hook, run.stage)
    # from here on `trainer.running` is False: loggers that ask for the stage in finalize are told that there is none
    run.loop.open = False
    run.state.elapsed = run.agreement.elapsed
    if trainer.is_global_zero:
        saved = trainer.checkpoint_callback
        is_recorded = run.stage == "fit" and identity_of(trainer.run_dir) != ""
        score = getattr(saved, "best_model_score", None) if is_recorded else None
        for logger in trainer.loggers:
            if score is not None and errors.first is None:
                attempt(logger.log_best, str(saved.monitor), float(score))
            attempt(logger.finalize, "success" if errors.first is None else "failed")
    # an error of the closing itself; one of the run was named in `begin`, before the hooks were told of it
    if errors.first is not None and not failed:
        error, errors.first = errors.first, named(run, errors.first)
        if error is not errors.first:
            errors.first.__cause__ = error
    # the trainer outlives the run, and would keep loaders, with their workers and their dataset, alive
    run.data.training, run.data.evaluations, run.loop.step = None, {}, None
    run.watchdog.succeeded = errors.first is None
    attempt(write_end, run, errors.first)
    try:
        run.undo.close()
    except BaseException as error:  # what it undoes was undone all the same
        errors.add(error, "while the run's changes of the process were undone")


def gather_metrics(run: Call) -> None:
    """Merge the metric objects that were never logged over the ranks; every rank calls it."""
    names = run.metrics.gather_unlogged()
    if names and run.trainer.is_global_zero:
        log.warning(
            "Metrics that were updated but neither logged nor computed, so that they never had a value over all "
            "processes: %s. Log them, or call compute() in on_*_epoch_end on every process.", first_names(names),
        )  # fmt: skip


def tell_of_error(run: Call, errors: Errors) -> None:
    """Call all on_exception hooks, and restore the training mode of modules after a failed evaluation."""
    error = errors.first
    assert error is not None
    for hook in run.hooks["on_exception"]:
        errors.attempt(hook, error)
    if run.datamodule is not None:
        errors.attempt(run.datamodule.on_exception, error)
    errors.attempt(run.restore_training_mode)
    if isinstance(run, Run) and run.loop.doing == "validation":
        errors.attempt(run.optimization.end_evaluation)


def write_end(run: Call, error: BaseException | None) -> None:
    """Write into the run directory how the run ended."""
    trainer = run.trainer
    if trainer.is_global_zero and trainer.run_dir is not None:
        run.run_file.end(trainer.run_dir, run.stage, outputs.progress(run), error)
