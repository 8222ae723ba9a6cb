"""ProgressBar: shows progress with tqdm in a terminal or notebook, and as plain lines elsewhere."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from .callback import Callback
from .monitor import Monitor

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

NEVER = float("inf")
SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_BETWEEN_LINES = 60.0
"""Seconds between lines if output is neither a terminal nor a notebook."""
SECONDS_BETWEEN_READINGS = 2.0
"""Minimum seconds between reads of metrics from the device, apart from logging points."""
CALLBACK_PREFIXES = ("lr-", "throughput/", "straggler/", "epoch")
"""Metrics of Legato's callbacks, which the table leaves out unless the task logs them with prog_bar=True."""
NARROW = {"epoch": 5, "lr": 8, "time": 7}
"""Widths of table columns that are narrower than the nine characters reserved for a metric."""


class ProgressDisplay(Callback):
    """Base class for callbacks that show progress. If you pass one, the trainer does not add a ProgressBar."""


class ProgressBar(ProgressDisplay):
    """Shows a progress bar, a table with a row for each epoch, and a summary line at the end.

    The bar shows the epoch, the step, the time left in the epoch, samples per second over all replicas, and metrics
    logged with `prog_bar=True`. For training metrics, it shows the mean over the epoch so far. With multiple processes,
    that mean covers only the steps up to the latest logging point. For other metrics, the bar shows the latest value.
    tqdm redraws the bar at most ten times a second. Outside terminals and notebooks, the callback prints one line per
    minute instead. Metrics are read from the device at logging points and every two seconds.

    The table shows metrics logged with `prog_bar=True` and the metric that a Checkpoint callback monitors. An asterisk
    marks that metric's best value. If there are no such metrics, the table shows all logged metrics. Epochs are counted
    from 1.

    Args:
        refresh_rate: Minimum number of optimizer steps between redraws. 0: show nothing.
        leave: Keep each finished epoch's bar on the screen.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        self.refresh_rate, self.leave = refresh_rate, leave
        self._enabled = self._in_place = False
        self._bar: Any = None
        """tqdm's bar for the epoch or evaluation, or None if no bar is shown."""
        self._columns: list[str] = []
        self._monitor: Monitor | None = None
        self._best: tuple[float, int] | None = None
        """Best value of the monitored metric so far, and its step (-1 if the value is from before a resume)."""
        self._began = self._epoch_began = self._evaluation_began = self._next = self._next_reading = NEVER
        self._start = (0, 0, 0)
        """Epochs, steps and samples at the start of the run."""
        self._epoch_samples = 0
        """Number of samples that the run had processed when this epoch started."""
        self._shown_step = -1
        self._means: dict[str, float] = {}
        self._word, self._batches = "", 0
        self._total: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the bar when the callback is sent to another process."""
        return {**self.__dict__, "_bar": None}

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Choose between a bar and plain lines."""
        # stderr is None in a process without a console, such as pythonw
        self._enabled = trainer.is_global_zero and self.refresh_rate > 0 and sys.stderr is not None
        self._in_place = self._enabled and (sys.stderr.isatty() or in_notebook())
        self._close()
        self._columns, self._best, self._shown_step = [], None, -1
        monitor, mode = getattr(trainer.checkpoint_callback, "monitor", None), "min"
        if self._enabled and monitor is not None:
            mode = getattr(trainer.checkpoint_callback, "mode", mode)
            self._monitor = Monitor(monitor, mode, "ProgressBar") if mode in ("min", "max") else None  # type: ignore[arg-type]

    def on_processes_changed(self, trainer: "Trainer", task: "Task") -> None:
        """Move the bar to the new rank 0."""
        if trainer.is_global_zero != self._enabled:
            self.setup(trainer, task, "fit")
            self.on_train_start(trainer, task)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Remove the bar, even after an exception."""
        self._close()

    # --- training ---------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start the run's clock."""
        self._began, state = time.monotonic(), trainer.state
        ended = state.epoch_rounds >= trainer.num_training_batches  # saved during validation at the epoch's end
        self._start = trainer.current_epoch + ended, trainer.global_step, state.samples_seen
        saved, monitor = trainer.checkpoint_callback, self._monitor
        score = getattr(saved, "best_model_score", None) if monitor is not None else None
        if score is not None and getattr(saved, "scores", None):
            self._best = float(score), -1  # from before the resume; the value's step is not restored
        self._next_reading = 0.0

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Begin the epoch's bar."""
        self._epoch_began, self._means = time.monotonic(), {}
        self._epoch_samples = trainer.state.samples_seen
        # a log file gets its first line immediately, then at most one line per minute, even if epochs are shorter
        if self._enabled and (self._in_place or self._shown_step < 0):
            self._next = 0.0

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Redraw the bar if enough steps and time have passed."""
        if not self._enabled or trainer.metrics.step == trainer.global_step:  # the step is not complete yet
            return
        now = time.monotonic()
        if now >= self._next and trainer.global_step - self._shown_step >= self.refresh_rate:
            self._show_training(trainer, now)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Add the epoch's row to the table."""
        # if the epoch was complete in the checkpoint, its row was written before the resume
        if not self._enabled or (trainer.state.epoch_steps and trainer.global_step == self._start[1]):
            return
        now = time.monotonic()
        if self.leave:
            self._show_training(trainer, now)
        self._close(self.leave)
        self._means = trainer.metrics.running_values()
        best = self._is_best(trainer)
        self._write_row(self._row(trainer, now), " *" if best else "")

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Write the number of epochs and steps, the time, the speed and the monitored metric's best value."""
        if not self._enabled or not trainer.global_step:
            return
        self._close()
        steps = trainer.global_step - self._start[1]
        if not steps:
            end = f"the run already ended at step {trainer.global_step}"
            write(f"Nothing to train: {end}. To continue, raise max_epochs, max_steps or a callback's limit.")
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = amount((trainer.state.samples_seen - self._start[2]) / seconds)
        epochs = trainer.current_epoch - self._start[0]
        text = f"{epochs} epoch{'s' * (epochs != 1)}, {steps} steps in {duration(seconds)}, {rate} samples/s"
        if self._best is not None and self._monitor is not None:
            at = f" at step {self._best[1]}" if self._best[1] >= 0 else " before the resume"
            text += f"; best {self._monitor.name} {self._best[0]:.4g}{at}"
        write(text)

    def _show_training(self, trainer: "Trainer", now: float) -> None:
        if now >= self._next_reading or trainer.global_step % trainer.log_every_n_steps == 0:
            self._means, self._next_reading = trainer.metrics.running_values(), now + SECONDS_BETWEEN_READINGS
        state, steps = trainer.state, trainer.steps_per_epoch
        if trainer.max_steps >= 0:
            # max_steps may cut the last epoch short, but its bar should still fill up
            steps = min(steps, trainer.max_steps - (state.global_step - state.epoch_steps))
        seconds = now - self._epoch_began
        rate = f"{amount((state.samples_seen - self._epoch_samples) / seconds)} samples/s" if seconds > 0 else ""
        total = None if steps == NEVER else int(steps)
        self._show(self._epoch(trainer), "step", state.epoch_steps, total, rate, self._metrics(trainer))
        self._shown_step = trainer.global_step

    def _metrics(self, trainer: "Trainer") -> dict[str, float]:
        """Return training means over the epoch so far and the latest values of other metrics."""
        metrics = dict(self._means)
        for name, value in trainer.progress_bar_metrics.items():
            # `loss_step` and `loss_epoch` share a column; the mean over the epoch so far takes precedence
            shown = name.removesuffix("_step")
            if shown not in metrics and shown.removesuffix("_epoch") not in self._means:
                metrics[shown] = value
        return metrics

    def _is_best(self, trainer: "Trainer") -> bool:
        """Return whether the monitored metric has its best value so far at this step, and record that value."""
        monitor = self._monitor
        measured = None if monitor is None else trainer.callback_metrics.get(monitor.name)
        if monitor is None or measured is None or not trainer.is_measured_now(monitor.name):
            return False
        if not monitor.is_better(float(measured), monitor.worst if self._best is None else self._best[0]):
            return False
        self._best = float(measured), trainer.global_step
        return True

    def _row(self, trainer: "Trainer", now: float) -> dict[str, str]:
        """Return the cells of the finished epoch's row, keyed by column."""
        values, logged = self._metrics(trainer), trainer.callback_metrics
        if not values:
            values = {name: float(value) for name, value in logged.items() if not name.startswith(CALLBACK_PREFIXES)}
        elif self._monitor is not None and self._monitor.name in logged:
            values.setdefault(self._monitor.name, float(logged[self._monitor.name]))
        cells = {"epoch": str(trainer.current_epoch + 1), **{name: f"{value:.4g}" for name, value in values.items()}}
        if trainer.optimizers and trainer.optimizers[0].param_groups:
            cells["lr"] = f"{float(trainer.optimizers[0].param_groups[0]['lr']):.3g}"
        return {**cells, "time": duration(now - self._epoch_began)}

    def _write_row(self, cells: Mapping[str, str], mark: str) -> None:
        """Write a table row, preceded by a new header if it has new columns. Columns that do not fit are left out."""
        rows = [cells]
        if not cells.keys() <= set(self._columns):
            self._columns = list(dict.fromkeys((*cells, *self._columns)))
            write("")
            rows.insert(0, {name: name for name in self._columns})
        for row in rows:
            line = ""
            for name in self._columns:
                cell = f"{row.get(name, ''):>{max(len(name), NARROW.get(name, 9))}}"
                if len(line) + len(cell) + 4 > columns():  # two characters for the gap, two for the mark
                    break
                line += f"  {cell}" if line else cell
            write(line + (mark if row is cells else ""))

    # --- validation, test, prediction -------------------------------------------------------------------------------
    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Show validation batches in place of steps."""
        counts = trainer.num_val_batches
        if trainer.sanity_checking and trainer.num_sanity_val_steps != -1:
            counts = [min(count, trainer.num_sanity_val_steps) for count in counts]
        self._start_evaluation("sanity check" if trainer.sanity_checking else "validation", counts)

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Show test batches."""
        self._start_evaluation("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """Show prediction batches."""
        self._start_evaluation("predict", trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw the bar if enough time has passed."""
        self._batches += 1
        if self._enabled and time.monotonic() >= self._next:
            self._show_evaluation(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Return to the training bar or, outside fit, write the number of batches and the time."""
        if not self._enabled:
            return
        if trainer.stage != "fit" and self._batches:
            self._close()
            seconds = duration(time.monotonic() - self._evaluation_began)
            write(f"{self._word} batch {self._batches * trainer.world_size}  {seconds}")
        self._close()
        self._next = 0.0 if self._in_place else time.monotonic() + SECONDS_BETWEEN_LINES

    on_test_end = on_predict_end = on_validation_end

    def _start_evaluation(self, word: str, counts: list[int | float]) -> None:
        total = sum(counts)
        self._word, self._batches, self._total = word, 0, None if total == NEVER else int(total)
        self._evaluation_began = time.monotonic()
        if self._enabled:
            self._close()
            self._next = 0.0 if self._in_place else self._evaluation_began + SECONDS_BETWEEN_LINES

    def _show_evaluation(self, trainer: "Trainer") -> None:
        in_fit = trainer.stage == "fit" and not trainer.sanity_checking
        done = self._batches * trainer.world_size  # estimated from this rank's batches
        done = done if self._total is None else min(done, self._total)
        title = f"{self._epoch(trainer)}  {self._word}" if in_fit else self._word
        self._show(title, "batch", done, self._total, "", self._metrics(trainer) if in_fit else {})

    # --- drawing ----------------------------------------------------------------------------------------------------
    def _show(
        self, title: str, unit: str, done: int, total: int | None, rate: str, metrics: Mapping[str, float]
    ) -> None:
        """Draw the bar or write a plain line."""
        shown = "  ".join([rate] * bool(rate) + [f"{name} {value:.4g}" for name, value in metrics.items()])
        self._next = time.monotonic() + (SECONDS_BETWEEN_DRAWINGS if self._in_place else SECONDS_BETWEEN_LINES)
        if not self._in_place:
            count = f"{done}" if total is None else f"{done}/{total}"
            write("  ".join(filter(None, (title, f"{unit} {count}", shown))))
            return
        if self._bar is None:
            from ..base.messages import STDERR

            count = "{n_fmt}" if total is None else "{n_fmt}/{total_fmt}"
            layout = f"{{desc}}  {unit} {count} {{bar}} {{remaining}} left{{postfix}}"
            options = {} if in_notebook() else {"file": STDERR, "dynamic_ncols": True}
            self._bar = _tqdm()(desc=title, total=total, bar_format=layout, leave=False, **options)
        self._bar.n = done
        self._bar.postfix = shown  # set_postfix would sort the names and reformat the numbers
        self._bar.refresh()

    def _close(self, leave: bool = False) -> None:
        """Close the bar and remove it from the screen unless `leave` is True."""
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
        self._bar = None

    @staticmethod
    def _epoch(trainer: "Trainer") -> str:
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        return f"epoch {trainer.current_epoch + 1}{last}"


def write(text: str) -> None:
    """Write a permanent line. The bar must be closed."""
    from ..base.messages import STDERR, STDOUT

    # notebooks show stderr in red
    print(text, file=STDOUT if in_notebook() else STDERR, flush=True)


@cache
def _tqdm() -> Any:
    """Return a tqdm class without a monitor thread, which would outlive the run. It uses no cross-process lock."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


def columns() -> int:
    """Return the width of the terminal in characters, or 200 if there is no terminal."""
    try:
        # the table goes to stderr, but shutil.get_terminal_size checks stdout, which may be a pipe
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 200


def in_notebook() -> bool:
    """Return whether this process is running a notebook's cells."""
    # a notebook's kernel has already imported IPython
    shell = sys.modules.get("IPython")
    kernel = None if shell is None else shell.get_ipython()
    return kernel is not None and type(kernel).__name__ == "ZMQInteractiveShell"


def amount(value: float) -> str:
    """Format a number with three significant digits: "7", "940", "12.3k", "1.25M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 0.9995: three digits round 999.5 up to the next unit, where .3g would print 1e+03
        if value >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a duration as "h:mm:ss" or, for 24 hours or more, "1d h:mm:ss"."""
    days, rest = divmod(max(0, round(seconds)), 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text
