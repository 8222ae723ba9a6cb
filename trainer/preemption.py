"""Preemption: a run that is told to end by a signal saves itself whole, and asks to be started again.

A handler only notes the signal. The ranks agree on it where they meet (processes/sync.py), so that all of them
stop after the same step, or leave the same validation, which a resume does again from its beginning. Before the first
step there is nothing to save, and a signal ends the run where it stands.
"""

import logging
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from .checkpoints.store import CHECKPOINTS, directory_name
from .data.steps import ReplicaBatch
from .data.workers import signals_attended
from .processes.environment import slurm_job
from .processes.signals import RESUME_ME, SignalWatch, handling_end_signals, raise_for_signal

if TYPE_CHECKING:
    from pathlib import Path

    from .run import Run

log = logging.getLogger("legato")

REQUEUE_SECONDS = 60.0
"""How long `scontrol requeue` may take."""


class Preempted(BaseException):
    """All ranks have agreed to end the run here; `Preemption` makes of it what the caller sees."""


class Preemption:
    """What signals do to one call of fit. As a context it turns Preempted into a checkpoint and the run's end."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.signal = 0
        """The signal that this process was told to end by; 0: none."""
        self.started = False
        """Whether there may be something to save."""
        self.leaving = False
        """Whether the run ends before its time already."""
        self.first_step = 0
        self.watch = SignalWatch(run.trainer.signal_grace_seconds, attends=run.stage == "fit")

    @contextmanager
    def attend(self) -> Iterator[None]:
        """Attend to signals in this context; an evaluation has nothing to save, and ends by them as any program."""
        if self.run.stage != "fit":
            with self.watch:
                yield
            return
        with signals_attended(), handling_end_signals(self._note, self.watch):
            yield
        if self.signal and not self.leaving:  # it came when all was done
            raise_for_signal(self.signal)

    def _note(self, number: int) -> None:
        self.signal = max(self.signal, number)
        if not self.started and not self.leaving:
            self.leaving = True
            raise_for_signal(number)
        self.run.agreement.hurry()

    def start(self) -> None:
        """From now on a signal waits until all ranks have heard of it."""
        self.started, self.first_step = True, self.run.state.global_step
        self.watch.nothing_to_save = False

    def expect_end(self, failed: bool) -> None:
        """From now on the run is being closed: a signal is noted, and where nothing failed it ends the run after that.

        One that raised here would skip what is yet to be undone.
        """
        self.started, self.leaving = True, self.leaving or failed
        self.watch.answer()

    def stop_if_agreed(self) -> None:
        """Raise Preempted where the ranks have agreed to end the run."""
        if self.run.agreement.signal:
            raise Preempted

    def until_told(self, turns: Iterable[ReplicaBatch]) -> Iterator[ReplicaBatch]:
        """Yield the turns of a validation; raise Preempted, on every rank, where one of them is told to end."""
        if not self.started:
            yield from turns
            return
        self.stop_if_agreed()
        agreement, rounds, place = self.run.agreement, 0, None
        agreement.begin_evaluation()
        for turn in turns:
            if (turn.dataloader_idx, turn.batch_idx) != place:
                place = turn.dataloader_idx, turn.batch_idx
                if rounds >= agreement.next_round:
                    agreement.agree_in_evaluation(rounds, False, self.signal)
                    self.stop_if_agreed()
                rounds += 1
            yield turn
        while not agreement.agree_in_evaluation(rounds, True, self.signal):
            self.stop_if_agreed()

    # --- the end ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> "Preemption":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save where the run was stopped, and leave."""
        self.leaving = kind is not None
        if isinstance(error, Preempted):
            self.watch.answer()
            self.leave_evaluation()
            self.tell(self.save())
            end = KeyboardInterrupt() if self.run.agreement.signal == signal.SIGINT else SystemExit(RESUME_ME)
            raise end from None

    def leave_evaluation(self) -> None:
        """Forget a validation that was begun, and stand where training left off."""
        run = self.run
        if run.loop.doing == "train":
            return
        for series in run.metrics.stages.pop(run.loop.doing, {}).values():
            if series.metric is not None:
                series.metric.reset()
        run.hooks.call(f"on_{run.loop.doing}_model_train")
        run.loop.doing, run.metrics.suffix = "train", ""
        run.metrics.pending.clear()
        run.metrics.open("train", fresh=False)

    def save(self) -> "Path | None":
        """Save the run where `resume=auto` finds it; return the checkpoint, None where there is nothing to save."""
        run, trainer = self.run, self.run.trainer
        if trainer.run_dir is None or trainer.fast_dev_run or run.state.global_step == self.first_step:
            return None
        folder = trainer.run_dir / CHECKPOINTS
        path = folder / directory_name(run.state.global_step)
        saved = False
        for callback in trainer.checkpoint_callbacks:
            if callback.dirpath == folder and not callback.save_weights_only:
                callback.save(trainer, always=True)
                trainer.saver.wait()
                saved = trainer.broadcast(path.is_dir())  # waits for rank 0: who ends first is taken for the end of all
                break
        if not saved:
            trainer.save_checkpoint(path)
        return path

    def tell(self, path: "Path | None") -> None:
        """Say how the run ended, and ask SLURM for a new start where that is wanted."""
        trainer, number = self.run.trainer, self.run.agreement.signal
        if not trainer.is_global_zero:
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        saved = f"the checkpoint {path} is whole" if path is not None else "there is nothing to save"
        code = "" if number == signal.SIGINT else f" Exit code {RESUME_ME} asks for a new start:"
        log.warning("%s: stopped at step %d, %s.%s resume=auto goes on.", name, trainer.global_step, saved, code)
        if trainer.requeue and number != signal.SIGINT:
            requeue()


def requeue() -> None:
    """Put this SLURM job back into the queue; warns where that fails."""
    job = slurm_job()
    if job is None:
        log.warning("requeue=true: this is no SLURM job (there is no SLURM_JOB_ID), so nothing is requeued.")
        return
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEUE_SECONDS, check=False)
        problem = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log.warning("%s failed: %s. Start the job again by hand.", " ".join(command), problem)
    else:
        log.warning("%s: the job is in the queue again.", " ".join(command))
