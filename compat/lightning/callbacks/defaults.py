"""A Trainer's callbacks: those that the program passes and those that other arguments add."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....base.errors import ConfigError
from ....callbacks.callback import Callback
from ....callbacks.checkpoint_callback import CheckpointCallback
from ....callbacks.model_summary import ModelSummary as SummaryOfLegato
from ....callbacks.progress_bar import ProgressDisplay
from ....trainer.hooks import overrides
from ..profilers import add_profiler
from .bars import refuse_bars
from .finders import Finder
from .model_checkpoint import ModelCheckpoint
from .model_summary import ModelSummary
from .monitors import Timer
from .tqdm_bar import TQDMProgressBar


def refuse_same_keys(callbacks: Sequence[Callback]) -> None:
    """Raise RuntimeError if multiple callbacks would save their states under the same key in a checkpoint."""
    keys = [callback.state_key for callback in callbacks if overrides(callback, Callback, "state_dict")]
    if len(set(keys)) < len(keys):
        same = next(key for key in keys if keys.count(key) > 1)
        raise RuntimeError(f"Several callbacks have the state_key {same!r}. Make each callback's state_key unique.")


def make_callbacks(trainer: Any, arguments: Mapping[str, Any], profiler: Any) -> list[Callback]:
    """Return the callbacks that were passed to a Trainer and those that its other arguments add.

    Raises ConfigError if a passed object is not a callback.
    """
    passed = arguments["callbacks"]
    callbacks: list[Callback] = list(passed) if isinstance(passed, list) else [passed]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"Trainer(callbacks=...): expected callbacks, got {type(callback).__name__}.")
    if any(isinstance(item, CheckpointCallback) for item in callbacks) and not arguments["enable_checkpointing"]:
        raise ConfigError("enable_checkpointing=False conflicts with a ModelCheckpoint in callbacks. Remove one.")
    defaults: list[tuple[bool, type, Callable[[], Callback]]] = [
        (trainer.enable_progress_bar, ProgressDisplay, TQDMProgressBar),
        (trainer.enable_model_summary, SummaryOfLegato, ModelSummary),
        (arguments["enable_checkpointing"], CheckpointCallback, ModelCheckpoint),
    ]
    for is_wanted, role, kind in defaults:
        if is_wanted and not any(isinstance(callback, role) for callback in callbacks):
            callbacks.append(kind())
    callbacks += [] if trainer.max_time is None else [Timer(duration=trainer.max_time)]
    refuse_same_keys(callbacks)
    refuse_bars(callbacks, trainer.enable_progress_bar)
    trainer.enable_checkpointing = False  # not needed, because the callbacks above write to Lightning's folders
    callbacks.sort(key=lambda callback: (isinstance(callback, CheckpointCallback), not isinstance(callback, Finder)))
    trainer.profiler = add_profiler(profiler, callbacks)
    return callbacks
