"""ExportPretrained: writes the trained model in Hugging Face format at the end of fit."""

import logging
from typing import TYPE_CHECKING

from ..base.errors import ConfigError
from ..base.pretrained import require_models, save_pretrained
from .callback import Callback

if TYPE_CHECKING:
    from ..base.contracts import Task, Trainer

log = logging.getLogger("legato")


class ExportPretrained(Callback):
    """Writes the trained model to `pretrained/` in the run directory when `fit` ends.

    The model's `save_pretrained` writes the config, the generation config and the weights as safetensors; a PeftModel
    writes only its adapter. A tokenizer or processor is also saved if it is an attribute of the task. You can load the
    folder with `from_pretrained`. The exported weights are the task's weights after `fit`. If the run fails or is
    preempted, nothing is written, but you can still export a checkpoint with `legato export RUN DIR --format hf`.

    Args:
        shard_size: Maximum size of a weights file, such as "5GB"; larger weights are split into multiple files. None:
            the library's default.

    Raises TaskError if no module of the task has `save_pretrained`, and ConfigError if `whole_at_end` is false.
    """

    def __init__(self, shard_size: str | None = None) -> None:
        self.shard_size = shard_size
        self._ended = False

    def on_fit_start(self, trainer: "Trainer", task: "Task") -> None:
        """Check before training that the task can be exported."""
        self._ended = False
        require_models(task)
        if not getattr(trainer.strategy, "whole_at_end", True):
            raise ConfigError(
                "ExportPretrained needs the full weights when fit ends, but whole_at_end=false leaves them sharded. "
                "Remove the callback and export a checkpoint: legato export RUN DIR --format hf"
            )

    def on_fit_end(self, trainer: "Trainer", task: "Task") -> None:
        """Record that training is complete."""
        self._ended = True

    def on_exception(self, trainer: "Trainer", task: "Task", exception: BaseException) -> None:
        """Cancel the export, because the weights may be sharded."""
        self._ended = False

    def teardown(self, trainer: "Trainer", task: "Task", stage: str) -> None:
        """Write the model on rank 0, where the task now has the full weights with any strategy."""
        if self._ended and stage == "fit" and trainer.is_global_zero and trainer.run_dir is not None:
            for folder in save_pretrained(task, trainer.run_dir / "pretrained", self.shard_size):
                log.info("Saved the trained model to %s. Load it with from_pretrained.", folder)
        self._ended = False
