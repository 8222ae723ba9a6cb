"""The beginning and end of a run. Cleanup is completed even after an error, and the caller receives the first error."""

import logging
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import Errors, TaskError, WorkerError, correction, first_names
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
"""Beginning of torch's message about a graph that an earlier backward pass freed."""

DEVICES_DIFFER = ("Expected all tensors to be on the same device", "is not on the expected device")
"""Parts of torch's messages about tensors on different devices."""

DEBUGGERS = ("bdb.py", "pdb.py", "cmd.py")
"""Files of Python's debugger, whose frames are not the user's."""


@contextmanager
def begin(trainer: "Trainer", request: Request) -> Iterator[Run]:
    """Set up the requested run, yield it, and always close it.

    Raises the first error, with notes about later errors.
    """
    if trainer.running:
        raise TaskError(
            f"{request.stage} was called while the same Trainer was running {trainer.stage}. Call it after "
            f"{trainer.stage} returns. To validate during fit, set val_check_interval and check_val_every_n_epoch."
        )
    check_task(trainer, request.task, request)
    trainer.command["fit"] += request.stage == "fit"  # a replay of a script uses this count to identify its fits
    call = trainer.run = make_call(trainer, request)
    # before setup: a run that fails there must not show the previous run's values
    trainer.agreed_metrics, trainer.logged_metrics, trainer.progress_bar_metrics = {}, {}, {}
    loaders = ("train", "validation") if request.stage == "fit" else (DOING_OF_STAGE[request.stage],)
    trainer.lengths = {stage: length for stage, length in trainer.lengths.items() if stage not in loaders}
    errors = call.errors
    try:
        yield set_up(call, request)
    except BaseException as caught:
        errors.first = error = named(trainer.run, caught)
        if error is not caught:
            error.__cause__ = caught  # before run.json is written, which shows the traceback
        # trainer.run rather than `call`: setup may have replaced it with one that has more parts to close
        close(trainer.run, errors)
        if error is not caught:
            raise error from caught
        raise
    close(trainer.run, errors)
    if errors.first is not None:
        raise errors.first


def named(run: Call, error: BaseException) -> BaseException:
    """Return the error to raise: `error`, or one that explains it.

    If the process exited, the user quit a debugger, or a collective failed, the explanation reports the ranks and the
    cause.
    """
    # a preempted run exits with RESUME_ME on purpose, once its checkpoint is complete
    if type(error) is SystemExit and error.code != RESUME_ME and run.loop.remaining == "steps":
        error = describe_exit(run, error)
    if isinstance(error, RuntimeError) and str(error).startswith(SECOND_BACKWARD) and run.task.automatic_optimization:
        return TaskError(
            f"Backward ran twice on the same graph. Legato calls loss.backward() itself: if "
            f"{type(run.task).__name__}.training_step also calls it, just return the loss, or set "
            f"self.automatic_optimization = False. To keep a tensor between batches, store tensor.detach()."
            f"{correction('loss.backward()', 'return loss')}"
        )
    if isinstance(error, RuntimeError) and any(text in str(error) for text in DEVICES_DIFFER):
        example = correction("noise = torch.zeros(8)", "noise = torch.zeros(8, device=self.device)")
        return TaskError(f"An operation received tensors on different devices: {error}{example}")
    if isinstance(error, NotImplementedError) and "storage of SparseTensorImpl" in str(error):
        return TaskError(
            "A parameter has a sparse gradient but is not in an Embedding(sparse=True), so DDP cannot reduce it. Look "
            "up its rows with nn.Embedding(..., sparse=True), or with embedding(...) without sparse=True."
        )
    if not isinstance(error, BdbQuit) or run.strategy.place.world_size == 1:
        return run.watchdog.explain(error)
    frames = [item for item in traceback.extract_tb(error.__traceback__) if Path(item.filename).name not in DEBUGGERS]
    where = f"rank {run.strategy.place.rank} ({frames[-1].filename}:{frames[-1].lineno})"
    return TaskError(
        f"A debugger quit on {where} because the processes of a multi-process run have no terminal. Debug with "
        f"trainer.devices=1 (and strategy=single)."
    )


def describe_exit(run: Call, error: SystemExit) -> BaseException:
    """Return a WorkerError for an exit with code 0, which would look like success. Log and return any other exit."""
    place, exits = run.strategy.place, traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in exits if "_sitebuiltins" not in frame.filename][-1]  # exit() itself is defined there
    where = f"{frame.name} ({frame.filename}:{frame.lineno})"
    rank = f" on rank {place.rank}" if place.world_size > 1 else ""
    step = run.state.global_step
    message = f"sys.exit({error.code!r}) in {where}{rank} ended {run.stage} at step {step}, before it was complete."
    if error.code:
        log.error("%s", message)
        return error
    return WorkerError(f"{message} To stop training early, set trainer.should_stop = True.", place.rank)


def close(run: Call, errors: Errors) -> None:
    """Call the hooks at the end of a successful or failed run, and revert the run's changes to the process."""
    trainer, attempt, failed = run.trainer, errors.attempt, errors.first is not None
    # first, since an exception from a signal handler would skip the rest of this function
    run.preemption.expect_end(failed=errors.first is not None)
    attempt(trainer.saver.writer.wait)  # a background save may still be writing the last checkpoint
    # collective, so only if all ranks succeeded; before the hooks, which need the complete task
    if errors.first is None:
        attempt(gather_metrics, run)
        attempt(run.strategy.finish)
    if errors.first is not None:
        call_exception_hooks(run, errors)
    if run.datamodule is not None:
        attempt(run.datamodule.teardown, run.stage)
    for hook in (*run.hooks.of_callbacks["teardown"], *run.hooks.of_task["teardown"]):
        attempt(hook, run.stage)
    # from here on, `trainer.running` is False and loggers see stage None in finalize
    run.loop.open = False
    run.state.elapsed = run.agreement.elapsed
    if trainer.is_global_zero:
        callback = trainer.checkpoint_callback
        is_recorded = run.stage == "fit" and identity_of(trainer.run_dir) != ""
        score = getattr(callback, "best_model_score", None) if is_recorded else None
        for logger in trainer.loggers:
            if score is not None and errors.first is None:
                attempt(logger.log_best, str(callback.monitor), float(score))
            attempt(logger.finalize, "success" if errors.first is None else "failed")
    # only for an error while closing: `begin` has already named the run's errors, before hooks saw them
    if errors.first is not None and not failed:
        error, errors.first = errors.first, named(run, errors.first)
        if error is not errors.first:
            errors.first.__cause__ = error
    # the trainer outlives the run and would keep its loaders, their workers and datasets alive
    run.data.training, run.data.evaluations, run.loop.step = None, {}, None
    run.watchdog.succeeded = errors.first is None
    attempt(write_end, run, errors.first)
    try:
        run.undo.close()
    except BaseException as error:  # the ExitStack has run all its callbacks nevertheless
        errors.add(error, "while the run's changes to the process were reverted")


def gather_metrics(run: Call) -> None:
    """Merge, across all ranks, the metric objects that were never logged. All ranks must call this."""
    names = run.metrics.gather_unlogged()
    if names and run.trainer.is_global_zero:
        log.warning(
            "These metrics were updated but neither logged nor computed, so they were never reduced across "
            "processes: %s. Log them, or call compute() in on_*_epoch_end on every process.", first_names(names),
        )  # fmt: skip


def call_exception_hooks(run: Call, errors: Errors) -> None:
    """Call all on_exception hooks and restore the modules' training mode after a failed evaluation."""
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
    """Record in the run directory how the run ended."""
    trainer = run.trainer
    if trainer.is_global_zero and trainer.run_dir is not None:
        run.run_file.end(trainer.run_dir, run.stage, outputs.progress(run), error)
