"""ProgressBar and TQDMProgressBar, with what programs for Lightning override."""

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ....base.errors import ConfigError
from ....callbacks.progress_bar import ProgressDisplay
from ....trainer.processes.environment import get_variable
from .callback import Callback, with_optional_arguments

if TYPE_CHECKING:
    from ....tasks.task import Task
    from ....trainer.trainer import Trainer

SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_WITHOUT_TERMINAL = 10.0

Number = int | float


class ProgressBar(ProgressDisplay, Callback):
    """Base class of progress bars: totals and descriptions of stages; subclasses show them."""

    _trainer: "Trainer | None" = None
    _current_eval_dataloader_idx: int | None = None

    def __init__(self) -> None:
        self._trainer, self._current_eval_dataloader_idx = None, None

    @property
    def trainer(self) -> "Trainer":
        """The trainer. Raises TypeError before a run."""
        if self._trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._trainer

    sanity_check_description = "Sanity Checking"
    train_description = "Training"
    validation_description = "Validation"
    test_description = "Testing"
    predict_description = "Predicting"

    @property
    def total_train_batches(self) -> Number:
        """Batches of the epoch; infinity where the loader does not say."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> Number:
        """Batches of the validation loader that is read."""
        trainer: Any = self.trainer
        return self._current(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> Number:
        """Batches of the test loader that is read."""
        return self._current(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> Number:
        """Batches of the prediction loader that is read."""
        return self._current(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> Number:
        """Batches of all validation loaders; 0 in an epoch without validation."""
        every = self.trainer.check_val_every_n_epoch
        due = every is None or (self.trainer.current_epoch + 1) % every == 0
        return sum(self.trainer.num_val_batches) if due else 0

    def _current(self, counts: list[Number]) -> Number:
        return counts[self._current_eval_dataloader_idx or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether another evaluation loader is read than at the last call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget which evaluation loader was read."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Show nothing from now on."""
        raise NotImplementedError

    def enable(self) -> None:
        """Show progress again."""
        raise NotImplementedError

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the bar."""
        print(*args, **kwargs)

    def setup(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Keep the trainer; show nothing on other ranks than 0."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: "Trainer", pl_module: "Task") -> dict[str, Any]:
        """Return the values beside the bar; override to show others."""
        return {**get_standard_metrics(trainer), **trainer.progress_bar_metrics}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer and the bars."""
        return {
            name: None if name == "_trainer" or isinstance(value, tqdm) else value for name, value in vars(self).items()
        }


def refuse_bars(callbacks: Sequence[Any], wanted: bool) -> None:
    """Raise ConfigError for several progress bars, and for one where none is wanted."""
    bars = [type(one).__name__ for one in callbacks if isinstance(one, ProgressBar)]
    if len(bars) > 1 or (bars and not wanted):
        way_out = "keep one of them" if wanted else "enable_progress_bar=False, so leave it out"
        raise ConfigError(f"callbacks has the progress bar{'s' * (len(bars) > 1)} {', '.join(bars)}: {way_out}.")


def get_standard_metrics(trainer: "Trainer") -> dict[str, int | str]:
    """Return `v_num`, the version of the first logger, if there is one."""
    version = getattr(trainer.loggers[0], "version", None) if trainer.loggers else None
    if version in ("", None):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else int(version)}


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


class DrawnProgressBar(ProgressBar):
    """A progress bar that is drawn at a rate, and can be switched off and on."""

    def __init__(self, refresh_rate: int) -> None:
        super().__init__()
        self._refresh_rate, self._enabled = refresh_rate, True

    @property
    def refresh_rate(self) -> int:
        """The rate, as the bar was given it; 0: nothing is shown."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether bars are shown."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether no bars are shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Show bars again."""
        self._enabled = True


@with_optional_arguments(
    "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start", "on_train_end"
)
class TQDMProgressBar(DrawnProgressBar):
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
        super().__init__(self._resolve_refresh_rate(refresh_rate))
        self._process_position, self._leave = process_position, leave
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

    # --- what is shown ----------------------------------------------------------------------------------------------
    def _bar(self, stage: str) -> Any:
        bar = getattr(self, f"_{stage}_progress_bar")
        if bar is None:
            raise TypeError(f"The `{type(self).__name__}._{stage}_progress_bar` reference has not been set yet.")
        return bar

    @property
    def train_progress_bar(self) -> Any:
        """The bar of training. Raises TypeError before there is one."""
        return self._bar("train")

    @train_progress_bar.setter
    def train_progress_bar(self, bar: Any) -> None:
        self._train_progress_bar = bar

    @property
    def val_progress_bar(self) -> Any:
        """The bar of validation. Raises TypeError before there is one."""
        return self._bar("val")

    @val_progress_bar.setter
    def val_progress_bar(self, bar: Any) -> None:
        self._val_progress_bar = bar

    @property
    def test_progress_bar(self) -> Any:
        """The bar of testing. Raises TypeError before there is one."""
        return self._bar("test")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: Any) -> None:
        self._test_progress_bar = bar

    @property
    def predict_progress_bar(self) -> Any:
        """The bar of prediction. Raises TypeError before there is one."""
        return self._bar("predict")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: Any) -> None:
        self._predict_progress_bar = bar

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

    # --- training ---------------------------------------------------------------------------------------------------
    def on_sanity_check_start(self, trainer: "Trainer", task: "Task") -> None:
        """Open a bar."""
        self.val_progress_bar, self.train_progress_bar = self.init_sanity_tqdm(), Tqdm(disable=True)

    def on_sanity_check_end(self, trainer: "Trainer", task: "Task") -> None:
        """Close the bar."""
        self.train_progress_bar.close()
        self.val_progress_bar.close()

    def on_train_start(self, trainer: "Trainer", task: "Task") -> None:
        """Open the bar of training."""
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: "Trainer", task: "Task") -> None:
        """Begin the epoch's bar."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self._begin(self.train_progress_bar, self.total_train_batches, f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int) -> None:
        """Draw if it is time."""
        bar = self._train_progress_bar
        if bar is not None and self._is_due(batch_idx + 1, bar.total):
            self._draw(bar, batch_idx + 1, self.get_metrics(trainer, task))

    def on_train_epoch_end(self, trainer: "Trainer", task: "Task") -> None:
        """Show the epoch's values."""
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, task))
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, trainer: "Trainer", task: "Task") -> None:
        """Close the bar."""
        self.train_progress_bar.close()

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Close what is open, also after an exception."""
        for name in ("_train", "_val", "_test", "_predict"):
            bar = getattr(self, f"{name}_progress_bar")
            if bar is not None:
                bar.close()

    # --- evaluation -------------------------------------------------------------------------------------------------
    def on_validation_start(self, trainer: "Trainer", task: "Task") -> None:
        """Open a bar."""
        if not trainer.sanity_checking:
            self.val_progress_bar = self.init_validation_tqdm()

    def on_test_start(self, trainer: "Trainer", task: "Task") -> None:
        """Open a bar."""
        self.test_progress_bar = self.init_test_tqdm()

    def on_predict_start(self, trainer: "Trainer", task: "Task") -> None:
        """Open a bar."""
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_validation_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the bar of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            words = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            total = self.total_val_batches_current_dataloader
            self._begin(self.val_progress_bar, total, f"{words} DataLoader {dataloader_idx}")

    def on_test_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the bar of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_test_batches_current_dataloader
            self._begin(self.test_progress_bar, total, f"{self.test_description} DataLoader {dataloader_idx}")

    def on_predict_batch_start(
        self, trainer: "Trainer", task: "Task", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the bar of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_predict_batches_current_dataloader
            self._begin(self.predict_progress_bar, total, f"{self.predict_description} DataLoader {dataloader_idx}")

    def on_validation_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw if it is time."""
        self._show(self._val_progress_bar, batch_idx)

    def on_test_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw if it is time."""
        self._show(self._test_progress_bar, batch_idx)

    def on_predict_batch_end(
        self, trainer: "Trainer", task: "Task", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw if it is time."""
        self._show(self._predict_progress_bar, batch_idx)

    def on_validation_end(self, trainer: "Trainer", task: "Task") -> None:
        """Close the bar, and show the values beside that of training."""
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if self._train_progress_bar is not None and trainer.stage == "fit":
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, task))

    def on_test_end(self, trainer: "Trainer", task: "Task") -> None:
        """Close the bar."""
        self.test_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_predict_end(self, trainer: "Trainer", task: "Task") -> None:
        """Close the bar."""
        self.predict_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    # --- drawing ----------------------------------------------------------------------------------------------------
    def _begin(self, bar: Any, total: Number, description: str) -> None:
        bar.reset()
        bar.total, bar.initial = convert_inf(total), 0
        bar.set_description(description)

    def _show(self, bar: Any, batch_idx: int) -> None:
        if bar is not None and self._is_due(batch_idx + 1, bar.total):
            self._draw(bar, batch_idx + 1)

    def _should_update(self, current: int, total: Number | None) -> bool:
        """Return whether to draw after `current` batches, by `refresh_rate`."""
        return self.is_enabled and (current % self.refresh_rate == 0 or current == total)

    def _is_due(self, current: int, total: Number | None) -> bool:
        """Return whether to draw after `current` batches, by `refresh_rate` and by the clock."""
        if not self._should_update(current, total):
            return False
        rest = SECONDS_BETWEEN_DRAWINGS if sys.stdout.isatty() else SECONDS_WITHOUT_TERMINAL
        return current == total or time.monotonic() - self._drawn_at >= rest

    def _draw(self, bar: Any, done: int, metrics: Mapping[str, Any] | None = None) -> None:
        if bar.disable:
            return
        self._drawn_at = time.monotonic()
        bar.n = done
        if metrics is not None:
            bar.set_postfix(metrics, refresh=False)
        bar.refresh()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar that is shown, or where none is yet; nothing where bars are switched off."""
        bars = self._train_progress_bar, self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar
        shown = next((bar for bar in bars if bar is not None and not bar.disable), None)
        if shown is None and self.is_enabled:
            print(*args, sep=sep, **kwargs)
        elif shown is not None:
            shown.write(sep.join(map(str, args)), **kwargs)


def convert_inf(x: Number | None) -> Number | None:
    """Return a count, or None for infinity and NaN, which tqdm does not take."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x
