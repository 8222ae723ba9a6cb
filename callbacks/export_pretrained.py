"""ExportPretrained: the trained model as files of the Hub, written at the end of fit."""

import logging
from typing import TYPE_CHECKING

from ..base.errors import ConfigError
from ..base.pretrained import require_models, save_pretrained
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")


class ExportPretrained(Callback):
    """Writes the trained model to `pretrained/` in the run directory when `fit` ends, by its own `save_pretrained`.

    `from_pretrained` reads the folder: the config, weights as safetensors, the generation config, the tokenizer or
    processor that is an attribute of the task; of a PeftModel the adapter alone. The weights are those that `fit`
    leaves in the task. A run that fails or is preempted writes nothing; `legato export RUN DIR --format hf` does it
    later.

    Args:
        shard_size: Size above which the weights are written into several files, such as "5GB". Default: None, the
            library's.
    """

    def __init__(self, shard_size: str | None = None) -> None:
        self.shard_size = shard_size
        self._ended = False

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Raise an error for a task that could not be written, before it is trained."""
        self._ended = False
        require_models(task)
        if not getattr(trainer.strategy, "whole_at_end", True):
            raise ConfigError(
                "ExportPretrained writes whole weights when fit ends, which whole_at_end: false leaves in parts. "
                "Remove the callback, and export a checkpoint: legato export RUN DIR --format hf"
            )

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Note that the training is complete."""
        self._ended = True

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Write nothing: the weights may be in parts."""
        self._ended = False

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Write the model on rank 0, whose task is whole again under every strategy."""
        if self._ended and stage == "fit" and trainer.is_global_zero and trainer.run_dir is not None:
            for folder in save_pretrained(task, trainer.run_dir / "pretrained", self.shard_size):
                log.info("The trained model is in %s, for from_pretrained.", folder)
        self._ended = False
