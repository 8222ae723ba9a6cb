"""TQDMProgressBar, by the package tqdm."""

import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ....base.environment import get_variable
from .bars import Number, StagedBar, convert_inf

if TYPE_CHECKING:
    from ....tasks.task import Task
    from ....trainer.trainer import Trainer

SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_WITHOUT_TERMINAL = 10.0


class Tqdm(tqdm):  # type: ignore[type-arg]
    """A bar whose numbers keep their width."""

    monitor_interval = 0
    """0: do not start tqdm's monitor thread, which would outlive the run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # tqdm's default lock is shared between processes, which costs a semaphore
        type(self).set_lock(threading.RLock())
        super().__init__(*args, **kwargs)

    @staticmethod
    def format_num(n: Any) -> str:
        """Return a number with trailing zeros, so that the bar does not move."""
        text = n if isinstance(n, str) else str(tqdm.format_num(n))
        if "e" in text or len(text) >= 5 or not any(sign.isdigit() for sign in text):
            return text
        if "." not in text and isinstance(n, float):
            text += "."
        return text + "0" * (5 - len(text)) if "." in text else text


def stage_bar(stage: str) -> Any:
    """Return a property for the bar of a stage, which raises TypeError before there is one."""

    def get(self: Any) -> Any:
        bar = getattr(self, f"_{stage}_progress_bar")
        if bar is None:
            raise TypeError(f"The `{type(self).__name__}._{stage}_progress_bar` reference has not been set yet.")
        return bar

    def put(self: Any, bar: Any) -> None:
        setattr(self, f"_{stage}_progress_bar", bar)

    return property(get, put, doc=f"The bar of stage {stage!r}. Raises TypeError before there is one.")


class TQDMProgressBar(StagedBar):
    """Shows a bar for the epoch and one for each evaluation, by tqdm on standard output.

    It draws at most ten times a second, and once in ten seconds where standard output is no terminal; the last batch is
    always drawn. Override `init_train_tqdm` and its like for other bars, `get_metrics` for other values.

    Args:
        refresh_rate: batches between two drawings; 0: show nothing.
        process_position: lines to leave above.
        leave: keep each epoch's bar.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(self._resolve_refresh_rate(refresh_rate), leave)
        self._process_position = process_position
        self._train_progress_bar: Any = None
        self._val_progress_bar: Any = None
        self._test_progress_bar: Any = None
        self._predict_progress_bar: Any = None
        self._drawn_at = -math.inf

    @staticmethod
    def _resolve_refresh_rate(refresh_rate: int) -> int:
        """Return the batches between two drawings: at least as many as TQDM_MINITERS says, twenty in Colab."""
        if get_variable("COLAB_GPU") and refresh_rate == 1:
            return 20
        return max(int(get_variable("TQDM_MINITERS") or refresh_rate), refresh_rate)

    train_progress_bar = stage_bar("train")
    val_progress_bar = stage_bar("val")
    test_progress_bar = stage_bar("test")
    predict_progress_bar = stage_bar("predict")

    @property
    def process_position(self) -> int:
        """Lines left above the bars."""
        return self._process_position

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
        """Return the bar of the sanity check."""
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Any:
        """Return the bar of training."""
        return self._make(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Any:
        """Return the bar of a validation, below that of training if there is one."""
        alone = self.trainer.stage == "validate"
        return self._make(self.validation_description, leave=alone, below=int(not alone))

    def init_test_tqdm(self) -> Any:
        """Return the bar of testing."""
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Return the bar of prediction."""
        return self._make(self.predict_description, leave=True, smoothing=0)

    # --- drawing ----------------------------------------------------------------------------------------------------
    def open(self, stage: str) -> None:
        """Make the bar of a stage; that of the sanity check is a validation's."""
        if stage == "sanity":
            self.val_progress_bar, self.train_progress_bar = self.init_sanity_tqdm(), Tqdm(disable=True)
        elif not self.trainer.sanity_checking:
            makers = {"train": self.init_train_tqdm, "val": self.init_validation_tqdm, "test": self.init_test_tqdm}
            setattr(self, f"{stage}_progress_bar", makers.get(stage, self.init_predict_tqdm)())

    def begin_epoch(self, trainer: "Trainer") -> None:
        """Begin the epoch's bar."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self._begin(self.train_progress_bar, self.total_train_batches, f"Epoch {trainer.current_epoch}")

    def begin_loader(self, stage: str, total: Number, description: str, dataloader_idx: int) -> None:
        """Begin the bar of one of an evaluation's loaders."""
        bar = getattr(self, f"{'val' if stage == 'sanity' else stage}_progress_bar")
        self._begin(bar, total, f"{description} DataLoader {dataloader_idx}")

    def advance(self, stage: str, batches: int, pl_module: "Task | None" = None) -> None:
        """Draw if it is time."""
        bar = getattr(self, f"_{'val' if stage == 'sanity' else stage}_progress_bar")
        if bar is None or not self._is_due(batches, bar.total) or bar.disable:
            return
        self._drawn_at = time.monotonic()
        bar.n = batches
        if pl_module is not None:
            bar.set_postfix(self.get_metrics(self.trainer, pl_module), refresh=False)
        bar.refresh()

    def finish(self, stage: str) -> None:
        """Close the bar of a stage."""
        for name in ("train", "val") if stage == "sanity" else (stage,):
            getattr(self, f"{name}_progress_bar").close()

    def show(self, trainer: "Trainer", pl_module: "Task") -> None:
        """Show the newest values beside the bar of training."""
        if self._train_progress_bar is not None and not self._train_progress_bar.disable:
            self._train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def teardown(self, trainer: "Trainer", pl_module: Any, stage: str) -> None:
        """Close what is open, also after an exception."""
        for name in ("train", "val", "test", "predict"):
            bar = getattr(self, f"_{name}_progress_bar")
            if bar is not None:
                bar.close()

    def _begin(self, bar: Any, total: Number, description: str) -> None:
        bar.reset()
        bar.total, bar.initial = convert_inf(total), 0
        bar.set_description(description)

    def _should_update(self, current: int, total: Number | None) -> bool:
        """Return whether to draw after `current` batches, by `refresh_rate`."""
        return self.is_enabled and (current % self.refresh_rate == 0 or current == total)

    def _is_due(self, current: int, total: Number | None) -> bool:
        """Return whether to draw after `current` batches, by `refresh_rate` and by the clock."""
        if not self._should_update(current, total):
            return False
        rest = SECONDS_BETWEEN_DRAWINGS if sys.stdout.isatty() else SECONDS_WITHOUT_TERMINAL
        return current == total or time.monotonic() - self._drawn_at >= rest

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar that is shown, or where none is yet; nothing where bars are switched off."""
        bars = self._train_progress_bar, self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar
        shown = next((bar for bar in bars if bar is not None and not bar.disable), None)
        if shown is None and self.is_enabled:
            print(*args, sep=sep, **kwargs)
        elif shown is not None:
            shown.write(sep.join(map(str, args)), **kwargs)
