"""Legato's version of `lightning.pytorch.loggers`."""

# fmt: off

from legato.compat.lightning.loggers import (
    LOCAL_FILE_URI_PREFIX, CSVLogger, DummyExperiment, DummyLogger, ExperimentWriter, Logger, MLFlowLogger,
    TensorBoardLogger, WANDB_AVAILABLE as _WANDB_AVAILABLE, WandbLogger, rank_zero_experiment,
    scan_checkpoints as _scan_checkpoints,
)
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

CometLogger, LitLogger, FRAMEWORK_NAME, comet_experiment = placeholders(
    __name__, "CometLogger LitLogger FRAMEWORK_NAME comet_experiment",
    "Write a logger with the service's package (subclass lightning.pytorch.loggers.Logger with name, version, "
    "log_metrics and log_hyperparams), or use WandbLogger or MLFlowLogger.",
)
merge_dicts, = placeholders(__name__, "merge_dicts", "Merge two dicts with a comprehension.")
NeptuneLogger, = placeholders(__name__, "NeptuneLogger", "Neptune has been shut down. Use WandbLogger or MLFlowLogger.")
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    comet csv_logs litlogger logger mlflow neptune tensorboard utilities wandb
""")
