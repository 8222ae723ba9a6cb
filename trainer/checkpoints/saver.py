"""Saves the run: the one place from which checkpoints are written."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..finite import require_finite
from . import checkpoint
from .contents import contents, left_by_workers

if TYPE_CHECKING:
    from ..trainer import Trainer


def save(trainer: "Trainer", path: Path, weights_only: bool, asynchronous: bool) -> None:
    """Write a checkpoint of this moment; every rank calls it. A point that is due is logged before, lest it be lost."""
    with trainer.strategy.timeouts.during("checkpoint"):
        _save(trainer, path, weights_only, asynchronous)


def _save(trainer: "Trainer", path: Path, weights_only: bool, asynchronous: bool) -> None:
    if trainer.strategy.task is None:
        checkpoint.write(path, left_by_workers(trainer, weights_only))
        return
    step = trainer.global_step
    if trainer.training and step and step % trainer.log_every_n_steps == 0:
        trainer.log_step()
    require_finite(trainer.current_run)
    found = contents(trainer, weights_only)
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.save()  # what a resume counts as logged must be on disk before the checkpoint that says so
    writers = trainer.strategy.writers
    if writers is not None or trainer.is_global_zero:
        write = trainer.writer.save if asynchronous else checkpoint.write
        write(path, found, ranks=checkpoint.ALONE if writers is None else writers)
    trainer.strategy.barrier()
