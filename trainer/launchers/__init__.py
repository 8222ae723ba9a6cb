"""Launchers: how a run that is asked for here is started elsewhere, on a cluster."""

from importlib import import_module
from typing import Any

LAUNCHERS = {
    "slurm": ".slurm:SlurmLauncher",
    "ray": ".ray:RayLauncher",
}
"""The names that a config may use, and the class behind each."""

__all__ = ["LAUNCHERS", "Launcher", "RayLauncher", "SlurmLauncher"]

_HOMES = {"Launcher": ".launcher", **{home.split(":")[1]: home.split(":")[0] for home in LAUNCHERS.values()}}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
