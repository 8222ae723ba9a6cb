"""Callbacks: `callback.py` defines the base class with all hooks, and the other modules define specific callbacks."""

from typing import TYPE_CHECKING

from ..base.late_imports import importer

if TYPE_CHECKING:
    from .callback import Callback as Callback
    from .callback import MonitoringCallback as MonitoringCallback
    from .checkpoint import Checkpoint as Checkpoint
    from .checkpoint_callback import CheckpointCallback as CheckpointCallback
    from .device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from .early_stopping import EarlyStopping as EarlyStopping
    from .export_pretrained import ExportPretrained as ExportPretrained
    from .finetuning import BackboneFinetuning as BackboneFinetuning
    from .finetuning import BaseFinetuning as BaseFinetuning
    from .gradient_accumulation_scheduler import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from .model_summary import ModelSummary as ModelSummary
    from .on_exception import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .prediction_writer import PredictionWriter as PredictionWriter
    from .profile import Profile as Profile
    from .progress_bar import ProgressBar as ProgressBar
    from .progress_bar import ProgressDisplay as ProgressDisplay
    from .throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from .timer import Timer as Timer
    from .weight_averaging import ExponentialMovingAverage as ExponentialMovingAverage
    from .weight_averaging import WeightAveraging as WeightAveraging

_HOMES = {
    "BackboneFinetuning": ".finetuning",
    "BaseFinetuning": ".finetuning",
    "Callback": ".callback",
    "Checkpoint": ".checkpoint",
    "CheckpointCallback": ".checkpoint_callback",
    "DeviceStatsMonitor": ".device_stats_monitor",
    "EarlyStopping": ".early_stopping",
    "ExponentialMovingAverage": ".weight_averaging",
    "ExportPretrained": ".export_pretrained",
    "GradientAccumulationScheduler": ".gradient_accumulation_scheduler",
    "LambdaCallback": ".lambda_callback",
    "LearningRateMonitor": ".learning_rate_monitor",
    "ModelSummary": ".model_summary",
    "MonitoringCallback": ".callback",
    "OnExceptionCheckpoint": ".on_exception",
    "PredictionWriter": ".prediction_writer",
    "Profile": ".profile",
    "ProgressBar": ".progress_bar",
    "ProgressDisplay": ".progress_bar",
    "ThroughputMonitor": ".throughput_monitor",
    "Timer": ".timer",
    "WeightAveraging": ".weight_averaging",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # a module-level __getattr__ makes type checkers accept any name
    __getattr__ = importer(__name__, _HOMES)
