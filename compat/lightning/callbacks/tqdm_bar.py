"""TQDMProgressBar, a progress bar drawn by tqdm, and RichProgressBar, which draws the same bar."""

import math
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ....base.environment import get_variable
from ..placeholders import refuse_overrides
from .bars import Number, ProgressBar, convert_inf

if TYPE_CHECKING:
    from .... import Trainer
    from ....tasks.task import Task

SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_WITHOUT_TERMINAL = 10.0


class Tqdm(tqdm):  # type: ignore[type-arg]
    """A tqdm bar that shows numbers with a constant width."""

    monitor_interval = 0
    """0 disables tqdm's monitor thread, which would outlive the run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # tqdm's default lock is shared between processes and requires a semaphore
        type(self).set_lock(threading.RLock())
        super().__init__(*args, **kwargs)

    @staticmethod
    def format_num(n: Any) -> str:
        """Return a number padded with zeros so that the bar has a constant width."""
        text = n if isinstance(n, str) else str(tqdm.format_num(n))
        if "e" in text or len(text) >= 5 or not any(sign.isdigit() for sign in text):
            return text
        if "." not in text and isinstance(n, float):
            text += "."
        return text + "0" * (5 - len(text)) if "." in text else text


def stage_bar(stage: str) -> Any:
    """Return a property for a stage's bar. Reading the property before the bar exists raises TypeError."""

    def get(self: Any) -> Any:
        bar = getattr(self, f"_{stage}_progress_bar")
        if bar is None:
            raise TypeError(f"The `{type(self).__name__}._{stage}_progress_bar` reference has not been set yet.")
        return bar

    def put(self: Any, bar: Any) -> None:
        setattr(self, f"_{stage}_progress_bar", bar)

    return property(get, put, doc=f"The bar of stage {stage!r}. Raises TypeError before it exists.")


class TQDMProgressBar(ProgressBar):
    """Uses tqdm to show a bar for each epoch and each evaluation on standard output.

    The bar is redrawn at most ten times per second, or once every ten seconds if standard output is not a terminal. It
    is always redrawn after the last batch. To change the bars, override `init_train_tqdm` and similar methods. To
    change the values shown, override `get_metrics`.

    Args:
        refresh_rate: Number of batches between updates. 0 disables the bar.
        process_position: Number of empty lines above the bars.
        leave: Leave each epoch's bar on the screen.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        self._refresh_rate = self._resolve_refresh_rate(refresh_rate)
        self._process_position, self._leave, self._enabled = process_position, leave, True
        self._train_progress_bar: Any = None
        self._val_progress_bar: Any = None
        self._test_progress_bar: Any = None
        self._predict_progress_bar: Any = None
        self._drawn_at = -math.inf

    @staticmethod
    def _resolve_refresh_rate(refresh_rate: int) -> int:
        """Return the number of batches between updates: 20 by default in Colab, otherwise at least TQDM_MINITERS."""
        if get_variable("COLAB_GPU") and refresh_rate == 1:
            return 20
        return max(int(get_variable("TQDM_MINITERS") or refresh_rate), refresh_rate)

    train_progress_bar = stage_bar("train")
    val_progress_bar = stage_bar("val")
    test_progress_bar = stage_bar("test")
    predict_progress_bar = stage_bar("predict")

    @property
    def refresh_rate(self) -> int:
        """Number of batches between updates; 0 disables the bar."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Number of empty lines above the bars."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether bars are enabled."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether bars are disabled."""
        return not self.is_enabled

    def disable(self) -> None:
        """Hide the bars."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bars."""
        self._enabled = True

    # --- the bars ---------------------------------------------------------------------------------------------------
    def _make(self, description: str, leave: bool, below: int = 0, **options: Any) -> Tqdm:
        return Tqdm(
            desc=description,
            position=2 * self.process_position + below,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    def init_sanity_tqdm(self) -> Any:
        """Return the bar for the sanity check."""
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Any:
        """Return the training bar."""
        return self._make(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Any:
        """Return the validation bar, placed below the training bar if there is one."""
        alone = self.trainer.stage == "validate"
        return self._make(self.validation_description, leave=alone, below=int(not alone))

    def init_test_tqdm(self) -> Any:
        """Return the test bar."""
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Return the prediction bar."""
        return self._make(self.predict_description, leave=True, smoothing=0)

    # --- training; the second argument is optional where Lightning's bars ignore it ---------------------------------
    def on_sanity_check_start(self, trainer: "Trainer", pl_module: Any = None) -> None:
        """Open the sanity check's bar, which is stored as the validation bar."""
        self.val_progress_bar, self.train_progress_bar = self.init_sanity_tqdm(), Tqdm(disable=True)

    def on_sanity_check_end(self, trainer: "Trainer", pl_module: Any = None) -> None:
        """Close the bar."""
        self.train_progress_bar.close()
        self.val_progress_bar.close()

    def on_train_start(self, trainer: "Trainer", pl_module: Any = None) -> None:
        """Open the training bar."""
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: Any = None) -> None:
        """Reset the bar for the epoch."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self._begin(self.train_progress_bar, self.total_train_batches, f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: "Trainer", pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advance the bar after a batch."""
        if self._draws(self.train_progress_bar, batch_idx + 1):
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            self.train_progress_bar.refresh()

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: Any) -> None:
        """Show the epoch's values."""
        self._show(trainer, pl_module)
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, trainer: "Trainer", pl_module: Any = None) -> None:
        """Close the bar."""
        self.train_progress_bar.close()

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_start(self, trainer: "Trainer", pl_module: Any) -> None:
        """Open a bar unless this is the sanity check, which already has one."""
        if not trainer.sanity_checking:
            self.val_progress_bar = self.init_validation_tqdm()

    def on_validation_batch_start(
        self, trainer: "Trainer", pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Reset the bar for a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            words = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            total = self.total_val_batches_current_dataloader
            self._begin(self.val_progress_bar, total, f"{words} DataLoader {dataloader_idx}")

    def on_validation_batch_end(
        self, trainer: "Trainer", pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Advance the bar after a batch."""
        self._advance(self.val_progress_bar, batch_idx + 1)

    def on_validation_end(self, trainer: "Trainer", pl_module: Any) -> None:
        """Close the bar and show the values next to the training bar."""
        self._end(self.val_progress_bar)
        if trainer.stage == "fit":
            self._show(trainer, pl_module)

    def on_test_start(self, trainer: "Trainer", pl_module: Any) -> None:
        """Open a bar."""
        self.test_progress_bar = self.init_test_tqdm()

    def on_test_batch_start(
        self, trainer: "Trainer", pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Reset the bar for a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_test_batches_current_dataloader
            self._begin(self.test_progress_bar, total, f"{self.test_description} DataLoader {dataloader_idx}")

    def on_test_batch_end(
        self, trainer: "Trainer", pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Advance the bar after a batch."""
        self._advance(self.test_progress_bar, batch_idx + 1)

    def on_test_end(self, trainer: "Trainer", pl_module: Any) -> None:
        """Close the bar."""
        self._end(self.test_progress_bar)

    def on_predict_start(self, trainer: "Trainer", pl_module: Any) -> None:
        """Open a bar."""
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_batch_start(
        self, trainer: "Trainer", pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Reset the bar for a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_predict_batches_current_dataloader
            self._begin(self.predict_progress_bar, total, f"{self.predict_description} DataLoader {dataloader_idx}")

    def on_predict_batch_end(
        self, trainer: "Trainer", pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Advance the bar after a batch."""
        self._advance(self.predict_progress_bar, batch_idx + 1)

    def on_predict_end(self, trainer: "Trainer", pl_module: Any) -> None:
        """Close the bar."""
        self._end(self.predict_progress_bar)

    def teardown(self, trainer: "Trainer", pl_module: Any, stage: str) -> None:
        """Close all open bars, even after an exception."""
        for name in ("train", "val", "test", "predict"):
            bar = getattr(self, f"_{name}_progress_bar")
            if bar is not None:
                bar.close()

    # --- drawing ----------------------------------------------------------------------------------------------------
    def _begin(self, bar: Any, total: Number, description: str) -> None:
        bar.reset()
        bar.total, bar.initial = convert_inf(total), 0
        bar.set_description(description)

    def _advance(self, bar: Any, batches: int) -> None:
        if self._draws(bar, batches):
            bar.refresh()

    def _end(self, bar: Any) -> None:
        bar.close()
        self.reset_dataloader_idx_tracker()

    def _show(self, trainer: "Trainer", pl_module: "Task") -> None:
        """Show the latest values next to the training bar."""
        if self._train_progress_bar is not None and not self._train_progress_bar.disable:
            self._train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def _should_update(self, current: int, total: Number | None) -> bool:
        """Return whether `refresh_rate` requires a redraw after `current` batches."""
        return self.is_enabled and (current % self.refresh_rate == 0 or current == total)

    def _draws(self, bar: Any, batches: int) -> bool:
        """Advance a bar and return whether to redraw it, based on `refresh_rate` and the time since the last redraw."""
        if bar.disable or not self._should_update(batches, bar.total):
            return False
        rest = SECONDS_BETWEEN_DRAWINGS if sys.stdout.isatty() else SECONDS_WITHOUT_TERMINAL
        now = time.monotonic()
        if batches != bar.total and now - self._drawn_at < rest:
            return False
        self._drawn_at, bar.n = now, batches
        return True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the current bar, or directly if no bar is shown. If bars are disabled, print nothing."""
        bars = self._train_progress_bar, self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar
        shown = next((bar for bar in bars if bar is not None and not bar.disable), None)
        if shown is None and self.is_enabled:
            print(*args, sep=sep, **kwargs)
        elif shown is not None:
            shown.write(sep.join(map(str, args)), **kwargs)


@dataclass
class RichProgressBarTheme:
    """Styles for Lightning's rich bar, which are accepted but ignored."""

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


class RichProgressBar(TQDMProgressBar):
    """A tqdm bar with the arguments of Lightning's rich bar. Custom columns raise UnsupportedError."""

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        way_out = "tqdm draws the bar. Override get_metrics to change the values, or init_train_tqdm to change the bar."
        refuse_overrides(self, ("configure_columns", "_init_progress"), way_out)
        super().__init__(int(refresh_rate > 0), leave=leave)  # rich counts updates per second
        self.theme = RichProgressBarTheme() if theme is None else theme
