"""Legato's version of `lightning.pytorch.callbacks`."""

# fmt: off

from legato.compat.lightning.callbacks.averaging import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from legato.compat.lightning.callbacks.callback import Callback
from legato.compat.lightning.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from legato.compat.lightning.callbacks.finders import BatchSizeFinder, LearningRateFinder
from legato.compat.lightning.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
from legato.compat.lightning.callbacks.model_summary import ModelSummary, RichModelSummary
from legato.compat.lightning.callbacks.monitors import Interval, LearningRateMonitor, Timer
from legato.compat.lightning.callbacks.bars import ProgressBar, convert_inf, get_standard_metrics
from legato.compat.lightning.callbacks.tqdm_bar import RichProgressBar, RichProgressBarTheme, Tqdm, TQDMProgressBar
from legato.compat.lightning.callbacks.training import (
    BackboneFinetuning, BaseFinetuning, BasePredictionWriter, DeviceStatsMonitor, GradientAccumulationScheduler,
    LambdaCallback, OnExceptionCheckpoint, ThroughputMonitor, WriteInterval, multiplicative,
)
from legato.compat.lightning.utilities import is_local_file_protocol as _is_local_file_protocol
from legato.compat.lightning.inner import alias_below, inner_name, placeholders

ModelPruning, = placeholders(
    __name__, "ModelPruning",
    "Call torch.nn.utils.prune in on_train_epoch_end of a callback: prune.l1_unstructured(module, 'weight', "
    "amount), and prune.remove when training ends.",
)
(
    BatchesProcessedColumn, CustomBarColumn, CustomInfiniteTask, CustomProgress, CustomTimeColumn, MetricsTextColumn,
    ProcessingSpeedColumn,
) = placeholders(
    __name__, "BatchesProcessedColumn CustomBarColumn CustomInfiniteTask CustomProgress CustomTimeColumn "
    "MetricsTextColumn ProcessingSpeedColumn",
    "RichProgressBar uses tqdm, which has no columns. Override get_metrics to change the values in the bar.",
)
SpikeDetection, TrainingSpikeException = placeholders(
    __name__, "SpikeDetection TrainingSpikeException",
    "Pass the callback legato.lab.SpikeWatch to Trainer. It reports a spike's samples and can skip the update.",
)
__getattr__ = inner_name(__name__)
alias_below(__name__, """
    batch_size_finder callback checkpoint device_stats_monitor early_stopping finetuning
    gradient_accumulation_scheduler lambda_function lr_finder lr_monitor model_checkpoint model_summary
    on_exception_checkpoint prediction_writer progress progress.progress_bar progress.rich_progress
    progress.tqdm_progress pruning rich_model_summary spike stochastic_weight_avg throughput_monitor timer
    weight_averaging
""")
