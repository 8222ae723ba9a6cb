"""ProgressBar: shows the progress of the run in a terminal or a log file."""

import os
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    from tqdm import tqdm

    from ..tasks.task import Task
    from ..trainer.trainer import Trainer

NEVER = float("inf")
SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_BETWEEN_LINES = 60.0


class ProgressDisplay(Callback):
    """Base class of callbacks that show progress; the trainer adds its ProgressBar only where none is given."""


class ProgressBar(ProgressDisplay):
    """Draws bars for training and validation if stderr is a terminal, else prints a line a minute.

    It draws at most ten times a second; in between, a step costs one reading of the clock. It shows
    `trainer.progress_bar_metrics`, which are read from the device at logging steps only.

    Args:
        refresh_rate: least number of optimizer steps between two drawings; 0: show nothing.
        leave: keep each epoch's bar, instead of reusing one.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        self.refresh_rate, self.leave = refresh_rate, leave
        self._enabled = self._terminal = False
        self._next = NEVER
        self._training: tqdm[Any] | None = None
        self._evaluation: tqdm[Any] | None = None
        self._epoch = self._epoch_began_at = 0
        self._steps: int | float = NEVER
        """Steps of the epoch, up to the end of the run."""
        self._last_shown = (0.0, 0)
        self._word, self._batches = "", 0
        self._total: int | None = None
        self._next_line, self._next_of_evaluation = 0.0, NEVER

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Detect a terminal."""
        self._enabled = trainer.is_global_zero and self.refresh_rate > 0 and sys.stderr is not None
        self._terminal = self._enabled and sys.stderr.isatty()
        self._next = self._next_of_evaluation = NEVER
        self._next_line = 0.0  # print the first line after the first step

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Move the bar to the process that is rank 0 now."""
        self._close()
        if trainer.is_global_zero != self._enabled:
            self.setup(trainer, task, "fit")

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove the bars, also after an exception."""
        self._close()

    # --- training ---------------------------------------------------------------------------------------------------
    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the bar at the current step of the epoch."""
        if not self._enabled:
            return
        self._epoch, self._epoch_began_at = trainer.current_epoch, trainer.global_step - trainer.state.epoch_steps
        self._last_shown = (time.monotonic(), trainer.global_step)
        self._steps = trainer.steps_per_epoch
        if trainer.max_steps >= 0:
            self._steps = min(self._steps, trainer.max_steps - self._epoch_began_at)
        if not self._terminal:
            self._next = self._next_line
            return
        self._next = 0.0
        total = None if self._steps == NEVER else int(self._steps)
        if self._training is None or self.leave:
            self._close()
            self._training = _make_bar(total=total, initial=trainer.state.epoch_steps, unit="step")
        else:
            self._training.reset(total)
        self._training.set_description_str(f"epoch {self._epoch}")

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Redraw if it is time."""
        if time.monotonic() >= self._next:
            self._show_training(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Show the epoch's last step."""
        if self._enabled:
            self._show_training(trainer, always=True)
        self._next = NEVER

    def _show_training(self, trainer: "Trainer", always: bool = False) -> None:
        now, (then, step_then) = time.monotonic(), self._last_shown
        done = trainer.global_step - step_then
        if not always and done < (self.refresh_rate if self._terminal else 1):
            return  # the step is not complete
        metrics = " ".join(f"{name}={value:.4g}" for name, value in trainer.progress_bar_metrics.items())
        step = trainer.global_step - self._epoch_began_at
        if self._training is not None:
            self._training.set_postfix_str(metrics, refresh=False)
            self._training.update(step - self._training.n)
            self._next = now + SECONDS_BETWEEN_DRAWINGS
        else:
            pace, total = done / max(now - then, 1e-9), self._steps
            parts = [
                f"epoch {self._epoch} step {step}" + ("" if total == NEVER else f"/{total}"),
                f"{pace:.3g} steps/s",
            ]
            if total != NEVER and pace > 0:
                parts.append(f"eta {timedelta(seconds=round(max(total - step, 0) / pace))}")
            print(*parts, metrics, file=_stderr(), flush=True)
            self._next = self._next_line = now + SECONDS_BETWEEN_LINES
        self._last_shown = (now, trainer.global_step)

    # --- validation, test, prediction -------------------------------------------------------------------------------
    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start a bar."""
        counts = trainer.num_val_batches
        if trainer.sanity_checking and trainer.num_sanity_val_steps != -1:
            counts = [min(count, trainer.num_sanity_val_steps) for count in counts]
        self._start("sanity check" if trainer.sanity_checking else "validation", counts)

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start a bar."""
        self._start("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start a bar."""
        self._start("predict", trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is time."""
        self._batches += 1
        if time.monotonic() >= self._next_of_evaluation:
            self._show_evaluation(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Remove the bar."""
        if self._evaluation is not None:
            self._show_evaluation(trainer)
            self._evaluation.close()
            self._evaluation = None
        self._next_of_evaluation = NEVER

    on_test_end = on_predict_end = on_validation_end

    def _start(self, word: str, counts: list[int | float]) -> None:
        self._word, self._batches, total = word, 0, sum(counts)
        self._total = None if total == NEVER else int(total)
        if self._terminal:
            below = self._training is not None
            self._evaluation = _make_bar(
                desc=word, total=self._total, unit="batch", position=int(below), leave=not below
            )
        if self._enabled:
            self._next_of_evaluation = 0.0 if self._terminal else time.monotonic() + SECONDS_BETWEEN_LINES

    def _show_evaluation(self, trainer: "Trainer") -> None:
        # this rank counts its own batches, and all have about as many
        done = self._batches * trainer.world_size
        done = done if self._total is None else min(done, self._total)
        if self._evaluation is not None:
            self._evaluation.update(done - self._evaluation.n)
            self._next_of_evaluation = time.monotonic() + SECONDS_BETWEEN_DRAWINGS
        else:
            of = "" if self._total is None else f"/{self._total}"
            print(f"{self._word} batch {done}{of}", file=_stderr(), flush=True)
            self._next_of_evaluation = time.monotonic() + SECONDS_BETWEEN_LINES

    def _close(self) -> None:
        for bar in (self._evaluation, self._training):
            if bar is not None:
                bar.close()
        self._evaluation = self._training = None
        _write_messages_within(nullcontext)


def _make_bar(**options: Any) -> "tqdm[Any]":
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0
        """0: do not start tqdm's monitor thread, which would outlive the run."""

    # tqdm's default lock is shared between processes, which costs a semaphore and, under some start methods, a process
    Bar.set_lock(threading.RLock())
    _write_messages_within(Bar.external_write_mode)
    known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    width = {"dynamic_ncols": True} if known else {"ncols": 80}
    return Bar(file=_stderr(), mininterval=0.0, miniters=0, **width, **options)


def _stderr() -> Any:
    """Return a stderr that ignores writes after its reader has gone."""
    from ..trainer import messages

    return messages.STDERR


def _write_messages_within(by: Any) -> None:
    """Set the context in which Legato's log messages are written, so that they do not break the bar."""
    from ..trainer import messages

    messages.making_room = by
