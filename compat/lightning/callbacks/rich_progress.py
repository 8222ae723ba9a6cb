"""RichProgressBar, by the package rich."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .progress import DrawnProgressBar

if TYPE_CHECKING:
    from ....tasks.task import Task
    from ....trainer.trainer import Trainer

DRAWINGS_A_SECOND = 10

if find_spec("rich") is not None:
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.text import Text
else:  # the names can still be imported, and RichProgressBar says what is missing
    Progress = ProgressColumn = BarColumn = TextColumn = Text = object  # type: ignore[assignment, misc]


@dataclass
class RichProgressBarTheme:
    """Styles of the bar's parts, in rich's words."""

    description: Any = ""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    batch_progress: Any = ""
    time: Any = "dim"
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class CustomBarColumn(BarColumn):
    """The bar itself."""


class BatchesProcessedColumn(ProgressColumn):
    """Batches done, of all."""

    def __init__(self, style: Any = "") -> None:
        self.style = style
        super().__init__()

    def render(self, task: Any) -> Any:
        """Return the column's text."""
        return Text(f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}", style=self.style)


class CustomTimeColumn(ProgressColumn):
    """Time passed, and time to go."""

    max_refresh = 0.5

    def __init__(self, style: Any = "") -> None:
        self.style = style
        super().__init__()

    def render(self, task: Any) -> Any:
        """Return the column's text."""
        elapsed = task.finished_time if task.finished else task.elapsed
        times = [
            "-:--:--" if one is None else str(timedelta(seconds=int(one))) for one in (elapsed, task.time_remaining)
        ]
        return Text(" • ".join(times), style=self.style)


class ProcessingSpeedColumn(ProgressColumn):
    """Batches per second."""

    def __init__(self, style: Any = "") -> None:
        self.style = style
        super().__init__()

    def render(self, task: Any) -> Any:
        """Return the column's text."""
        return Text(f"{task.speed or 0.0:>.2f}it/s", style=self.style)


class MetricsTextColumn(ProgressColumn):
    """Values beside the bar of training."""

    def __init__(
        self, trainer: "Trainer", style: Any = "italic", text_delimiter: str = " ", metrics_format: str = ".3f"
    ) -> None:
        self._trainer, self._style, self._delimiter, self._format = trainer, style, text_delimiter, metrics_format
        self._metrics: dict[str, Any] = {}
        super().__init__()

    def update(self, metrics: dict[str, Any]) -> None:
        """Show these values from now on."""
        self._metrics = dict(metrics)

    def render(self, task: Any) -> Any:
        """Return the column's text."""
        shown = task.fields.get("shows_metrics", False)
        return Text(self._delimiter.join(self._generate_metrics_texts()) if shown else "", style=self._style)

    def _generate_metrics_texts(self) -> Iterator[str]:
        for name, value in self._metrics.items():
            try:
                yield f"{name}: {value if isinstance(value, str) else format(value, self._format)}"
            except (TypeError, ValueError):
                yield f"{name}: {value}"


class CustomProgress(Progress):
    """The bars that are shown together."""


def bar_id(name: str, words: str) -> property:
    """Return a property of RichProgressBar: the id of one of its bars, which a subclass may set to that of its own."""

    def choose(bars: "RichProgressBar", task_id: Any) -> None:
        bars._bars.pop(name, None)
        if task_id is not None:
            bars._bars[name] = task_id
            bars.progress.update(task_id, shows_metrics=name == "train")

    return property(
        lambda bars: bars._bars.get(name), choose, doc=f"The id of the bar of {words}; None if there is none."
    )


class RichProgressBar(DrawnProgressBar):
    """Shows bars by rich; needs it installed.

    Override `configure_columns` for other columns, `get_metrics` for other values.

    Args:
        refresh_rate: updates a second, of which ten are drawn at most; 0: show nothing.
        leave: keep each epoch's bar.
        theme: styles of the parts.
        console_kwargs: arguments of rich's console.
    """

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if find_spec("rich") is None:
            raise ModuleNotFoundError("RichProgressBar needs the package rich: pip install rich.")
        super().__init__(refresh_rate)
        self._leave, self._console_kwargs = leave, console_kwargs or {}
        self.theme = RichProgressBarTheme() if theme is None else theme
        self.progress: Any = None
        self._bars: dict[str, Any] = {}
        self._metric_component: MetricsTextColumn | None = None
        self._progress_stopped = True
        self._updated_at = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is shown."""
        return {
            **super().__getstate__(),
            "progress": None,
            "_bars": {},
            "_metric_component": None,
            "_progress_stopped": True,
        }

    train_progress_bar_id = bar_id("train", "training")
    val_progress_bar_id = val_sanity_progress_bar_id = bar_id("val", "validation")
    test_progress_bar_id = bar_id("test", "testing")
    predict_progress_bar_id = bar_id("predict", "predicting")

    def configure_columns(self, trainer: "Trainer") -> list[Any]:
        """Return the columns of the bars."""
        theme = self.theme
        styles = {
            "complete_style": theme.progress_bar,
            "finished_style": theme.progress_bar_finished,
            "pulse_style": theme.progress_bar_pulse,
        }
        return [
            TextColumn("[progress.description]{task.description}", style=theme.description),
            CustomBarColumn(**styles),
            BatchesProcessedColumn(style=theme.batch_progress),
            CustomTimeColumn(style=theme.time),
            ProcessingSpeedColumn(style=theme.processing_speed),
        ]

    # --- showing ----------------------------------------------------------------------------------------------------
    def _init_progress(self, trainer: "Trainer") -> None:
        if self.is_disabled or self.progress is not None:
            return
        from rich.console import Console

        theme = self.theme
        options = theme.metrics, theme.metrics_text_delimiter, theme.metrics_format
        self._metric_component = MetricsTextColumn(trainer, *options)
        columns = [*self.configure_columns(trainer), self._metric_component]
        rate, console = min(self.refresh_rate, DRAWINGS_A_SECOND), Console(**self._console_kwargs)
        self.progress = CustomProgress(*columns, console=console, refresh_per_second=rate)
        self.progress.start()
        self._progress_stopped = False

    def _reset_progress_bar_ids(self) -> None:  # private in Lightning, and called by programs that start their own bars
        self._bars = {}

    def _open(self, name: str, total: float, description: str, **fields: Any) -> None:
        if self.progress is not None:
            self._close(name)
            self._bars[name] = self.progress.add_task(description, total=None if math.isinf(total) else total, **fields)

    def _close(self, name: str) -> None:
        if self.progress is not None and name in self._bars:
            self.progress.update(self._bars.pop(name), visible=False)

    def _add_task(self, total_batches: int | float, description: str, visible: bool = True) -> Any:
        # private in Lightning, and called by programs that show bars of their own
        total = None if math.isinf(total_batches) else total_batches
        return self.progress.add_task(description, total=total, visible=visible)

    def _initialize_train_progress_bar_id(self) -> None:
        self.train_progress_bar_id = self._add_task(
            self.total_train_batches, self._get_train_description(self.trainer.current_epoch)
        )

    def _update(self, progress_bar_id: Any, current: float, visible: bool = True, hard: bool = False) -> None:
        if self.progress is not None and progress_bar_id is not None:
            self.progress.update(progress_bar_id, completed=current, visible=visible)

    def _update_metrics(self, trainer: "Trainer", task: "Task") -> None:
        if self._metric_component is not None:
            self._metric_component.update(self.get_metrics(trainer, task))

    def _stop_progress(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.progress, self._bars, self._progress_stopped = None, {}, True

    def refresh(self, hard: bool = False) -> None:
        """Draw now."""
        if self.progress is not None:
            self.progress.refresh()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bars."""
        (print if self.progress is None else self.progress.console.print)(*args, **kwargs)

    # --- training ---------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start showing."""
        self._init_progress(trainer)

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Begin the epoch's bar."""
        if self._leave:
            self._bars.pop("train", None)
        words = self._get_train_description(trainer.current_epoch)
        self._open("train", self.total_train_batches, words, shows_metrics=True)

    @property
    def train_progress_bar(self) -> Any:
        """Rich's task of training. Raises TypeError before there is one."""
        return self._task_of("train")

    @property
    def val_progress_bar(self) -> Any:
        """Rich's task of validation. Raises TypeError before there is one."""
        return self._task_of("val")

    val_sanity_check_bar = val_progress_bar

    @property
    def test_progress_bar(self) -> Any:
        """Rich's task of testing. Raises TypeError before there is one."""
        return self._task_of("test")

    def _task_of(self, name: str) -> Any:
        if self.progress is None or name not in self._bars:
            raise TypeError(f"The bar {name!r} of {type(self).__name__} has not been made yet.")
        return self.progress.tasks[self.progress.task_ids.index(self._bars[name])]

    def _get_train_description(self, current_epoch: int) -> str:
        epochs = self.trainer.max_epochs
        last = "" if epochs in (None, -1) else f"/{int(epochs or 0) - 1}"
        return f"Epoch {current_epoch}{last}"

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch."""
        self._update(self.train_progress_bar_id, batch_idx + 1)
        now = time.monotonic()
        if self.is_enabled and now - self._updated_at >= 1.0 / self.refresh_rate:
            self._updated_at = now
            self._update_metrics(trainer, task)

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Show the epoch's values."""
        self._update_metrics(trainer, task)

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Stop showing, also after an exception."""
        self._stop_progress()

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Start showing."""
        self._init_progress(trainer)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the bar of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            words = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            self._open("val", self.total_val_batches_current_dataloader, words)

    def on_test_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the bar of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            self._open("test", self.total_test_batches_current_dataloader, self.test_description)

    def on_predict_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the bar of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            self._open("predict", self.total_predict_batches_current_dataloader, self.predict_description)

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count the batch."""
        for name in ("val", "test", "predict"):
            self._update(self._bars.get(name), batch_idx + 1)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Remove the bar, and show the values beside that of training."""
        self.reset_dataloader_idx_tracker()
        if trainer.stage == "fit":
            self._close("val")
            self._update_metrics(trainer, task)

    def on_test_end(self, trainer: "Trainer", task: "Task") -> None:
        """Leave the bar as it is."""
        self.reset_dataloader_idx_tracker()

    on_predict_end = on_test_end
