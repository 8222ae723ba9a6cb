"""Tools for studying runs: sample lookup, replays, verification, and callbacks that monitor training in detail."""

from typing import TYPE_CHECKING

from ..base.late_imports import importer

if TYPE_CHECKING:
    from .microscope import Microscope as Microscope
    from .spike_watch import SpikeWatch as SpikeWatch
    from .straggler_monitor import StragglerMonitor as StragglerMonitor
    from .study import replay as replay
    from .study import samples as samples
    from .study import verify as verify

_HOMES = {
    "Microscope": ".microscope",
    "SpikeWatch": ".spike_watch",
    "StragglerMonitor": ".straggler_monitor",
    "replay": ".study",
    "samples": ".study",
    "verify": ".study",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = importer(__name__, _HOMES)
