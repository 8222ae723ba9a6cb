"""RichProgressBar, by the package rich."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .bars import Number, StagedBar, convert_inf

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
        self._trainer, self._style = trainer, style
        self._text_delimiter, self._metrics_format = text_delimiter, metrics_format
        self._metrics: dict[str, Any] = {}
        super().__init__()

    def update(self, metrics: dict[str, Any]) -> None:
        """Show these values from now on."""
        self._metrics = dict(metrics)

    def render(self, task: Any) -> Any:
        """Return the column's text."""
        shown = task.id == getattr(self._trainer.progress_bar_callback, "train_progress_bar_id", None)
        return Text(self._text_delimiter.join(self._generate_metrics_texts()) if shown else "", style=self._style)

    def _generate_metrics_texts(self) -> Iterator[str]:
        for name, value in self._metrics.items():
            try:
                yield f"{name}: {value if isinstance(value, str) else format(value, self._metrics_format)}"
            except (TypeError, ValueError):
                yield f"{name}: {value}"


class CustomProgress(Progress):
    """The bars that are shown together; one of an infinite length shows no end."""

    def add_task(
        self, description: str, start: bool = True, total: float | None = 100.0, *given: Any, **fields: Any
    ) -> Any:
        """Add a bar, and return its id."""
        return super().add_task(description, start, convert_inf(total), *given, **fields)

    def reset(self, task_id: Any, *, total: float | None = None, **options: Any) -> None:
        """Begin a bar again."""
        super().reset(task_id, total=convert_inf(total), **options)

    def soft_refresh(self) -> None:
        """Leave the drawing to rich's own thread, which draws at its rate."""


class RichProgressBar(StagedBar):
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
        super().__init__(refresh_rate, leave)
        self._console_kwargs = console_kwargs or {}
        self.theme = RichProgressBarTheme() if theme is None else theme
        self.progress: Any = None
        self._console: Any = None
        self._reset_progress_bar_ids()
        self._metric_component: MetricsTextColumn | None = None
        self._progress_stopped = False
        self._updated_at = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is shown."""
        shown = dict.fromkeys(("progress", "_console", "_metric_component", *self._ids()))
        return {**super().__getstate__(), **shown, "_progress_stopped": False}

    @staticmethod
    def _ids() -> list[str]:
        return [f"{name}_progress_bar_id" for name in ("train", "val_sanity", "val", "test", "predict")]

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

    # --- showing: private methods of Lightning's, which programs call and override ----------------------------------
    def _init_progress(self, trainer: "Trainer") -> None:
        if self.is_disabled or not (self.progress is None or self._progress_stopped):
            return
        from rich.console import Console

        self._reset_progress_bar_ids()
        theme = self.theme
        options = theme.metrics, theme.metrics_text_delimiter, theme.metrics_format
        self._metric_component = MetricsTextColumn(trainer, *options)
        columns = [*self.configure_columns(trainer), self._metric_component]
        rate, self._console = min(self.refresh_rate, DRAWINGS_A_SECOND), Console(**self._console_kwargs)
        self.progress = CustomProgress(*columns, console=self._console, refresh_per_second=rate)
        self.progress.start()
        self._progress_stopped = False

    def _reset_progress_bar_ids(self) -> None:
        self.train_progress_bar_id: Any = None
        self.val_sanity_progress_bar_id: Any = None
        self.val_progress_bar_id: Any = None
        self.test_progress_bar_id: Any = None
        self.predict_progress_bar_id: Any = None

    def _add_task(self, total_batches: int | float, description: str, visible: bool = True) -> Any:
        style = self.theme.description
        words = f"[{style}]{description}" if style else description
        return self.progress.add_task(words, total=total_batches, visible=visible)

    def _initialize_train_progress_bar_id(self) -> None:
        words = self._get_train_description(self.trainer.current_epoch)
        self.train_progress_bar_id = self._add_task(self.total_train_batches, words)

    def _update(self, progress_bar_id: Any, current: int, visible: bool = True, hard: bool = False) -> None:
        if self.progress is not None and self.is_enabled and progress_bar_id is not None:
            self.progress.update(progress_bar_id, completed=current, visible=visible)
            self.refresh(hard=hard)

    def _update_metrics(self, trainer: "Trainer", pl_module: "Task") -> None:
        if self.is_enabled and self._metric_component is not None:
            self._metric_component.update(self.get_metrics(trainer, pl_module))

    def _stop_progress(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self._progress_stopped = True

    @staticmethod
    def _id_of(stage: str) -> str:
        return f"{'val_sanity' if stage == 'sanity' else stage}_progress_bar_id"

    def _hide(self, name: str) -> None:
        shown = getattr(self, name)
        if self.progress is not None and shown is not None:
            self.progress.update(shown, advance=0, visible=False)

    def refresh(self, hard: bool = False) -> None:
        """Draw now, with `hard`; else soon."""
        if self.progress is not None and hard:
            self.progress.refresh()
        elif isinstance(self.progress, CustomProgress):
            self.progress.soft_refresh()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bars."""
        shown = self.progress is not None and not self._progress_stopped
        (self.progress.console.print if shown else print)(*args, **kwargs)

    # --- drawing ----------------------------------------------------------------------------------------------------
    def open(self, stage: str) -> None:
        """Start showing."""
        self._init_progress(self.trainer)

    def begin_epoch(self, trainer: "Trainer") -> None:
        """Begin the epoch's bar."""
        if self.is_disabled:
            return
        if self.train_progress_bar_id is not None and self._leave:
            self._stop_progress()
            self._init_progress(trainer)
        if self.progress is not None and self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()
        elif self.progress is not None:
            words = self._get_train_description(trainer.current_epoch)
            total = self.total_train_batches
            self.progress.reset(self.train_progress_bar_id, total=total, description=words, visible=True)
        self.refresh()

    def begin_loader(self, stage: str, total: Number, description: str, dataloader_idx: int) -> None:
        """Begin the bar of a loader, in place of that of the loader before."""
        if self.is_enabled:
            name = self._id_of(stage)
            self._hide(name)
            hidden = {"visible": False} if stage in ("sanity", "val") else {}  # until a batch is done
            setattr(self, name, self._add_task(total, description, **hidden))
            self.refresh()

    def advance(self, stage: str, batches: int, pl_module: "Task | None" = None) -> None:
        """Count the batches; show the newest values at most `refresh_rate` times a second."""
        if stage == "train" and self.is_enabled and self.progress is not None and self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()  # a run that goes on within an epoch
        self._update(getattr(self, self._id_of(stage)), batches)
        now = time.monotonic()
        if pl_module is not None and self.is_enabled and now - self._updated_at >= 1.0 / self.refresh_rate:
            self._updated_at = now
            self._update_metrics(self.trainer, pl_module)

    def finish(self, stage: str) -> None:
        """Hide the bar of the sanity check, and of a validation where training goes on."""
        if stage == "sanity" or (stage == "val" and self.trainer.stage == "fit"):
            self._hide(self._id_of(stage))
            self.refresh()

    def show(self, trainer: "Trainer", pl_module: "Task") -> None:
        """Show the newest values beside the bar of training."""
        self._update_metrics(trainer, pl_module)

    def teardown(self, trainer: "Trainer", pl_module: Any, stage: str) -> None:
        """Stop showing, also after an exception."""
        self._stop_progress()

    @property
    def train_progress_bar(self) -> Any:
        """Rich's task of training. Raises TypeError before there is one."""
        return self._task_of(self.train_progress_bar_id)

    @property
    def val_progress_bar(self) -> Any:
        """Rich's task of validation. Raises TypeError before there is one."""
        return self._task_of(self.val_progress_bar_id)

    @property
    def val_sanity_check_bar(self) -> Any:
        """Rich's task of the sanity check. Raises TypeError before there is one."""
        return self._task_of(self.val_sanity_progress_bar_id)

    @property
    def test_progress_bar(self) -> Any:
        """Rich's task of testing. Raises TypeError before there is one."""
        return self._task_of(self.test_progress_bar_id)

    def _task_of(self, task_id: Any) -> Any:
        if self.progress is None or task_id is None:
            raise TypeError(f"This bar of {type(self).__name__} has not been made yet.")
        return self.progress.tasks[self.progress.task_ids.index(task_id)]

    def _get_train_description(self, current_epoch: int) -> str:
        epochs = self.trainer.max_epochs
        last = "" if epochs in (None, -1) else f"/{int(epochs or 0) - 1}"
        return f"Epoch {current_epoch}{last}".ljust(len(self.validation_description))  # so that bars begin alike
