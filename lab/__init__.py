"""What studies runs: the samples of a step, replays, the first differing bit, and callbacks that watch closely."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .microscope import Microscope as Microscope
    from .spike_watch import SpikeWatch as SpikeWatch
    from .straggler_monitor import StragglerMonitor as StragglerMonitor

_HOMES = {
    "Microscope": ".microscope",
    "SpikeWatch": ".spike_watch",
    "StragglerMonitor": ".straggler_monitor",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # else any name would do for a type checker

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
