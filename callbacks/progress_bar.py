"""ProgressBar: shows the progress of a run in a terminal, a notebook or a log file."""

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from .callback import Callback
from .displays import Display, find_display
from .loader_wait import LoaderWait
from .monitor import Monitor
from .progress_text import EpochTable, amount, duration, status_lines, value_text

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

NEVER = float("inf")
SECONDS_BETWEEN_READINGS = 2.0
"""Least seconds between two readings of metrics from the device, beyond those of logging steps."""
SECONDS_OF_PACE = 5.0
"""Samples per second are those of so many last seconds."""
OWN_PREFIXES = ("lr-", "throughput/", "straggler/", "epoch")
"""Metrics of Legato's callbacks, which the table shows only where a task puts them in the bar."""


class ProgressDisplay(Callback):
    """Base class of callbacks that show progress; the trainer adds its ProgressBar only where none is given."""


class ProgressBar(ProgressDisplay):
    """Shows a line of status, a table with a row for each epoch, and at the end how long the run took.

    The line names epoch, step, samples per second (over all replicas, of the last seconds), the time left of the run,
    and the metrics that were logged with `prog_bar=True`: those of training as mean over the epoch so far (on several
    processes up to the newest logging point), others at their newest value. In a terminal it is drawn in place, at most
    ten times a second, by rich where that is installed, else by tqdm; in a notebook as tqdm's bar; elsewhere it is a
    line a minute. Between two drawings a step costs two readings of the clock. Metrics are read from the device at
    logging steps, and once in two seconds.

    The table shows the metrics of `prog_bar=True` and the monitored one of a Checkpoint, whose best value is marked;
    where there are none, all that were logged. Epochs are counted from 1.

    Args:
        refresh_rate: least number of optimizer steps between two drawings; 0: show nothing.
        leave: leave the last line of each epoch standing.
        style: "rich", "tqdm" or "lines" (no drawing in place); "auto": what fits.
    """

    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, style: Literal["auto", "rich", "tqdm", "lines"] = "auto"
    ) -> None:
        self.refresh_rate, self.leave, self.style = refresh_rate, leave, style
        self._display, self._enabled = Display(), False
        self._table = EpochTable(0)
        self._monitor: Monitor | None = None
        self._best: tuple[float, int] | None = None
        """Best value of the monitored metric so far, and its step."""
        self._wait = LoaderWait()
        self._began = self._epoch_began = self._next = self._next_reading = NEVER
        self._start = (0, 0, 0)
        """Epochs, steps and samples at the start of the run."""
        self._pace: deque[tuple[float, int]] = deque()
        """Time and samples seen at the last drawings."""
        self._shown_step = -1
        self._means: dict[str, float] = {}
        self._word, self._batches = "", 0
        self._total: int | None = None
        self._evaluation_began = self._next_of_evaluation = NEVER

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is drawn when the callback is sent to another process."""
        return {**self.__dict__, "_display": Display()}

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Find out where to draw."""
        self._enabled = trainer.is_global_zero and self.refresh_rate > 0 and sys.stderr is not None
        self._display.clear()
        self._display = find_display(self.style) if self._enabled else Display()
        self._table = EpochTable(self._display.width)
        self._next = self._next_of_evaluation = NEVER
        self._best, self._shown_step = None, -1
        monitor, mode = getattr(trainer.checkpoint_callback, "monitor", None), "min"
        if self._enabled and monitor is not None:
            mode = getattr(trainer.checkpoint_callback, "mode", mode)
            self._monitor = Monitor(monitor, mode, "ProgressBar") if mode in ("min", "max") else None  # type: ignore[arg-type]

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Move the bar to the process that is rank 0 now."""
        if trainer.is_global_zero != self._enabled:
            self.setup(trainer, task, "fit")
            self.on_train_start(trainer, task)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove what is drawn, also after an exception."""
        self._display.clear()

    # --- training ---------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the clock of the run."""
        self._began = time.monotonic()
        ended = trainer.state.epoch_rounds >= trainer.num_training_batches  # saved by its validation: no step is left
        self._start = trainer.current_epoch + ended, trainer.global_step, trainer.state.samples_seen
        self._pace = deque([(self._began, trainer.state.samples_seen)])
        saved, monitor = trainer.checkpoint_callback, self._monitor
        score = getattr(saved, "best_model_score", None) if monitor is not None else None
        if score is not None and getattr(saved, "scores", None):
            self._best = float(score), -1  # of a resumed run; the step is that of its checkpoint's name
        self._next_reading, self._wait = 0.0, LoaderWait(trainer.strategy.device)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Begin to draw."""
        self._epoch_began, self._means = time.monotonic(), {}
        if self._enabled:
            self._next = 0.0 if self._shown_step < 0 else self._epoch_began + self._display.seconds_between

    def on_train_batch_start(self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int) -> None:
        """Measure how long the batch was waited for."""
        if self._enabled:
            self._wait.batch_arrived()

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Redraw if it is time."""
        if not self._enabled:
            return
        now = self._wait.batch_ended()
        if now >= self._next and trainer.global_step - self._shown_step >= self.refresh_rate:
            self._show_training(trainer, now)
            self._wait.batch_ended()  # drawing is no waiting
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._wait.pause()

    def on_save_checkpoint(self, trainer: "Trainer", task: "Task", checkpoint: dict[str, Any]) -> None:
        """Do not count the time of a save as waiting for a batch."""
        self._wait.pause()

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Add the epoch's row to the table."""
        self._wait.pause()
        # an epoch that a checkpoint held to its last step had its row in the run before
        ended_before = trainer.state.epoch_steps and trainer.global_step == self._start[1]
        if not self._enabled or ended_before:
            return
        now = time.monotonic()
        if self.leave:
            self._show_training(trainer, now)
            self._display.write("  ".join(self._lines_of_training(trainer, now)[0]))
        self._read(trainer)
        best = self._is_best(trainer)
        for line in self._table.row(self._row(trainer, now), " *" if best else ""):
            self._display.write(line)
        self._next = NEVER

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Say how much was trained in which time, and the best value of the monitored metric."""
        steps = trainer.global_step - self._start[1]
        if not self._enabled or not trainer.global_step:
            return
        self._display.clear()
        if not steps:
            at = f"the run had reached its end at step {trainer.global_step}"
            self._display.write(
                f"Nothing was left to train: {at} (max_epochs, max_steps, or a callback that stops it)."
            )
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = amount((trainer.state.samples_seen - self._start[2]) / seconds)
        epochs = trainer.current_epoch - self._start[0]
        said = f"{epochs} epoch{'s' * (epochs != 1)}, {steps} steps in {duration(seconds)}, {rate} samples/s"
        if self._best is not None and self._monitor is not None:
            at = f" at step {self._best[1]}" if self._best[1] >= 0 else " before the resume"
            said += f"; best {self._monitor.name} {value_text(self._best[0])}{at}"
        self._display.write(said)

    def _show_training(self, trainer: "Trainer", now: float) -> None:
        if now >= self._next_reading or trainer.global_step % trainer.log_every_n_steps == 0:
            self._read(trainer)
            self._next_reading = now + SECONDS_BETWEEN_READINGS
        lines, done, total = self._lines_of_training(trainer, now)
        self._display.draw(lines, done, total)
        self._next, self._shown_step = now + self._display.seconds_between, trainer.global_step
        self._wait.tell(trainer.train_dataloader)

    def _read(self, trainer: "Trainer") -> None:
        self._means = trainer.metrics.running_values()

    def _lines_of_training(self, trainer: "Trainer", now: float) -> tuple[list[str], int, int | None]:
        """Return the lines, and the steps done of those in the epoch."""
        state, steps = trainer.state, trainer.steps_per_epoch
        begun_at = state.global_step - state.epoch_steps
        if trainer.max_steps >= 0:
            steps = min(steps, trainer.max_steps - begun_at)
        total = None if steps == NEVER else int(steps)
        parts = [_counted("epoch", state.epoch + 1, self._epochs(trainer)), _counted("step", state.epoch_steps, total)]
        if (pace := self._samples_per_second(state.samples_seen, now)) is not None:
            parts.append(f"{amount(pace)} samples/s")
        done = state.global_step - self._start[1]
        left = trainer.estimated_stepping_batches - state.global_step
        if done and left < NEVER:
            parts.append(f"{duration((now - self._began) / done * left)} left")
        else:
            parts.append(duration(now - self._began))
        share = None if not total else state.epoch_steps / total
        return self._lines(parts, self._metrics(trainer), share), state.epoch_steps, total

    def _lines(self, parts: list[str], metrics: dict[str, float], share: float | None) -> list[str]:
        blocks = self._display.blocks
        if blocks is None:
            return status_lines(parts, metrics, None, self._display.width)
        return status_lines(parts, metrics, share, self._display.width, blocks)

    def _metrics(self, trainer: "Trainer") -> dict[str, float]:
        """Return training's means over the epoch so far, and the newest values of other metrics."""
        found = dict(self._means)
        for name, value in trainer.progress_bar_metrics.items():
            if name not in found and name.removesuffix("_step").removesuffix("_epoch") not in self._means:
                found[name] = value
        return found

    def _samples_per_second(self, samples: int, now: float) -> float | None:
        self._pace.append((now, samples))
        while len(self._pace) > 2 and self._pace[1][0] < now - SECONDS_OF_PACE:
            self._pace.popleft()
        then, before = self._pace[0]
        return (samples - before) / (now - then) if now - then > 0 and samples > before else None

    def _is_best(self, trainer: "Trainer") -> bool:
        """Return whether the monitored metric was measured at this step and is the best so far, and remember it."""
        monitor = self._monitor
        found = None if monitor is None else trainer.callback_metrics.get(monitor.name)
        if monitor is None or found is None or not trainer.is_measured_now(monitor.name):
            return False
        value = float(found)
        best = monitor.worst if self._best is None else self._best[0]
        if not monitor.is_better(value, best):
            return False
        self._best = value, trainer.global_step
        return True

    def _row(self, trainer: "Trainer", now: float) -> dict[str, str]:
        """Return the cells of the epoch that ends."""
        values = self._metrics(trainer)
        monitor = None if self._monitor is None else self._monitor.name
        if not values:
            named = trainer.callback_metrics.items()
            values = {name: float(value) for name, value in named if not name.startswith(OWN_PREFIXES)}
        elif monitor is not None and monitor in trainer.callback_metrics:
            values.setdefault(monitor, float(trainer.callback_metrics[monitor]))
        cells = {"epoch": str(trainer.current_epoch + 1), **{name: value_text(one) for name, one in values.items()}}
        if trainer.optimizers and trainer.optimizers[0].param_groups:
            cells["lr"] = f"{float(trainer.optimizers[0].param_groups[0]['lr']):.3g}"
        return {**cells, "time": duration(now - self._epoch_began)}

    # --- validation, test, prediction -------------------------------------------------------------------------------
    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Show batches of the validation in place of steps."""
        counts = trainer.num_val_batches
        if trainer.sanity_checking and trainer.num_sanity_val_steps != -1:
            counts = [min(count, trainer.num_sanity_val_steps) for count in counts]
        self._start_evaluation("sanity check" if trainer.sanity_checking else "validation", counts)

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Show batches."""
        self._start_evaluation("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """Show batches."""
        self._start_evaluation("predict", trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is time."""
        self._batches += 1
        now = time.monotonic()
        if now >= self._next_of_evaluation:
            self._show_evaluation(trainer, now)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Go on with the time of training."""
        if self._enabled and trainer.stage != "fit":
            now = time.monotonic()
            lines = self._lines_of_evaluation(trainer, now)[0]
            self._display.clear()
            self._display.write("  ".join(lines))
        self._next_of_evaluation = NEVER
        self._wait.pause()
        if self._pace:  # the time of the validation is none of the samples'
            spent = time.monotonic() - self._evaluation_began
            self._pace = deque((then + spent, samples) for then, samples in self._pace)

    on_test_end = on_predict_end = on_validation_end

    def _start_evaluation(self, word: str, counts: list[int | float]) -> None:
        total = sum(counts)
        self._word, self._batches, self._total = word, 0, None if total == NEVER else int(total)
        self._evaluation_began = time.monotonic()
        if self._enabled:
            between = self._display.seconds_between
            self._next_of_evaluation = self._evaluation_began + (between if between > 1.0 else 0.0)

    def _show_evaluation(self, trainer: "Trainer", now: float) -> None:
        self._display.draw(*self._lines_of_evaluation(trainer, now))
        self._next_of_evaluation = now + self._display.seconds_between

    def _lines_of_evaluation(self, trainer: "Trainer", now: float) -> tuple[list[str], int, int | None]:
        # this rank counts its own batches, and all have about as many
        done, total, seconds = self._batches * trainer.world_size, self._total, now - self._evaluation_began
        done = done if total is None else min(done, total)
        parts = [_counted(f"{self._word} batch", done, total)]
        metrics: dict[str, float] = {}
        if trainer.stage == "fit" and not trainer.sanity_checking:
            parts.insert(0, _counted("epoch", trainer.current_epoch + 1, self._epochs(trainer)))
            metrics = self._metrics(trainer)
        elif total and done:
            parts.append(f"{duration(seconds / done * (total - done))} left" if done < total else duration(seconds))
        return self._lines(parts, metrics, done / total if total else None), done, total

    @staticmethod
    def _epochs(trainer: "Trainer") -> int | None:
        return None if trainer.max_epochs in (None, -1) else trainer.max_epochs


def _counted(word: str, done: int, total: int | None) -> str:
    return f"{word} {done}" if total is None else f"{word} {done}/{total}"
