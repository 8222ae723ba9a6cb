"""Callbacks: the base class with all hooks in `callback.py`, and one callback per other module."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Callback": ".callback",
    "Checkpoint": ".checkpoint",
    "EarlyStopping": ".early_stopping",
    "ExponentialMovingAverage": ".ema",
    "LearningRateMonitor": ".learning_rate_monitor",
    "ModelSummary": ".model_summary",
    "ProgressBar": ".progress_bar",
    "StragglerMonitor": ".straggler_monitor",
    "ThroughputMonitor": ".throughput_monitor",
    "Timer": ".timer",
}
__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "LearningRateMonitor",
    "ModelSummary",
    "ProgressBar",
    "StragglerMonitor",
    "ThroughputMonitor",
    "Timer",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
