"""Callbacks: the base class with all hooks in `callback.py`, and one callback per other module."""

from importlib import import_module
from typing import Any

_HOMES = {
    "BackboneFinetuning": ".finetuning",
    "BaseFinetuning": ".finetuning",
    "Callback": ".callback",
    "Checkpoint": ".checkpoint",
    "CheckpointCallback": ".checkpoint_callback",
    "DeviceStatsMonitor": ".device_stats_monitor",
    "EarlyStopping": ".early_stopping",
    "ExponentialMovingAverage": ".ema",
    "GradientAccumulationScheduler": ".gradient_accumulation_scheduler",
    "LambdaCallback": ".lambda_callback",
    "LearningRateMonitor": ".learning_rate_monitor",
    "ModelSummary": ".model_summary",
    "OnExceptionCheckpoint": ".on_exception",
    "PredictionWriter": ".prediction_writer",
    "ProgressBar": ".progress_bar",
    "ProgressDisplay": ".progress_bar",
    "StochasticWeightAveraging": ".swa",
    "StragglerMonitor": ".straggler_monitor",
    "ThroughputMonitor": ".throughput_monitor",
    "Timer": ".timer",
    "WeightAveraging": ".weight_averaging",
}
__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "Checkpoint",
    "CheckpointCallback",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "ProgressDisplay",
    "StochasticWeightAveraging",
    "StragglerMonitor",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
