"""Legato's version of `lightning.pytorch.core`."""

# fmt: off

from legato.compat.lightning.module import LightningDataModule, LightningModule
from legato.compat.lightning.optimizers import MODULE_OPTIMIZERS, LightningOptimizer, do_nothing_closure
from legato.compat.lightning.saving import (
    CHECKPOINT_PAST_HPARAMS_KEYS, convert, load_from_checkpoint as _load_from_checkpoint,
    load_hparams_from_yaml, save_hparams_to_yaml, update_hparams,
)
from legato.compat.lightning.utilities import get_filesystem, load_file as pl_load
from legato.tasks.data_hooks import DataHooks
from legato.tasks.hyperparameters import Hyperparameters as HyperparametersMixin
from legato.tasks.task_hooks import TaskHooks as CheckpointHooks, TaskHooks as ModelHooks
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

load_hparams_from_tags_csv, save_hparams_to_tags_csv = placeholders(
    __name__, "load_hparams_from_tags_csv save_hparams_to_tags_csv", "Call csv.DictReader, or load_hparams_from_yaml."
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    datamodule hooks mixins mixins.hparams_mixin module optimizer saving
""")
