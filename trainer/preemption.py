"""Preemption: a run that receives a termination signal saves a checkpoint to resume from, and exits.

The handler only records the signal. The ranks then agree (processes/agreement.py) to stop after the same step or during
the same validation run, which is repeated on resume. Before the first step, there is nothing to save, so a signal ends
the run immediately.
"""

import logging
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..base.location import Location, checkpoints_of, to_location
from ..base.run_names import REPLAY
from .checkpoints.storage import folder_at
from .data.steps import ReplicaBatch
from .data.workers import signals_attended
from .processes.agreement import Agreement
from .processes.requeue import requeue_early, requeue_job
from .processes.signals import RESUME_ME, SignalWatch, handling_end_signals, raise_for_signal

if TYPE_CHECKING:
    from ..base.contracts import Trainer

log = logging.getLogger("legato")


class Preempted(BaseException):
    """Raised on all ranks when they agree to end the run; `Preemption` then saves a checkpoint and exits."""


class Preemption:
    """Context manager that handles signals during one call to fit.

    If Preempted is raised, the context manager saves a checkpoint and terminates the process.
    """

    def __init__(self, trainer: "Trainer", stage: str, agreement: Agreement) -> None:
        self.trainer, self.stage, self.agreement = trainer, stage, agreement
        self.signal = 0
        """The termination signal that this process received, or 0 if there was none."""
        self.started = False
        """Whether training has started, so there may be something to save."""
        self.leaving = False
        """Whether the run is already ending early."""
        self.first_step = 0
        self.watch = SignalWatch(attends=stage == "fit")

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals within this context. An evaluation has nothing to save, so a signal ends it immediately."""
        if self.stage != "fit":
            with self.watch:
                yield
            return
        with signals_attended(), handling_end_signals(self._record, self.watch):
            yield
        if self.signal and not self.leaving:  # it arrived after the run was done
            raise_for_signal(self.signal)

    def _record(self, number: int) -> None:
        # only recorded, as a handler cannot call collectives: the ranks agree at the next agreement
        self.signal = max(self.signal, number)  # as the agreement does, so that all ranks exit with the same signal
        if not self.started and not self.leaving:
            self.leaving = True
            requeue_early(number, self.trainer.requeue)
            raise_for_signal(number)
        self.agreement.agree_next()

    def start(self) -> None:
        """From now on, let the ranks agree on how to respond to a signal."""
        self.started, self.first_step = True, self.trainer.state.global_step
        self.watch.nothing_to_save = False

    def expect_end(self, failed: bool) -> None:
        """From now on, only record signals, because the run is closing.

        An exception from a signal handler would skip the rest of the teardown. Unless the run failed, a recorded signal
        terminates the process after the teardown.
        """
        self.started, self.leaving = True, self.leaving or failed
        self.watch.answer()

    def stop_if_agreed(self) -> None:
        """Raise Preempted if the ranks have agreed to end the run."""
        if self.agreement.signal:
            raise Preempted

    def until_preempted(self, batches: Iterable[ReplicaBatch]) -> Iterator[ReplicaBatch]:
        """Yield a validation run's batches. Raises Preempted on all ranks if any rank receives a termination signal."""
        if not self.started:
            yield from batches
            return
        self.stop_if_agreed()
        agreement, rounds, place = self.agreement, 0, None
        agreement.begin_evaluation()
        for item in batches:
            # rounds rather than batches: ranks may have different numbers of batches in a round
            if (item.dataloader_idx, item.batch_idx) != place:
                place = item.dataloader_idx, item.batch_idx
                if rounds >= agreement.next_round:
                    agreement.agree_in_evaluation(rounds, False, self.signal)
                    self.stop_if_agreed()
                rounds += 1
            yield item
        # a rank without further batches keeps agreeing with the others: each agreement requires all ranks
        while not agreement.agree_in_evaluation(rounds, True, self.signal):
            self.stop_if_agreed()

    # --- the end ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> "Preemption":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save and exit if the run was preempted."""
        self.leaving = kind is not None
        if isinstance(error, Preempted):
            self.watch.answer()
            self.leave_evaluation()
            self.log_end(self.save())
            end = KeyboardInterrupt() if self.agreement.signal == signal.SIGINT else SystemExit(RESUME_ME)
            raise end from None

    def leave_evaluation(self) -> None:
        """Discard the validation run in progress and return to training."""
        run = self.trainer.current_run
        if run.loop.doing == "train":
            return
        for series in run.metrics.stages.pop(run.loop.doing, {}).values():
            if series.metric is not None:
                series.metric.reset()
        run.hooks.call(f"on_{run.loop.doing}_model_train")
        run.optimization.end_evaluation()
        run.loop.doing, run.metrics.suffix = "train", ""
        run.metrics.pending.clear()
        run.metrics.open("train", fresh=False)

    @property
    def _replays(self) -> bool:
        """Return whether this run is a replay. Replays are never resumed."""
        return self.trainer.run_dir is not None and REPLAY in self.trainer.run_dir.name

    def save(self) -> Location | None:
        """Save the run so that `resume=auto` finds the checkpoint.

        Return the checkpoint, or None if there is nothing to save.
        """
        trainer, step = self.trainer, self.trainer.global_step
        name = Path(trainer.saver.format.name(step))
        callbacks = [callback for callback in trainer.checkpoint_callbacks if callback.dirpath is not None]
        folder: Location | None = next((to_location(callback.dirpath) for callback in callbacks), None)
        if trainer.run_dir is not None:
            folder = checkpoints_of(trainer.run_dir)
        if name.is_absolute():
            folder = name.parent
        # a process still at its first step would only repeat the checkpoint that it resumed from
        if folder is None or self._replays or trainer.fast_dev_run or step == self.first_step:
            return None
        path = folder / name.name
        # a callback only tracks checkpoints that it saves itself, and a run cannot resume from weights alone
        callback = next((saver for saver in callbacks if saver.dirpath == folder and not saver.save_weights_only), None)
        if callback is not None:
            callback.save(trainer, always=True)
            trainer.saver.writer.wait()  # until a background save has reached its path
        # the broadcast waits for rank 0, because the launcher treats the first exit as the exit of all processes
        if callback is None or not trainer.broadcast(_is_there(path)):
            trainer.save_checkpoint(path)
        return path

    def log_end(self, path: Location | None) -> None:
        """Log how the run ended and requeue the SLURM job if so configured."""
        trainer, number = self.trainer, self.agreement.signal
        if not trainer.is_global_zero:
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        saved = f"the checkpoint {path} is complete" if path is not None else "there is nothing to save"
        code = "" if number == signal.SIGINT else f" Exit code {RESUME_ME} requests a restart."
        again = "" if self._replays else f"{code} Use resume=auto to continue."
        log.warning("%s: stopped at step %d; %s.%s", name, trainer.global_step, saved, again)
        if trainer.requeue and number != signal.SIGINT:  # Ctrl-C comes from a person, not from SLURM
            requeue_job(number)


def _is_there(checkpoint: Location) -> bool:
    # another checkpoint format may write a single file
    if isinstance(checkpoint, Path):
        return checkpoint.exists()
    return folder_at(checkpoint.parent).committed(checkpoint.name) is not None
