"""The callbacks of a Trainer: those that it is given, and those that other arguments ask for."""

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
    """Raise RuntimeError for callbacks whose states a checkpoint would hold under one key."""
    keys = [one.state_key for one in callbacks if overrides(one, Callback, "state_dict")]
    if len(set(keys)) < len(keys):
        same = next(key for key in keys if keys.count(key) > 1)
        raise RuntimeError(
            f"Several callbacks have a state under the key {same!r}, of which a checkpoint would keep one: give each a "
            f"state_key of its own."
        )


def make_callbacks(trainer: Any, arguments: Mapping[str, Any], profiler: Any) -> list[Callback]:
    """Return the callbacks that were given, and those that other arguments ask for; none of these logs anything.

    Raises ConfigError for what is no callback.
    """
    given = arguments["callbacks"]
    callbacks: list[Callback] = list(given) if isinstance(given, list) else [given]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"Trainer(callbacks=...) takes Callbacks; got {type(callback).__name__}.")
    if any(isinstance(one, CheckpointCallback) for one in callbacks) and not arguments["enable_checkpointing"]:
        raise ConfigError("enable_checkpointing=False, but callbacks has a ModelCheckpoint; leave one of them out.")
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
    trainer.enable_checkpointing = False  # no directory of Legato's is needed: these write where Lightning's do
    callbacks.sort(key=lambda one: (isinstance(one, CheckpointCallback), not isinstance(one, Finder)))
    trainer.profiler = add_profiler(profiler, callbacks)
    return callbacks
